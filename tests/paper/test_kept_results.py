"""What docs/reproduction holds is what the evidence beside it says: nothing on that page is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mukron.paper import RECIPES, Scale, load_evidence, outcomes
from mukron.paper.claims import best_value
from mukron.paper.headlines import ABSTRACT_CLAIMS, CLAIMS_BY_NETWORK, NETWORKS
from mukron.paper.outcome import csv_rows, judge_claims
from mukron.paper.page import pages_of
from mukron.paper.remarks import DISAGREEMENTS, NOT_RUN
from mukron.study.design import Design

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"
OUTCOMES = outcomes(KEPT)


def test_there_are_results() -> None:
    assert {"zero-transfer", "coordinate", "k-fac-precond"} <= set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_verdicts_are_what_the_evidence_says(name: str) -> None:
    kept, evidence = OUTCOMES[name], load_evidence(KEPT / name)
    experiment = RECIPES[name].make(Scale(kept.scale))
    assert set(experiment.parts) == set(evidence)
    assert judge_claims(name, kept.scale, kept.less, experiment, evidence, kept.made) == kept


@pytest.mark.parametrize("name", OUTCOMES)
def test_evidence_is_of_the_recipe(name: str) -> None:
    """The config, learning rates, dampings, widths and seeds that the recipe asks for, where nothing was reduced."""
    kept, evidence = OUTCOMES[name], load_evidence(KEPT / name)
    experiment = RECIPES[name].make(Scale(kept.scale))
    for title, part in experiment.parts.items():
        found = evidence[title]
        if hasattr(part, "steps"):
            assert found.record.steps == part.steps
            config = found.record.about["config"]
        else:
            config = found.config.to_dict()
            assert len(found.results) == part.total or kept.less
        if isinstance(part, Design):
            points = {(each.point.width, each.point.lr, each.point.seed) for each in found.results}
            if not kept.less:
                wanted = {(width, lr, seed) for width in part.widths for lr in part.lr for seed in part.seeds}
                assert points == wanted
        fields = {"device", "width", "lr", "scheme", "damping", "seed", *(("epochs", "warmup") if kept.less else ())}
        own = part.config.to_dict()
        assert {key: own[key] for key in own if key not in fields} == {
            key: config[key] for key in config if key not in fields
        }


@pytest.mark.parametrize("name", OUTCOMES)
def test_everything_is_there(name: str) -> None:
    evidence = load_evidence(KEPT / name)
    wanted = {"result.json", "evidence.json", "figure.svg", *({"numbers.csv"} if csv_rows(evidence) else ())}
    assert wanted <= {path.name for path in (KEPT / name).iterdir()}
    assert OUTCOMES[name].made.keys() >= {"command", "machine", "versions", "date", "runs"}


def test_the_page_is_made_of_the_results() -> None:
    files = {name: {path.name for path in (KEPT / name).iterdir()} for name in OUTCOMES}
    written = pages_of(OUTCOMES, files)
    assert {str(path.relative_to(KEPT)) for path in KEPT.rglob("*.md")} == set(written)
    for name, text in written.items():
        assert (KEPT / name).read_text(encoding="utf-8") == text
        for target in re.findall(r'(?:\]\(|src=")(?!#|http)([^)"]+)', text):
            assert ((KEPT / name).parent / target).exists(), (name, target)


def test_the_page_has_the_eight_claims_of_the_abstract_first() -> None:
    head = (KEPT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line.split(" | ") for line in head.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ABSTRACT_CLAIMS) == 8
    for cells in rows:
        assert len(cells) == 4
        assert re.search(r"\*\*(holds|holds in part|does not hold|cannot be determined)\*\*", cells[1])
        assert re.search(r"[-+]\d+\.\d\d (\\\[[-+]|\(one seed)", cells[2]), cells


@pytest.mark.parametrize(
    "question", [*CLAIMS_BY_NETWORK, *(each for headline in ABSTRACT_CLAIMS for each in headline.questions)]
)
def test_questions_are_answered_by_claims_that_there_are(question) -> None:
    for name, claim in question.answers.values():
        assert claim in {judged.claim for judged in OUTCOMES[name].claims}
    assert question not in CLAIMS_BY_NETWORK or {label.partition(" (")[0] for label in question.answers} <= set(
        NETWORKS
    )


def test_every_disagreement_has_a_reason_and_every_reason_a_disagreement() -> None:
    failing = {
        (name, judged.claim)
        for name, outcome in OUTCOMES.items()
        for judged in outcome.claims
        if judged.verdict == "does not hold" and not judged.ours
    }
    assert sorted(claim for each in DISAGREEMENTS for claim in each.claims) == sorted(failing)


def test_every_recipe_has_a_result_or_the_reason_why_not() -> None:
    assert set(OUTCOMES) | set(NOT_RUN) == set(RECIPES)
    assert not set(OUTCOMES) & set(NOT_RUN)


def test_row_one_of_the_transfer_figure() -> None:
    """K-FAC: SP is far worse at 16384 than at 512; in muP one learning rate serves all widths, and accuracy rises."""
    evidence = load_evidence(KEPT / "zero-transfer")
    sp, mup = evidence.study("MLP, K-FAC, SP"), evidence.study("MLP, K-FAC, muP")
    assert mup.widths == sp.widths == (512, 1024, 2048, 4096, 8192, 16384)
    falls = {width: best_value(sp, sp.schemes[0], width).mean for width in sp.widths}
    assert falls[16384] < falls[512] - 0.05
    rises = {width: best_value(mup, mup.schemes[0], width).mean for width in mup.widths}
    assert rises[16384] > rises[512] + 0.01
    claims = {judged.claim: judged for judged in OUTCOMES["zero-transfer"].claims}
    stays = claims["MLP, K-FAC: in muP with the rescaled damping it stays."]
    assert stays.verdict == "holds"
    assert "2^-5 is as good at every width" in stays.measured
    assert claims["MLP, K-FAC: in muP wider is better."].verdict == "holds"


def test_the_table_over_the_output_exponent() -> None:
    """At the largest batch K-FAC is best at b_L = 1, and SGD does not prefer 1 to 64."""
    claims = {judged.claim: judged.verdict for judged in OUTCOMES["b-output-k-fac"].claims}
    assert claims["K-FAC, batch 1024: b_L = 1 beats 0.5."] == "holds"
    assert claims["K-FAC, batch 1024: b_L = 1 beats 64."] == "holds"
    assert claims["SGD, batch 1024: b_L = 1 is not better than 64."] == "holds"


def test_nothing_of_the_machine_that_it_was_made_on() -> None:
    """Commands run anywhere: no absolute path is in them, or anywhere else."""
    for path in KEPT.rglob("*"):
        if path.suffix in (".json", ".md", ".csv"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"""["' =](/[a-z]+){2,}""", text), path
    for name, kept in OUTCOMES.items():
        assert kept.made["command"].startswith(f"mukron reproduce {name} --scale {kept.scale}")
