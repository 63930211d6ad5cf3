"""What docs/reproduction holds is what the evidence beside it says: nothing on that page is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mukron.paper import RECIPES, Scale, load_evidence, outcomes
from mukron.paper.outcome import judge, numbers
from mukron.paper.page import page_of

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"
OUTCOMES = outcomes(KEPT)


def test_there_are_results() -> None:
    assert {"zero-transfer", "coordinate", "k-fac-precond"} <= set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_verdicts_are_what_the_evidence_says(name: str) -> None:
    kept, evidence = OUTCOMES[name], load_evidence(KEPT / name)
    experiment = RECIPES[name].make(Scale(kept.scale))
    assert set(experiment.parts) == set(evidence)
    assert judge(name, kept.scale, kept.less, experiment, evidence, kept.made) == kept


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
            points = {(each.point.width, each.point.lr, each.point.seed) for each in found.results}
            if not kept.less:
                wanted = {(width, lr, seed) for width in part.widths for lr in part.lr for seed in part.seeds}
                assert points == wanted
                assert len(found.results) == part.total
        fields = {"device", "width", "lr", "scheme", "damping", "seed", *(("epochs", "warmup") if kept.less else ())}
        own = part.config.to_dict()
        assert {key: own[key] for key in own if key not in fields} == {
            key: config[key] for key in config if key not in fields
        }


@pytest.mark.parametrize("name", OUTCOMES)
def test_everything_is_there(name: str) -> None:
    evidence = load_evidence(KEPT / name)
    wanted = {"result.json", "evidence.json", "figure.svg", *({"numbers.csv"} if numbers(evidence) else ())}
    assert wanted <= {path.name for path in (KEPT / name).iterdir()}
    assert OUTCOMES[name].made.keys() >= {"command", "machine", "versions", "date", "runs"}


def test_the_page_is_made_of_the_results() -> None:
    files = {name: {path.name for path in (KEPT / name).iterdir()} for name in OUTCOMES}
    assert (KEPT / "README.md").read_text(encoding="utf-8") == page_of(OUTCOMES, files)


def test_row_one_of_the_transfer_figure() -> None:
    """K-FAC in muP: one learning rate serves every width from 512 to 16384, and accuracy rises."""
    claims = {judged.claim: judged for judged in OUTCOMES["zero-transfer"].claims}
    assert "2^-4 is as good at every width" in claims["MLP, K-FAC: in muP with the rescaled damping it stays."].measured
    assert claims["MLP, K-FAC: in muP wider is better."].verdict == "holds"
    record = load_evidence(KEPT / "zero-transfer").study("MLP, K-FAC, muP")
    assert record.widths[0] == 512
    assert record.widths[-1] == 16384


def test_nothing_of_the_machine_that_it_was_made_on() -> None:
    """Commands run anywhere: no absolute path is in them, or anywhere else."""
    for path in KEPT.rglob("*"):
        if path.suffix in (".json", ".md", ".csv"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"""["' =](/[a-z]+){2,}""", text), path
    for name, kept in OUTCOMES.items():
        assert kept.made["command"].startswith(f"mukron reproduce {name} --scale {kept.scale}")
