"""The page of all recipes says what was found, whatever signs are in it, and links to nothing that is not there."""

from __future__ import annotations

import html
import re

import pytest
from markdown_it import MarkdownIt

from mukron.paper import page as pages
from mukron.paper.effects import Effect
from mukron.paper.headlines import AcrossNetworks, Headline
from mukron.paper.markdown import escape_markdown
from mukron.paper.outcome import Judged, Outcome, judge_claims
from mukron.paper.page import PAGE_FILE, RULES_FILE, WEIGHTS_FILE, page_of, pages_of, write_page
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
from mukron.paper.remarks import NOT_RUN, Disagreement
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


def own_page(outcomes, name, files=None):
    return pages_of(outcomes, files)[f"{name}/{PAGE_FILE}"]


def test_the_head_counts_what_was_run_and_what_became_of_it(recipes):
    page = page_of(every_verdict())
    assert "4 of 5 recipes were run" in page
    assert "1 hold, 1 hold in part, 1 do not hold, 1 cannot be determined" in page
    assert "0 of 5 recipes were run.**\n" in page_of({})


def test_claims_of_our_own_are_counted_apart(recipes):
    own = Judged("Ours stays.", "", FAILS, "it moves", ours=True)
    found = {"one": outcome("one", claims=(Judged("It stays.", "", HOLDS, "yes"), own))}
    page = page_of(found)
    assert "Of 1 claims of the paper 1 hold, 0 hold in part, 0 do not hold, 0 cannot be determined." in page
    assert "Of 1 claims of our own 0 hold, 0 hold in part, 1 do not hold, 0 cannot be determined." in page
    assert "Ours stays. (Ours.) does not hold" in plain(own_page(found, "one"))
    assert "It stays. holds" in plain(own_page(found, "one"))


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
    found = {"one": outcome("one", claims=(changed,)), "two": outcome("two")}
    written = pages_of(found)
    assert "| [Figure 1](one/README.md) | It stays. | holds | cannot be determined |" in written[RULES_FILE]
    assert "Claims judged otherwise: 1." in written[RULES_FILE]
    assert f"because their rule changed: [1]({RULES_FILE})" in written[PAGE_FILE]
    assert "By the earlier rule: holds. Earlier, the grid was enough." in plain(own_page(found, "one"))
    without = pages_of({"two": outcome("two")})
    assert RULES_FILE not in without
    assert RULES_FILE not in without[PAGE_FILE]


def test_minutes_and_the_commit_are_said(recipes):
    made = {"command": "mukron reproduce one", "machine": "2 cores", "commit": "0123456789ab"}
    found = {"one": outcome("one", made=made, minutes=12.4), "two": outcome("two", minutes=0.3)}
    page = page_of(found)
    assert "13 minutes of training, where" in page.partition("## The recipes")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "The title of" in line]
    assert rows[0].endswith("<br>12 minutes |")
    assert rows[1].endswith("<br>18 seconds |")
    assert "commit: 0123456789ab; 12 minutes of training" in own_page(found, "one")
    assert "commit: not recorded; 18 seconds of training" in own_page(found, "two")


def test_a_reduced_result_is_not_of_the_papers_scale(recipes):
    found = {"one": outcome("one", scale="paper", less="3 epochs at most"), "two": outcome("two", scale="paper")}
    page = page_of(found)
    assert "By scale: 1 paper, reduced; 1 paper." in page
    assert "scale: paper, reduced: 3 epochs at most" in page
    assert "Scale: smaller than the paper's; reduced: 3 epochs at most." in plain(own_page(found, "one"))
    assert "Scale: the paper's own." in plain(own_page(found, "two"))


def test_the_same_claims_from_other_initial_weights_stand_side_by_side(recipes):
    recipes["zero-transfer"], recipes["zero-transfer-weights"] = recipes["one"], recipes["two"]
    one = outcome("one", claims=(Judged("SP falls.", "", HOLDS, "81 to 73"), Judged("SGD moves.", "", HOLDS, "down")))
    two = outcome("two", claims=(Judged("SP falls.", "", FAILS, "91 to 93"),))
    written = pages_of({"zero-transfer": one, "zero-transfer-weights": two})
    page = written[WEIGHTS_FILE]
    assert "| SP falls. | **holds**<br>81 to 73 | **does not hold**<br>91 to 93 |" in page
    assert "kaiming_normal_(a=1), which is this variance" in plain(page)
    assert "SGD moves. |" not in page
    assert f"({WEIGHTS_FILE})" in written[PAGE_FILE]
    assert WEIGHTS_FILE not in pages_of({"zero-transfer": one})


# The head of the page: what is claimed in the abstract, where we disagree, claims by network.


@pytest.fixture
def asked(recipes, monkeypatch):
    """A question on two networks, in place of the paper's, and what was found."""
    answers = {"MLP": ("one", "It rises."), "MLP (wide)": ("one", "It rises more."), "CNN": ("two", "It rises.")}
    others = {"MLP": ("three", "It was not run."), "MLP, tanh": ("two", "Ours rises.")}
    first, second = AcrossNetworks("Does it rise?", answers, brief="rise"), AcrossNetworks("Is it so?", others)
    monkeypatch.setattr(pages, "ABSTRACT_CLAIMS", (Headline("Everything rises", (first, second), "One seed."),))
    monkeypatch.setattr(pages, "CLAIMS_BY_NETWORK", (first, second, AcrossNetworks("Unasked", {"MLP": ("five", "x")})))
    wide = Judged("It rises more.", "", UNTOLD, "up", effect=Effect(3.0, 2.0, 4.0, "points"))
    one = (Judged("It rises.", "", HOLDS, "up", effect=Effect(1.0, 0.5, 1.5, "points")), wide)
    two = (
        Judged("It rises.", "", FAILS, "down", effect=Effect(-2.0, None, None, "points")),
        Judged("Ours rises.", "", FAILS, "down", ours=True, effect=Effect(-9.0, None, None, "points")),
    )
    return {"one": outcome("one", claims=one), "two": outcome("two", claims=two)}


def test_the_abstracts_claims_stand_first_with_verdict_effect_and_caveat(asked):
    page = page_of(asked)
    head = plain(page.partition("## ")[0])
    assert "Everything rises" in head
    assert "holds in part1 hold, 1 do not hold, 1 cannot be determined" in head
    assert "rise: -2.00 (one seed) (CNN) to +3.00 [+2.00, +4.00] (MLP, wide: cannot be determined) points" in head
    assert "One seed. MLP, tanh (ours): does not hold, -9.00 points (one seed)." in head


def test_the_matrix_has_a_cell_for_every_answer_and_no_empty_rows(asked):
    page = page_of(asked)
    matrix = page.partition("## Claims by network")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in matrix.splitlines() if line.startswith("|")]
    assert rows[0] == ["", "MLP", "MLP, tanh", "CNN"]
    first, second = rows[2:]
    assert first[0] == "Does it rise?, points"
    assert first[1].startswith("[**holds**](one/README.md)<br>+1.00 ")
    assert "<br>wide: [**cannot be determined**](one/README.md)<br>+3.00" in first[1]
    assert first[2:] == ["", "[**does not hold**](two/README.md)<br>-2.00 (one seed)"]
    assert second[1:] == ["", "[**does not hold**](two/README.md)<br>(ours)<br>-9.00 (one seed)", ""]


def test_where_we_disagree_is_what_does_not_hold_now(asked, monkeypatch):
    both = Disagreement("CNNs fall", (("two", "It rises."), ("one", "It rises.")), "Too few seeds.")
    monkeypatch.setattr(pages, "DISAGREEMENTS", (both, Disagreement("MLPs fall", (("one", "It rises."),), "Nothing.")))
    (entry,) = re.findall(r"^- .*$", page_of(asked).partition("## Where we disagree")[2].partition("## ")[0], re.M)
    assert entry == "- **CNNs fall.** [Figure 2](two/README.md) -2.00 points (one seed). Too few seeds."


def test_nothing_is_said_of_the_abstract_where_nothing_was_run(recipes):
    page = page_of({})
    assert "abstract" not in page
    assert "by network" not in page
    assert "disagree" not in page


def test_every_verdict_stands_in_the_table_and_on_its_page(recipes):
    page = page_of(every_verdict())
    rows = [row for row in re.findall(r"<tr>.*?</tr>", rendered(page), re.DOTALL) if "<td>" in row]
    assert len(rows) == 5
    for row, (name, each) in zip(rows, every_verdict().items(), strict=False):
        assert f"<strong>{each.verdict}</strong>" in row
        assert f"Found: **{each.verdict}**" in own_page(every_verdict(), name)


def test_one_that_was_not_run_is_listed_with_its_command_and_the_reason(recipes, monkeypatch):
    monkeypatch.setitem(NOT_RUN, "five", "It needs a GPU.")
    page = page_of(every_verdict())
    (row,) = [line for line in page.splitlines() if "The title of five" in line]
    assert "| It needs a GPU. |" in row
    assert "`mukron reproduce five --scale paper --device cuda`" in row
    assert f"five/{PAGE_FILE}" not in pages_of(every_verdict())


def test_a_page_says_the_papers_number_ours_and_what_was_tried(recipes):
    found = {"two": outcome("two", FAILS, choices=("Loss: not given; mse.",), less="2 epochs at most")}
    page = own_page(found, "two", {"two": FILES})
    seen = plain(page)
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
    assert re.findall(r"\]\(([^)]+)\)", page) == [*FILES, "../README.md"]


def test_smoke_is_said_to_show_nothing(recipes):
    assert "shows that the recipe runs and nothing else" in own_page({"one": outcome("one", scale="smoke")}, "one")


def test_a_file_that_is_not_there_is_neither_shown_nor_linked(recipes):
    without = pages_of(every_verdict(), {"one": ["result.json"]})
    assert "<img" not in "".join(without.values())
    assert "numbers.csv" not in "".join(without.values())
    assert "](result.json)" in without["one/README.md"]
    written = pages_of(every_verdict(), {"one": FILES})
    small = '<a href="one/figure.svg"><img src="one/figure.svg" width="180" alt="Figure 1: The title of one"></a>'
    assert small in written[PAGE_FILE]
    large = '<a href="figure.svg"><img src="figure.svg" alt="Figure 1: The title of one"></a>'
    assert large in written["one/README.md"]


def test_signs_of_markdown_are_read_as_they_are(recipes):
    recipes["one"] = Recipe("one", NASTY, NASTY, make=recipes["one"].make)
    judged = (Judged(NASTY, NASTY, FAILS, NASTY, NASTY),)
    made = {"command": "mukron reproduce one --note '```'", "machine": NASTY}
    found = {"one": outcome("one", FAILS, claims=judged, choices=(NASTY,), less=NASTY, made=made)}
    page = page_of(found, {"one": FILES})
    first = next(line for line in page.splitlines() if line.startswith('| <a href="one'))
    cells = re.search(r"<tr>\n(<td>.*?)</tr>", rendered(page), re.DOTALL)
    assert cells is not None
    assert cells.group(1).count("<td>") == 3
    assert first.count(r"\|") == 3  # where, title and scale
    assert plain(page).count(NASTY) == 3
    assert re.findall(r"<(em|del|b)>", rendered(page)) == ["em"]  # the title of the paper
    page = own_page(found, "one", {"one": FILES})
    assert plain(page).count(NASTY) == 2 + 1 + 4 + 1 + 1  # heading; reduced; claim; choice; machine
    assert "mukron reproduce one --note '```'\n" in plain(page)
    assert not re.findall(r"<(em|del|b)>", rendered(page))


@pytest.mark.parametrize("words", ["- a", "+ b", "12. c", "3) d", "-", "# e", "> f", "-0.5 g", "1.5 h", "=== i"])
def test_words_open_no_list_and_no_heading(words):
    assert rendered(f"- {escape_markdown(words)}") == f"<ul>\n<li>{words.replace('>', '&gt;')}</li>\n</ul>\n"


def test_lines_are_joined():
    assert escape_markdown("a\n\n- b\t c") == "a - b c"


def test_links_of_the_table_lead_to_the_pages(recipes):
    written = pages_of(every_verdict())
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", written[PAGE_FILE]) if "://" not in target]
    assert targets == [f"{name}/README.md" for name in ("one", "two", "three", "four")]
    assert set(targets) <= set(written)


def test_the_page_is_written_from_the_folder_and_is_the_same_each_time(recipes, tmp_path):
    for name, each in reversed(every_verdict().items()):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "result.json", each.to_dict())
    (tmp_path / "two" / "figure.svg").write_text("<svg/>")
    path = write_page(tmp_path)
    first = path.read_text(encoding="utf-8")
    assert path == tmp_path / "README.md"
    assert first.count("<img") == 1
    assert write_page(tmp_path).read_text(encoding="utf-8") == first
    files = {name: ["result.json"] for name in every_verdict()}
    files["two"].append("figure.svg")
    written = pages_of(every_verdict(), files)
    assert first == written[PAGE_FILE]
    for name, text in written.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        for target in re.findall(r'(?:\]\(|src=")(?!#|http)([^)"]+)', text):
            assert ((tmp_path / name).parent / target).exists(), (name, target)
