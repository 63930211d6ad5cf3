"""The examples of frameworks learn, in one process and in two."""

from __future__ import annotations

import operators  # noqa: F401
import pytest
from processes import ROOT, losses, run

EXAMPLES = {
    "hf_trainer": ("the Trainer", "transformers"),
    "with_accelerate": ("Accelerate", "accelerate"),
    "with_lightning": ("Lightning", "lightning"),
    "with_timm": ("timm", "timm"),
}
TABLE = "K-FAC in one process and in two"


def cases(processes, names=tuple(EXAMPLES)):
    column = {1: "one process", 2: "two processes"}[processes]
    return [pytest.param(name, marks=pytest.mark.cell(TABLE, EXAMPLES[name][0], column)) for name in names]


@pytest.mark.parametrize("name", cases(1, ("hf_trainer", "with_accelerate", "with_lightning")))
def test_examples_learn_in_one_process(name):
    pytest.importorskip(EXAMPLES[name][1])
    found = losses(run(ROOT / "examples" / f"{name}.py"))
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("name", cases(2, ("hf_trainer", "with_accelerate", "with_lightning")))
def test_examples_learn_in_two_processes(name):
    pytest.importorskip(EXAMPLES[name][1])
    found = losses(run(ROOT / "examples" / f"{name}.py", processes=2))
    assert found[-1] < 0.8 * found[0]


def test_the_example_of_timm_learns():
    pytest.importorskip("timm")
    found = losses(run(ROOT / "examples" / "with_timm.py"))
    for of_method in (found[: len(found) // 2], found[len(found) // 2 :]):
        assert of_method[-1] < 0.9 * of_method[0]
