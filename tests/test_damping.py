"""Damping rules from text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mukron.damping import Constant, Fixed, Heuristic, MaxEigenvalue, MeanEigenvalue, Rescaled, Rule, Sides
from mukron.linalg import MatrixFactor


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rescaled", Rescaled(1.0)),
        ("Rescaled:0.5", Rescaled(0.5)),
        ("rescaled:0.5,0", Rescaled(0.5, floor=0.0)),
        ("mean-eigenvalue:0.5", MeanEigenvalue(0.5)),
        ("rescaled:1,0,1e-6", Rescaled(1.0, floor=0.0, eps=1e-6)),
        ("mean-eigenvalue:1,0,1e-6", MeanEigenvalue(1.0, floor=0.0, eps=1e-6)),
        ("heuristic:1e-2", Heuristic(0.01)),
        ("heuristic:1e-2,1e-7", Heuristic(0.01, eps=1e-7)),
        ("max-eigenvalue:1e-3,0,1e-7", MaxEigenvalue(1e-3, floor=0.0, eps=1e-7)),
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
        ("heuristic:1,2,3", "damping 'heuristic:1,2,3'"),
        ("fixed:1", "damping 'fixed:1'"),
        ("rescaled:-1", "must not be negative"),
        ("rescaled:1,0,-1e-6", r"must not be negative: Rescaled\(eps="),
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


def test_the_mean_eigenvalue_is_of_the_actual_size():
    factors = {name: MatrixFactor(torch.diag(torch.tensor([1.0, 2.0, 6.0])).unsqueeze(0)) for name in ("A", "B")}
    sides = Sides(growth={"A": 16.0, "B": 4.0}, scales={})
    rho, rescaled = MeanEigenvalue(0.5)(factors, sides), Rescaled(0.5)(factors, sides)
    assert (rho["A"].item(), rho["B"].item()) == pytest.approx((1.5, 1.5))
    assert (rescaled["A"].item(), rescaled["B"].item()) == pytest.approx((24.0, 6.0))


WITH_EPS = [Rescaled(0.5, eps=0.1), MeanEigenvalue(0.5, eps=0.1), Heuristic(0.5, eps=0.1), MaxEigenvalue(0.5, eps=0.1)]


@pytest.mark.parametrize("rule", WITH_EPS, ids=lambda rule: type(rule).__name__)
def test_eps_is_added_and_scales_with_the_width_as_a_fixed_damping_does(rule):
    factors = {name: MatrixFactor(torch.diag(torch.tensor([1.0, 2.0, 6.0]))[None]) for name in ("A", "B")}
    sides = Sides(growth={"A": 16.0, "B": 4.0}, scales={"A": 16.0, "B": 1 / 4}, peaks={"A": torch.tensor([9.0])})
    with_eps, without = rule(factors, sides), replace(rule, eps=0.0)(factors, sides)
    fixed = Fixed(0.1, 0.1)(factors, sides)
    for name, rho in with_eps.items():
        assert rho.item() == pytest.approx(without[name].item() + fixed[name].item())


@pytest.mark.parametrize("rule", WITH_EPS, ids=lambda rule: type(rule).__name__)
def test_factors_that_vanish_are_damped_by_eps(rule):
    factors = {name: MatrixFactor(torch.zeros(1, 3, 3)) for name in ("A", "B")}
    sides = Sides(growth={}, scales={})
    found = rule({"B": factors["B"]} if not isinstance(rule, Heuristic) else factors, sides)
    assert found["B"].item() == pytest.approx(0.1 if not isinstance(rule, Heuristic) else 0.1 + 0.5**0.5)


def test_damping_with_an_eps_is_no_part_of_the_factor():
    """So gradients are not brought to another unit, which would change what eps is beside them."""
    assert [rule.relative for rule in WITH_EPS] == [False] * 4
    assert [replace(rule, eps=0.0).relative for rule in WITH_EPS] == [True, True, False, True]
