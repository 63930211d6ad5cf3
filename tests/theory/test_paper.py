"""Every table and equation of the paper that gives an exponent, entry by entry, as printed."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mukron.theory import MUP, NTK, SP, Role, get_method, kronecker, shampoo, solve, uniform

HALF = Fraction(1, 2)
INPUT, HIDDEN, OUTPUT, VECTOR, SCALAR = Role.INPUT, Role.HIDDEN, Role.OUTPUT, Role.VECTOR, Role.SCALAR

# Table 1: (b, c) of input weights and biases, output weights, hidden weights.
TABLE_1 = {
    ("sgd", SP): [(0, 0), (HALF, 0), (HALF, 0)],
    ("sgd", MUP): [(0, -1), (1, 1), (HALF, 0)],
    ("shampoo", MUP): [(0, -HALF), (1, HALF), (HALF, 0)],
    ("kfac", MUP): [(0, 0), (1, 0), (HALF, 0)],
}
# Appendix, "Lazy parameterization for SGD, K-FAC, FOOF and Shampoo".
LAZY_TABLE = {
    ("sgd", NTK): [(0, 0), (HALF, 1), (HALF, 1)],
    ("shampoo", NTK): [(0, 0), (HALF, HALF), (HALF, HALF)],
    ("kfac", NTK): [(0, 0), (HALF, 0), (HALF, 0)],
    ("foof", NTK): [(0, 0), (HALF, 0), (HALF, 0)],
}


@pytest.mark.parametrize(("method", "scheme"), [*TABLE_1, *LAZY_TABLE])
def test_tables(method, scheme):
    solved = solve(method, scheme)
    printed = {**TABLE_1, **LAZY_TABLE}[method, scheme]
    for role, (b, c) in zip((INPUT, OUTPUT, HIDDEN), printed, strict=True):
        assert (solved[role].a, solved[role].b, solved[role].c.total) == (0, b, c), role
    assert (solved[VECTOR].b, solved[VECTOR].c) == (solved[INPUT].b, solved[INPUT].c)


@pytest.mark.parametrize("method", ["sgd", "adam", "kfac", "foof", "shampoo", "gauss-newton"])
def test_sp_is_the_same_for_every_method(method):
    assert {role: (own.b, own.c.total) for role, own in solve(method, SP).items()} == {
        **{INPUT: (0, 0), HIDDEN: (HALF, 0), OUTPUT: (HALF, 0)},
        **{VECTOR: (0, 0), SCALAR: (0, 0)},
    }
    assert all(d.total == 0 for own in solve(method, SP).values() for d in own.d.values())


def test_equation_damp_d_kfac():
    d = {role: {name: power.total for name, power in own.d.items()} for role, own in solve("kfac").items()}
    assert d[INPUT] == {"A": 0, "B": 1}
    assert d[HIDDEN] == {"A": -1, "B": 1}
    assert d[OUTPUT] == {"A": -1, "B": 0}


def test_equation_damp_d_shampoo():
    d = {role: {name: power.total for name, power in own.d.items()} for role, own in solve("shampoo").items()}
    assert d[INPUT] == {"L": 1, "R": 1}
    assert d[HIDDEN] == {"L": 0, "R": 0}
    assert d[OUTPUT] == {"L": -1, "R": -1}


@pytest.mark.parametrize("e_A", [0, HALF, 1, Fraction(3, 4)])
@pytest.mark.parametrize("e_B", [0, HALF, 1, Fraction(1, 3)])
def test_proposition_4_1(e_A, e_B):
    solved = solve(kronecker(e_A, e_B))
    assert [solved[role].b for role in (INPUT, HIDDEN, OUTPUT)] == [0, HALF, 1]
    assert [solved[role].c.total for role in (INPUT, HIDDEN, OUTPUT)] == [e_B - 1, e_B - e_A, 1 - e_A]


@pytest.mark.parametrize("e", [0, Fraction(1, 4), HALF, 1])
def test_proposition_4_1_shampoo(e):
    solved = solve(shampoo(e))
    assert [solved[role].c.total for role in (INPUT, HIDDEN, OUTPUT)] == [e - 1, 0, 1 - e]


def test_foof_equation():
    solved = solve("foof")
    roles = (INPUT, HIDDEN, OUTPUT)
    assert [solved[role].b for role in roles] == [0, HALF, 1]
    assert [solved[role].c.total for role in roles] == [-1, -1, 0]
    assert [{name: power.total for name, power in solved[role].d.items()} for role in roles] == [
        {"A": 0},
        {"A": -1},
        {"A": -1},
    ]


def test_foof_mirror():
    solved = solve("foof-mirror")
    roles = (INPUT, HIDDEN, OUTPUT)
    assert [solved[role].c.total for role in roles] == [0, 1, 1]  # Proposition 4.1 at (0, 1)
    assert [solved[role].d["B"].total for role in roles] == [1, 1, 0]


def test_gauss_newton_equation():
    solved = solve("gauss-newton")
    roles = (INPUT, HIDDEN, OUTPUT)
    assert [solved[role].b for role in roles] == [0, HALF, 1]
    assert [solved[role].c.total for role in roles] == [0, 0, 0]
    assert [solved[role].d["K"].total for role in roles] == [1, 0, -1]


def test_adam_is_that_of_tensor_programs():
    """Yang and others 2021, Table 3 (a = 0): Adam's learning rate is 1 for input and biases, else 1 / fan-in."""
    assert {role: own.c.total for role, own in solve("adam").items()} == {
        **{INPUT: 0, HIDDEN: 1, OUTPUT: 1},
        **{VECTOR: 0, SCALAR: 0},
    }


@pytest.mark.parametrize("method", ["sgd", "kfac", "foof", "shampoo"])
def test_lazy_appendix_closed_form_at_one_half(method):
    """c_1 = 0, c_(l>1) = 1 - e_A, b_1 = 0, b_(l>1) = 1/2."""
    e_A, solved = get_method(method).e_A, solve(method, NTK)
    assert [solved[role].c.total for role in (INPUT, HIDDEN, OUTPUT)] == [0, 1 - e_A, 1 - e_A]
    assert [solved[role].b for role in (INPUT, HIDDEN, OUTPUT)] == [0, HALF, HALF]


def test_lazy_appendix_sign():
    """With the printed sign the appendix does not meet Proposition 4.1 at r = 0; with ours it does, for every r."""

    def appendix(e_A, e_B, r, sign):  # 2a + c +- e_B (2r - 1) = 2r - 1 and 2a + c + e_A +- e_B (2r - 1) = 2r, at a = 0
        return [2 * r - 1 - sign * e_B * (2 * r - 1), 2 * r - e_A - sign * e_B * (2 * r - 1)]

    for r in (Fraction(0), Fraction(1, 4), HALF):
        for e_A, e_B in [(1, 1), (0, 1), (HALF, HALF)]:
            solved = solve(kronecker(e_A, e_B), uniform(r))
            assert [solved[INPUT].c.total, solved[HIDDEN].c.total] == appendix(e_A, e_B, r, sign=+1)
    proposition = [Fraction(0), Fraction(0)]  # K-FAC, c_1 and c_l of Proposition 4.1
    assert appendix(1, 1, Fraction(0), sign=+1) == proposition
    assert appendix(1, 1, Fraction(0), sign=-1) != proposition
    assert appendix(1, 1, HALF, sign=+1) == appendix(1, 1, HALF, sign=-1)


def test_multipliers_of_the_two_sides():
    """The design's table: learning rate r_out^(1 - e_B) r_in^(e_A - 1), rho_A x r_in, rho_B / r_out."""
    r_in, r_out = Fraction(8), Fraction(2)
    for name, lr in {"sgd": 1 / 4, "adam": 1 / 8, "kfac": 1, "foof": 2, "shampoo": 1 / 2, "gauss-newton": 1}.items():
        assert (-solve(name)[HIDDEN].c).of(r_in, r_out) == pytest.approx(lr, rel=1e-15)
    d = {**solve("kfac")[HIDDEN].d, **solve("shampoo")[HIDDEN].d, **solve("gauss-newton")[HIDDEN].d}
    scales = {name: (-power).of(r_in, r_out) for name, power in d.items()}
    assert scales == pytest.approx({"A": 8, "B": 1 / 2, "L": 4, "R": 4, "K": 4}, rel=1e-15)
