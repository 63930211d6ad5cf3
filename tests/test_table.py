"""Tables fit the page without losing what they say, and show as HTML in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from mukron.table import EVERY_COLUMN, Table

LONG = "blocks.0-11.attention.self.{query,key,value}.weight"


def table(rows: int = 3, minor: tuple[str, ...] = ("base shape",), name: str = LONG) -> Table:
    cells = tuple(
        (f"{name}{row}", "8 x 8", f"{row} x {row}", "1", f"reason {row % 2} " + "x" * 60) for row in range(rows)
    )
    return Table("Title", ("parameter", "shape", "base shape", "lr x", "why"), cells, ("A note.",), minor)


def lines_of(text: str) -> list[str]:
    return text.splitlines()


def test_a_table_that_fits_is_printed_as_it_is():
    narrow = Table("T", ("a", "why"), (("1", "same"), ("2", "same")))
    assert narrow.narrowed(20) is narrow
    assert str(narrow) == narrow.text(width=None)


def test_lines_of_any_length_hold_everything():
    text = table().text(width=None)
    assert max(map(len, lines_of(text))) > 120
    assert all(cell in text for row in table().rows for cell in row)
    assert EVERY_COLUMN not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_wide_table_fits_the_page_and_says_what_is_left_out(width):
    text = table().text(width=width)
    assert max(map(len, lines_of(text))) <= width
    joined = " ".join(text.split())
    assert all(f"({number}) reason" in joined for number in (1, 2))
    if width < 80:
        assert "Left out: base shape." in joined
        assert "The same in every row: shape 8 x 8, lr x 1." in joined


def test_reasons_are_numbered_by_row():
    narrow = table(4).narrowed(100)
    assert [row[-1] for row in narrow.rows] == ["(1)", "(2)", "(1)", "(2)"]
    assert narrow.notes[-1] == "A note."


def test_minor_columns_stay_where_there_is_room():
    assert "base shape" in table().narrowed(80).columns
    assert "base shape" not in table().narrowed(60).columns
    assert "base shape" in table(minor=()).narrowed(60).columns


def test_one_row_has_no_constant_columns():
    assert table(1).narrowed(60).columns == ("parameter", "shape", "lr x", "why")


def test_wrapped_cells_stay_whole_when_their_lines_are_joined():
    cell = "a." * 40 + "weight"
    narrow = Table("T", ("name", "x"), ((cell, "1"), ("b", "2"))).narrowed(40)
    assert narrow.width <= 40
    assert narrow.rows[0][0].replace("\n  ", "") == cell
    text = str(narrow)
    assert len(lines_of(text)) > 6
    assert lines_of(text)[4].endswith("  1")  # other cells stand beside the first line


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_holds_every_cell_and_escapes_names():
    shown = Table("<b>T</b>", ("a", "why"), (("<script>alert(1)</script>", "x & y"),), ("<i>note</i>",))._repr_html_()
    page = Tags(shown)
    assert not page.open
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert {"<b>T</b>", "<script>alert(1)</script>", "x & y", "<i>note</i>"} <= set(page.texts)
    assert "http" not in shown


def test_html_has_a_cell_for_each_of_the_table():
    page = Tags(table(5)._repr_html_())
    assert (page.tags.count("tr"), page.tags.count("td"), page.tags.count("th")) == (6, 25, 5)
