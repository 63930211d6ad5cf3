"""A table as data: it prints as text that fits a page, shows as HTML in notebooks, and the command line can draw it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from textwrap import wrap

from mukron.printable import printable

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))
PAGE_WIDTH = 120  # characters in a line of a printed table
NARROWEST = (24, 12)  # characters that are left to a column whose cells are wrapped, at first and if need be
EVERY_COLUMN = "table.text(width=None) has every column."  # in the note of a narrow table
REASON_COLUMN = "why"  # the last column of some tables: sentences, which stand below a narrow table


@dataclass(frozen=True, repr=False)
class Table:
    """A table of text. Print it, show it in a notebook, or read its columns and rows.

    Attributes:
        title: The line above the table.
        columns: The heads of the columns.
        rows: The cells, row by row.
        notes: Lines below the table.
        minor: Columns that are left out first where the table is wider than the page.

    Example:
        >>> from mukron.table import Table
        >>> print(Table("Squares", ("x", "x^2"), (("1", "1"), ("12", "144"))))
        Squares
        <BLANKLINE>
        x   x^2
        --  ---
        1   1
        12  144
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    minor: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of characters in a line."""
        return sum(self._widths) + 2 * (len(self.columns) - 1)

    @property
    def _widths(self) -> list[int]:
        return [max(map(_cell_width, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    def narrowed(self, width: int) -> Table:
        """Fit the table into lines of a width, as far as that is possible.

        In this order, and no further than needed: sentences of the column "why" move below the table, columns with
        the same cell in every row become a note, minor columns are left out, and long cells are wrapped.

        Args:
            width: The number of characters in a line.

        Returns:
            The narrow table; the same one if it fits.
        """
        table = self
        for step in (_reasons_below, _without_constants, _without_minor):
            if table.width > width:
                table = step(table)
        return _wrapped(table, width) if table.width > width else table

    def text(self, width: int | None = PAGE_WIDTH) -> str:
        """Return the table as text.

        Args:
            width: The number of characters in a line. None: lines of any length, with every column.

        Returns:
            The text.
        """
        table = self if width is None else self.narrowed(width)
        widths = table._widths
        lines = [table.title, "", *_lines(table.columns, widths), "  ".join("-" * size for size in widths)]
        lines += [line for row in table.rows for line in _lines(row, widths)]
        notes = [line for note in table.notes for line in ([note] if width is None else _folded(note, width))]
        return printable("\n".join([*lines, *(["", *notes] if notes else [])]))

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        cell = "text-align: left; vertical-align: top; padding: 0.15em 0.7em 0.15em 0"
        line = "border-bottom: 1px solid rgba(128, 128, 128, 0.5)"  # seen on light and on dark pages
        sentences = len(self.columns) - 1 if self.columns[-1:] == (REASON_COLUMN,) else -1

        def cells(row: tuple[str, ...], tag: str, style: str) -> str:
            texts = [
                f'<{tag} style="{style}; white-space: {"normal" if place == sentences else "nowrap"}">'
                f"{escape(text)}</{tag}>"
                for place, text in enumerate(row)
            ]
            return f"<tr>{''.join(texts)}</tr>"

        head = cells(self.columns, "th", f"{cell}; {line}")
        body = "\n".join(cells(row, "td", cell) for row in self.rows)
        notes = "".join(f'<div style="font-size: 90%; opacity: 0.8">{escape(note)}</div>' for note in self.notes)
        return (
            f'<div style="color: inherit">\n<div style="margin: 0.4em 0"><b>{escape(self.title)}</b></div>\n'
            '<div style="overflow: auto; max-height: 36em">\n<table style="border-collapse: collapse; margin: 0">\n'
            f"<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table>\n</div>\n{notes}\n</div>"
        )


def _reasons_below(table: Table) -> Table:
    """Number the sentences of the last column, and list them below the table."""
    if table.columns[-1:] != (REASON_COLUMN,):
        return table
    reasons = list(dict.fromkeys(row[-1] for row in table.rows))
    rows = tuple((*row[:-1], f"({1 + reasons.index(row[-1])})") for row in table.rows)
    numbered = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    return replace(table, rows=rows, notes=(*numbered, *([""] if table.notes else []), *table.notes))


def _without_constants(table: Table) -> Table:
    """Say once what is the same in every row."""
    constant = [
        place
        for place in range(1, len(table.columns))
        if len({row[place] for row in table.rows}) == 1 < len(table.rows)
    ]
    if not constant:
        return table
    same = ", ".join(f"{table.columns[place]} {table.rows[0][place]}".strip() for place in constant)
    return _without(table, constant, f"The same in every row: {same}.")


def _without_minor(table: Table) -> Table:
    minor = [place for place, column in enumerate(table.columns) if column in table.minor]
    if not minor:
        return table
    names = ", ".join(table.columns[place] for place in minor)
    return _without(table, minor, f"Left out: {names}. {EVERY_COLUMN}")


def _without(table: Table, places: list[int], note: str) -> Table:
    kept = [place for place in range(len(table.columns)) if place not in places]
    columns = tuple(table.columns[place] for place in kept)
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=columns, rows=rows, notes=(note, *table.notes))


def _wrapped(table: Table, width: int) -> Table:
    """Wrap the cells of the widest column, then of the next one, until the table fits."""
    for narrowest, _ in product(NARROWEST, table.columns):
        widths = table._widths
        widest = max(range(len(widths)), key=widths.__getitem__)
        room = max(narrowest, widths[widest] - (table.width - width))
        if table.width <= width or widths[widest] <= room:
            continue
        rows = tuple((*row[:widest], _broken(row[widest], room), *row[widest + 1 :]) for row in table.rows)
        table = replace(table, rows=rows)
    return table


def _broken(cell: str, room: int) -> str:
    """Break a list behind its commas, a name behind dots and commas; what has none is left whole."""
    lines = [""]
    for part in re.split(r"(?<=, )" if ", " in cell else r"(?<=[,])|(?<=[.])(?![0-9])|(?<= )", cell):
        if lines[-1].strip() and len(lines[-1]) + len(part.rstrip()) > room:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _folded(note: str, width: int) -> list[str]:
    return wrap(note, width, break_long_words=False, break_on_hyphens=False) or [""]


def _cell_width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _lines(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """The lines of one row; more than one where a cell is wrapped."""
    parts = [cell.split("\n") for cell in cells]
    return [
        "  ".join(
            (part[number] if number < len(part) else "").ljust(width) for part, width in zip(parts, widths, strict=True)
        ).rstrip()
        for number in range(max(map(len, parts), default=1))
    ]


def bytes_(number: float) -> str:
    """A number of bytes as a cell, with its unit.

    Args:
        number: The number.

    Returns:
        The cell.

    Example:
        >>> bytes_(3 * 2**30)
        '3 GiB'
    """
    size, unit = next(pair for pair in UNITS if number >= pair[0] or pair is UNITS[-1])
    return f"{number / size:.{4 if number >= 1000 * size else 3}g} {unit}"
