"""Damping rules from text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mukron.damping import Constant, EachOwn, Fixed, Heuristic, MaxEigenvalue, MeanEigenvalue, Rescaled, Rule, Sides
from mukron.linalg import MatrixFactor


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rescaled", Rescaled(1.0)),
        ("Rescaled:0.5", Rescaled(0.5)),
        ("rescaled:0.5,0", Rescaled(0.5, floor=0.0)),
        ("mean-eigenvalue:0.5", MeanEigenvalue(0.5)),
        ("heuristic:1e-2", Heuristic(0.01)),
        ("max-eigenvalue", MaxEigenvalue(1e-6)),
        ("constant:3", Constant(3.0)),
        ("fixed:1,0.1", Fixed(a=1.0, b=0.1)),
        ("fixed:1,0.0009765625,1,0.5,2", Fixed(a=1.0, b=2.0**-10, power_a=0.5, power_b=2.0)),
    ],
)
def test_a_rule_from_text(text, rule):
    assert Rule.parse(text) == rule
    assert Rule.from_plain(rule.plain()) == Rule.parse(rule.text()) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "resacled",
            "unknown damping rule 'resacled'; known: rescaled, mean-eigenvalue, heuristic, fixed, max-eig.*, con",
        ),
        ("heuristic:x", "could not convert string to float.*expected heuristic:NUMBER"),
        ("heuristic:1,2", "damping 'heuristic:1,2'"),
        ("fixed:1", "damping 'fixed:1'"),
        ("rescaled:-1", "must not be negative"),
    ],
)
def test_text_that_is_no_rule(text, message):
    with pytest.raises(ValueError, match=message):
        Rule.parse(text)


def test_fixed_damping_by_other_powers_of_the_theorys_scale():
    factors = {name: MatrixFactor(torch.eye(3).unsqueeze(0)) for name in ("A", "B")}
    sides = Sides(growth={"A": 16.0, "B": 16.0}, scales={"A": 16.0, "B": 1 / 16})
    for power, expected in ((1.0, (32.0, 0.25)), (0.0, (2.0, 4.0)), (0.5, (8.0, 1.0))):
        rho = Fixed(2.0, 4.0, power_a=power, power_b=power)(factors, sides)
        assert (rho["A"].item(), rho["B"].item()) == pytest.approx(expected)


def test_every_group_has_a_rule_of_its_own():
    """Several kinds at once, each with its own numbers and its own layer."""
    generator = torch.Generator().manual_seed(0)
    rules = [Rescaled(0.5), Heuristic(1e-3), Fixed(1.0, 0.1, power_a=0.5), Constant(3.0), Rescaled(2.0, floor=0.5)]
    rules.append(MeanEigenvalue(0.25))
    sides = [Sides({"A": 1.0 + g, "B": 2.0}, {"A": 3.0 + g, "B": 0.5} if g else {}) for g in range(6)]
    M = {name: torch.rand(6, d, d, generator=generator) for name, d in (("A", 4), ("B", 3))}
    peaks = {"A": torch.full((6,), 9.0), "B": torch.full((6,), 7.0)}
    factors = {name: MatrixFactor(each) for name, each in M.items()}
    found = EachOwn(rules, sides, torch.device("cpu"))(factors, peaks)
    for g, (rule, own) in enumerate(zip(rules, sides, strict=True)):
        alone = {name: MatrixFactor(each[g, None]) for name, each in M.items()}
        expected = rule(alone, replace(own, peaks={name: peak[g, None] for name, peak in peaks.items()}))
        for name, rho in expected.items():
            assert found[name].dtype == rho.dtype
            assert found[name][g] == pytest.approx(rho.item(), rel=1e-6)


def test_the_mean_eigenvalue_is_of_the_actual_size():
    factors = {name: MatrixFactor(torch.diag(torch.tensor([1.0, 2.0, 6.0])).unsqueeze(0)) for name in ("A", "B")}
    sides = Sides(growth={"A": 16.0, "B": 4.0}, scales={})
    rho, rescaled = MeanEigenvalue(0.5)(factors, sides), Rescaled(0.5)(factors, sides)
    assert (rho["A"].item(), rho["B"].item()) == pytest.approx((1.5, 1.5))
    assert (rescaled["A"].item(), rescaled["B"].item()) == pytest.approx((24.0, 6.0))
