"""Damping rules of several runs at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mukron.damping import Constant, Fixed, Heuristic, MeanEigenvalue, Rescaled, Sides
from mukron.linalg import MatrixFactor
from mukron.train.stacked.rules import EachOwn


def test_every_group_has_a_rule_of_its_own():
    """Several kinds at once, each with its own numbers and its own layer."""
    generator = torch.Generator().manual_seed(0)
    rules = [Rescaled(0.5), Heuristic(1e-3), Fixed(1.0, 0.1, power_a=0.5), Constant(3.0), Rescaled(2.0, floor=0.5)]
    rules += [MeanEigenvalue(0.25), Rescaled(0.5, eps=0.25), Heuristic(1e-3, eps=1e-2)]
    sides = [Sides({"A": 1.0 + g, "B": 2.0}, {"A": 3.0 + g, "B": 0.5} if g else {}) for g in range(8)]
    M = {name: torch.rand(8, d, d, generator=generator) for name, d in (("A", 4), ("B", 3))}
    peaks = {"A": torch.full((8,), 9.0), "B": torch.full((8,), 7.0)}
    factors = {name: MatrixFactor(each) for name, each in M.items()}
    found = EachOwn(rules, sides, torch.device("cpu"))(factors, peaks)
    for g, (rule, own) in enumerate(zip(rules, sides, strict=True)):
        alone = {name: MatrixFactor(each[g, None]) for name, each in M.items()}
        expected = rule(alone, replace(own, peaks={name: peak[g, None] for name, peak in peaks.items()}))
        for name, rho in expected.items():
            assert found[name].dtype == rho.dtype
            assert found[name][g] == pytest.approx(rho.item(), rel=1e-6)
