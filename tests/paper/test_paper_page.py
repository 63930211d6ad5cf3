"""The page of all recipes says what was found, whatever signs are in it, and links to nothing that is not there."""

from __future__ import annotations

import html
import re

import pytest
from markdown_it import MarkdownIt

from mukron.paper.outcome import Judged, Outcome, judge_claims
from mukron.paper.page import escape_markdown, page_of, write_page
from mukron.paper.recipe import (
    FAILS,
    HOLDS,
    IN_PART,
    RECIPES,
    UNTOLD,
    Claim,
    Evidence,
    Experiment,
    Finding,
    Recipe,
)
from mukron.params.storage import write_json

NASTY = "a|b *c* _d_ <b>e</b> `f` [g](h) $i$ #j ~k~ \\l & &lt; x_1"
FILES = ("figure.svg", "numbers.csv", "evidence.json", "result.json")


def outcome(name, verdict=HOLDS, **changes):
    claims = (Judged("Wider is better.", "64.96", HOLDS, "wider is better by 0.3"),)
    if verdict != HOLDS:
        claims = (*claims, Judged("It transfers.", "", verdict, "it moves by +0.5", "twice the epochs"))
    made = {"command": f"mukron reproduce {name}", "date": "2024-05-07 12:00 UTC", "machine": "2 cores", "torch": "2.6"}
    return Outcome(
        name,
        **{"scale": "small", "less": "", "verdict": verdict, "claims": claims, "choices": (), "made": made, **changes},
    )


@pytest.fixture
def recipes():
    """Five made-up recipes in place of the paper's."""
    before = dict(RECIPES)
    RECIPES.clear()
    for number, name in enumerate(("one", "two", "three", "four", "five"), 1):
        RECIPES[name] = Recipe(name, f"Figure {number}", f"The title of {name}", make=lambda scale: pytest.fail("run"))
    yield RECIPES
    RECIPES.clear()
    RECIPES.update(before)


def every_verdict():
    return {
        name: outcome(name, verdict)
        for name, verdict in zip(("one", "two", "three", "four"), (HOLDS, IN_PART, FAILS, UNTOLD), strict=True)
    }


def rendered(page):
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(page)


def plain(page):
    """What a reader sees."""
    return html.unescape(re.sub(r"<[^>]+>", "", rendered(page)))


def section(page, name):
    return page.partition(f'<a id="{name}"></a>')[2].partition("<a id=")[0]


def test_the_head_counts_what_was_run_and_what_became_of_it(recipes):
    page = page_of(every_verdict())
    assert "4 of 5 recipes were run" in page
    assert "1 hold, 1 hold in part, 1 do not hold, 1 cannot be determined" in page
    assert "0 of 5 recipes were run.**\n" in page_of({})


def test_claims_of_our_own_are_counted_apart(recipes):
    own = Judged("Ours stays.", "", FAILS, "it moves", ours=True)
    page = page_of({"one": outcome("one", claims=(Judged("It stays.", "", HOLDS, "yes"), own))})
    assert "Of 1 claims of the paper 1 hold, 0 hold in part, 0 do not hold, 0 cannot be determined." in page
    assert "Of 1 claims of our own 0 hold, 0 hold in part, 1 do not hold, 0 cannot be determined." in page
    assert "Ours stays. (Ours.) does not hold" in plain(section(page, "one"))
    assert "It stays. holds" in plain(section(page, "one"))


def test_the_verdict_on_a_recipe_is_on_the_claims_of_the_paper():
    def claim(verdict, ours):
        return Claim("x", lambda evidence: Finding(verdict, "y"), ours=ours)

    def judged(*claims):
        experiment = Experiment({}, claims, lambda evidence: pytest.fail("drawn"))
        return judge_claims("one", "small", "", experiment, Evidence(), {}).verdict

    assert judged(claim(HOLDS, ours=False), claim(FAILS, ours=True)) == HOLDS
    assert judged(claim(FAILS, ours=True), claim(FAILS, ours=True)) == FAILS


def test_a_verdict_that_changed_with_its_rule_stands_beside_the_earlier_one(recipes):
    changed = Judged("It stays.", "", UNTOLD, "drift unknown", earlier=HOLDS, rule="Earlier, the grid was enough.")
    page = page_of({"one": outcome("one", claims=(changed,)), "two": outcome("two")})
    head = page.partition("## The recipes")[0]
    assert "| [Figure 1](#one) | It stays. | holds | cannot be determined |" in head
    assert "Claims judged otherwise: 1." in head
    assert "By the earlier rule: holds. Earlier, the grid was enough." in plain(section(page, "one"))
    assert "earlier rule" not in page_of({"two": outcome("two")})


def test_minutes_and_the_commit_are_said(recipes):
    made = {"command": "mukron reproduce one", "machine": "2 cores", "commit": "0123456789ab"}
    page = page_of({"one": outcome("one", made=made, minutes=12.4), "two": outcome("two", minutes=3.0)})
    assert "15 minutes of training, where" in page.partition("## The recipes")[0]
    row = next(line for line in page.splitlines() if line.startswith("| ") and "The title of one" in line)
    assert "<br>12 minutes |" in row
    assert "commit: 0123456789ab" in section(page, "one")
    assert "commit: not recorded" in section(page, "two")


def test_a_reduced_result_is_not_of_the_papers_scale(recipes):
    page = page_of(
        {"one": outcome("one", scale="paper", less="3 epochs at most"), "two": outcome("two", scale="paper")}
    )
    assert "By scale: 1 paper, reduced; 1 paper." in page
    assert "Scale: smaller than the paper's; reduced: 3 epochs at most." in plain(section(page, "one"))
    assert "Scale: the paper's own." in plain(section(page, "two"))


def test_the_same_claims_from_other_initial_weights_stand_side_by_side(recipes):
    recipes["zero-transfer"], recipes["zero-transfer-weights"] = recipes["one"], recipes["two"]
    one = outcome("one", claims=(Judged("SP falls.", "", HOLDS, "81 to 73"), Judged("SGD moves.", "", HOLDS, "down")))
    two = outcome("two", claims=(Judged("SP falls.", "", FAILS, "91 to 93"),))
    page = page_of({"zero-transfer": one, "zero-transfer-weights": two})
    assert "| SP falls. | **holds**<br>81 to 73 | **does not hold**<br>91 to 93 |" in page
    assert "kaiming_normal_(a=1), which is this variance" in plain(page)
    assert "SGD moves. |" not in page.partition("## The recipes")[0]
    assert "What the initial weights decide" not in page_of({"zero-transfer": one})


def test_every_verdict_stands_in_the_table_and_in_its_section(recipes):
    page = page_of(every_verdict())
    rows = re.findall(r"<tr>.*?</tr>", rendered(page), re.DOTALL)[1:]
    assert len(rows) == 5
    for row, (name, each) in zip(rows, every_verdict().items(), strict=False):
        assert f"<strong>{each.verdict}</strong>" in row
        assert f"Found: **{each.verdict}**" in section(page, name)


def test_one_that_was_not_run_is_listed_with_its_command(recipes):
    page = page_of(every_verdict())
    (row,) = [line for line in page.splitlines() if "The title of five" in line]
    assert "not run yet" in row
    assert "`mukron reproduce five --scale paper --device cuda`" in row
    assert '<a id="five">' not in page


def test_a_section_says_the_papers_number_ours_and_what_was_tried(recipes):
    page = page_of(
        {"two": outcome("two", FAILS, choices=("Loss: not given; mse.",), less="2 epochs at most")}, {"two": FILES}
    )
    seen = plain(section(page, "two"))
    for words in (
        "The paper: 64.96",
        "Here: wider is better by 0.3",
        "Tried: twice the epochs",
        "Loss: not given; mse.",
        "reduced: 2 epochs at most",
        "machine: 2 cores",
        "torch: 2.6",
        "date: 2024-05-07",
    ):
        assert words in seen
    assert seen.count("Tried:") == 1
    assert "```sh\nmukron reproduce two\n```" in page
    assert re.findall(r"\]\((two/[^)]+)\)", page) == ["two/numbers.csv", "two/evidence.json", "two/result.json"]


def test_smoke_is_said_to_show_nothing(recipes):
    assert "shows that the recipe runs and nothing else" in section(
        page_of({"one": outcome("one", scale="smoke")}), "one"
    )


def test_a_file_that_is_not_there_is_neither_shown_nor_linked(recipes):
    without = page_of(every_verdict(), {"one": ["result.json"]})
    assert "<img" not in without
    assert "numbers.csv" not in without
    assert "](one/result.json)" in without
    page = page_of(every_verdict(), {"one": FILES})
    assert page.count('src="one/figure.svg"') == 2
    assert (
        '<a href="one/figure.svg"><img src="one/figure.svg" width="180" alt="Figure 1: The title of one"></a>' in page
    )


def test_signs_of_markdown_are_read_as_they_are(recipes):
    recipes["one"] = Recipe("one", NASTY, NASTY, make=recipes["one"].make)
    judged = (Judged(NASTY, NASTY, FAILS, NASTY, NASTY),)
    made = {"command": "mukron reproduce one --note '```'", "machine": NASTY}
    page = page_of(
        {"one": outcome("one", FAILS, claims=judged, choices=(NASTY,), less=NASTY, made=made)}, {"one": FILES}
    )
    first = next(line for line in page.splitlines() if line.startswith('| <a href="one'))
    cells = re.search(r"<tr>\n(<td>.*?)</tr>", rendered(page), re.DOTALL)
    assert cells is not None
    assert cells.group(1).count("<td>") == 4
    assert first.count(r"\|") == 4  # where, title, claim and scale
    seen = plain(page)
    assert seen.count(NASTY) == 4 + 2 + 1 + 4 + 1 + 1  # the table; heading; reduced; claim; choice; machine
    assert "mukron reproduce one --note '```'\n" in seen
    assert re.findall(r"<(em|del|b)>", rendered(page)) == ["em"]  # the title of the paper


@pytest.mark.parametrize("words", ["- a", "+ b", "12. c", "3) d", "-", "# e", "> f", "-0.5 g", "1.5 h", "=== i"])
def test_words_open_no_list_and_no_heading(words):
    assert rendered(f"- {escape_markdown(words)}") == f"<ul>\n<li>{words.replace('>', '&gt;')}</li>\n</ul>\n"


def test_lines_are_joined():
    assert escape_markdown("a\n\n- b\t c") == "a - b c"


def test_many_long_claims_are_cut_in_the_table_alone(recipes):
    claims = tuple(Judged(f"Claim {number} " + "is long " * 40, "", HOLDS, "yes") for number in range(5))
    page = page_of({"one": outcome("one", claims=claims)})
    row = next(line for line in page.splitlines() if line.startswith("| ") and "Claim 0" in line)
    assert "Claim 2" in row
    assert "Claim 3" not in row
    assert "and 2 more" in row
    assert len(row) < 800
    assert section(page, "one").count("is long " * 39) == 5


def test_links_of_the_table_lead_to_the_sections(recipes):
    page = page_of(every_verdict())
    targets = re.findall(r"\]\(#([^)]+)\)", page)
    assert targets == ["one", "two", "three", "four"]
    assert all(f'<a id="{target}"></a>' in page for target in targets)


def test_the_page_is_written_from_the_folder_and_is_the_same_each_time(recipes, tmp_path):
    for name, each in reversed(every_verdict().items()):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "result.json", each.to_dict())
    (tmp_path / "two" / "figure.svg").write_text("<svg/>")
    path = write_page(tmp_path)
    first = path.read_text(encoding="utf-8")
    assert path == tmp_path / "README.md"
    assert first.count("<img") == 2
    assert write_page(tmp_path).read_text(encoding="utf-8") == first
    files = {name: ["result.json"] for name in every_verdict()}
    files["two"].append("figure.svg")
    assert first == page_of(every_verdict(), files)
    for target in re.findall(r'(?:\]\(|src=")(?!#|http)([^)"]+)', first):
        assert (tmp_path / target).exists()
