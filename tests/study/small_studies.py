"""Studies whose runs take a few milliseconds."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

import torch

from mukron.study import Design, TransferStudy
from mukron.study.store import ENDED, LOST
from mukron.train import RunConfig

TINY = RunConfig(base_width=8, samples=64, test_samples=50, epochs=2, batch=32, loss="mse")
LIGHT = TINY.replace(data="small_studies:data")  # a worker starts in half the time without scikit-learn's digits


def data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """As many inputs and classes as the digits have: which of the first ten inputs is the largest?"""
    x = torch.randn(562, 64, generator=torch.Generator().manual_seed(0))
    y = x[:, :10].argmax(1)
    return (x[:512], y[:512]), (x[512:], y[512:])


def tiny_study(folder: Path, config: RunConfig = TINY, **options: object) -> TransferStudy:
    """One run at a time, if not said otherwise: test_stacks.py has those of many at once."""
    given = {"widths": (8, 16), "lr": (0.01, 0.02, 0.04), "seeds": 2, "one_by_one": True, **options}
    asked = {name: given.pop(name) for name in inspect.signature(Design).parameters if name in given}
    return TransferStudy(Design(config, **asked), folder=folder, **given)


def times_ended(study: TransferStudy) -> Counter:
    """How often each point was trained to its end."""
    return Counter(entry.point for entry in study.store.entries() if entry.state == ENDED)


def lost(study: TransferStudy) -> list:
    return [entry for entry in study.store.entries() if entry.state == LOST]


def wanted(study: TransferStudy) -> set:
    return set(study.design.points([]))
