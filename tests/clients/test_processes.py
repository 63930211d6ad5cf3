"""Two processes take the steps that one takes with their joined batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run
from tiny import HF_MODELS, METHODS, planned

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def everywhere(test):
    """One pair of runs has all methods."""
    for method in METHODS:
        test = pytest.mark.cell("Two processes take the steps of the joined batch", "the Trainer", method)(test)
    return test


@everywhere
def test_two_processes_take_the_steps_of_the_joined_batch():
    script = Path(__file__).parent / "steps_of_processes.py"
    for processes in (1, 2):
        run(script, processes)
    one, two = (torch.load(f"steps-{processes}.pt", weights_only=True) for processes in (1, 2))
    assert set(one) == set(two) == {*METHODS, "BERT"}
    for method in one:
        start = dict(planned(HF_MODELS["BERT" if method == "BERT" else "Llama"])[0].named_parameters())
        moved = sum(float((one[method][name] - mine.detach()).norm()) for name, mine in start.items())
        apart = sum(float((one[method][name] - two[method][name]).norm()) for name in start)
        assert apart < 1e-6 * moved, method
