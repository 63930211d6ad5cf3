"""Laws of depth: what L, the number of residual blocks over that at the base depth, does to each method's numbers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mukron.theory import MUP, Power, Role, kronecker, method_table, residuals, shampoo, solve, uniform

ANY_ROLE = st.sampled_from(list(Role))
ANY_R = st.fractions(0, Fraction(1, 2), max_denominator=8).map(uniform)
ANY_EXPONENT = st.fractions(0, 2, max_denominator=4)

LEARNING_RATES = {
    **{"sgd": "L", "foof": "L", "adam": "1", "muon": "1", "shampoo": "1", "shampoo:1": "L^-1", "shampoo:1/4": "L^1/2"},
    **{"kfac": "L^-1", "gauss-newton": "L^-1", "foof-mirror": "L^-1", "kronecker:1,1/2": "1"},
}
DAMPING = {
    **{"kfac": {"A": "1", "B": "L^-2"}, "foof": {"A": "1"}, "foof-mirror": {"B": "L^-2"}},
    **{"shampoo": {"L": "L^-2", "R": "L^-2"}, "gauss-newton": {"K": "L^-2"}, "sgd": {}, "adam": {}, "muon": {}},
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("method", "law"), LEARNING_RATES.items())
def test_learning_rates_inside_of_blocks(method, law, role):
    assert str((-solve(method)[role].c).of_depth) == law


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("method", "law"), DAMPING.items())
def test_damping_inside_of_blocks(method, law, role):
    assert {name: str((-d).of_depth) for name, d in solve(method)[role].d.items()} == law


@given(ANY_EXPONENT, ANY_EXPONENT, ANY_R, ANY_ROLE)
def test_the_learning_rate_of_any_exponents_has_the_factor_one_formula_gives(e_A, e_B, scheme, role):
    """L^(1 - 2 e_B): e_A has no part in it, and neither has the scheme."""
    assert -solve(kronecker(e_A, e_B), scheme)[role].c.depth == 1 - 2 * e_B
    assert -solve(shampoo(e_B), scheme)[role].c.depth == 1 - 2 * e_B


def test_residuals_show_a_missing_depth_law():
    exponents = solve("kfac", MUP)
    assert residuals("kfac", MUP, exponents)["update of hidden in a residual block"] == 0
    without = {role: replace(own, c=own.c.of_width) for role, own in exponents.items()}
    assert residuals("kfac", MUP, without)["update of hidden in a residual block"] == -1


def test_sp_has_no_depth_law():
    assert {own.c.depth for own in solve("sgd", "sp").values()} == {0}


def test_a_power_of_depth_and_width():
    power = Power(Fraction(-1), Fraction(1), Fraction(-2))
    assert str(power) == "r_out / r_in L^2"
    assert (str(power.of_width), str(power.of_depth)) == ("r_out / r_in", "L^-2")
    assert power.of(Fraction(8), Fraction(2), Fraction(4)) == 2 / 8 / 16
    assert power.of(Fraction(8), Fraction(8), Fraction(4)) == 1 / 16
    assert power.of(Fraction(8), Fraction(2)) == 2 / 8, "outside of blocks"
    assert (2 * power + -power).depth == -2


def test_the_table_of_a_method_says_what_depth_adds():
    assert method_table("kfac").notes[-1].endswith("learning rate x L^-1, rho_B x L^-2.")
    assert method_table("adam").notes[-1].endswith(": eps x L^-1.")
    assert method_table("lion").notes[-1].endswith("nothing is scaled.")
    assert {row[-2] for row in method_table("sgd").rows} == {"1", "r_out", "r_out / r_in", "r_in^-1"}, "width alone"
