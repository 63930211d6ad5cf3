"""Runs that are kept in docs: pages show them, and commands add to them instead of repeating them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mukron.bench.gpt.page import write_gpt_page
from mukron.bench.gpt.result import GPTResult
from mukron.bench.stability.result import StabilityResult
from mukron.bench.stability.runs import CLASS_DEFAULTS, method_defaults, same_defaults
from mukron.optim.spec import spec_of

DOCS = Path(__file__).parents[2] / "docs"
GPT_PAGES = ("gpt", "gpt-depth", "gpt-damping")


@pytest.mark.parametrize("name", GPT_PAGES)
def test_the_pages_of_the_gpt_are_what_the_command_writes_from_its_runs(name, tmp_path):
    file, page = tmp_path / "figures" / name / "gpt-cuda.json", tmp_path / f"{name}.md"
    file.parent.mkdir(parents=True)
    shutil.copy(DOCS / "figures" / name / file.name, file)
    shutil.copy(DOCS / page.name, page)
    write_gpt_page(file, page)
    assert page.read_text() == (DOCS / page.name).read_text()


@pytest.mark.parametrize("name", GPT_PAGES)
def test_runs_of_the_gpt_are_kept_when_new_ones_are_added(name):
    """Also by methods that have been given options since, whose defaults do what was done without them."""
    result = GPTResult.load(DOCS / "figures" / name / "gpt-cuda.json")
    runs, costs = dict(result.runs), dict(result.costs)
    assert runs
    assert {method: result.drop_outdated(method) for method in [*result.defaults]} == dict.fromkeys(result.defaults, 0)
    assert (result.runs, result.costs) == (runs, costs)


def test_runs_of_the_stability_matrix_are_kept_when_new_ones_are_added():
    result = StabilityResult.load(DOCS / "figures" / "stability" / "stability-cpu.json")
    assert result.runs
    for key in [*result.defaults]:
        assert result.drop_outdated(*key.split(", ", 1)) == 0, key


def test_an_option_that_is_new_and_not_at_its_old_meaning_is_another_default():
    present = method_defaults(spec_of("kfac"), CLASS_DEFAULTS)
    before = {name: text for name, text in present.items() if name != "communication"}
    assert same_defaults(before, present)
    assert not same_defaults(before, {**present, "communication": "rows"})
    assert not same_defaults(before, {**present, "unheard of": "yes"})
