"""Laws that hold for any exponents, checked on random exact fractions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mukron.theory import (
    METHODS,
    MUP,
    NTK,
    Power,
    Role,
    feature_slopes,
    get_method,
    get_scheme,
    kronecker,
    residuals,
    shampoo,
    solve,
    uniform,
    update_exponent,
)

settings.register_profile("any pace", deadline=None)  # other processes may hold the cores
settings.load_profile("any pace")

exponents = st.fractions(min_value=0, max_value=2, max_denominator=12)
rs = st.fractions(min_value=0, max_value=Fraction(1, 2), max_denominator=12)
shifts = st.fractions(min_value=-2, max_value=2, max_denominator=12)
methods = st.one_of(st.sampled_from(list(METHODS.values())), st.builds(kronecker, exponents, exponents))
methods = st.one_of(methods, st.builds(shampoo, exponents))


@given(methods, rs, shifts)
def test_conditions_are_met(method, r, a):
    assert set(residuals(method, uniform(r), solve(method, uniform(r), a)).values()) == {0}


@given(exponents, exponents, rs, st.dictionaries(st.sampled_from(Role), shifts))
def test_conditions_as_the_paper_prints_them(e_A, e_B, r, a):
    """The four lines of Appendix A.4.1, written out here by hand and not by our formula."""
    solved = solve(kronecker(e_A, e_B), uniform(r), a)
    first, hidden, last = solved[Role.INPUT], solved[Role.HIDDEN], solved[Role.OUTPUT]
    s = last.a + last.b
    assert s == 1 - r
    assert 2 * first.a + first.c.total + e_B - (2 * e_B - 1) * s == r
    assert 2 * hidden.a + hidden.c.total + e_A + e_B - 1 - (2 * e_B - 1) * s == r
    assert 2 * last.a + last.c.total + e_A - 1 == 0


@given(exponents, rs)
def test_shampoo_conditions_as_the_paper_prints_them(e, r):
    solved = solve(shampoo(e), uniform(r))
    s = solved[Role.OUTPUT].b
    assert solved[Role.INPUT].c.total + e - (2 * e - 1) * s == r
    assert solved[Role.HIDDEN].c.total + 2 * e - 1 - (2 * e - 1) * s == r
    assert solved[Role.OUTPUT].c.total + e - 1 == 0


@given(methods, rs, shifts)
def test_shift_invariance(method, r, k):
    """(a, b, c) + (k, -k, -2k) changes nothing; for Adam, whose step ignores the gradient's size, (k, -k, -k)."""
    plain, shifted = solve(method, uniform(r)), solve(method, uniform(r), k)
    for role in Role:
        assert shifted[role].a == k
        assert shifted[role].b == plain[role].b - k
        assert shifted[role].c.total == plain[role].c.total - (k if method.entrywise else 2 * k)
        assert shifted[role].d == plain[role].d
        assert update_exponent(method, role, shifted) == update_exponent(method, role, plain)


@given(exponents, exponents)
def test_mup_is_r_0_and_ntk_is_one_half(e_A, e_B):
    method = kronecker(e_A, e_B)
    assert solve(method, uniform(0)) == solve(method, "mup") == solve(method, MUP)
    assert solve(method, uniform(Fraction(1, 2))) == solve(method, "ntk") == solve(method, NTK)


@given(methods, rs)
def test_features_move_as_the_scheme_says(method, r):
    slopes = feature_slopes(method, solve(method, uniform(r)))
    assert slopes == {Role.INPUT: -r, Role.HIDDEN: -r, Role.OUTPUT: 0}


@given(shifts, shifts, rs, st.sampled_from([Role.INPUT, Role.HIDDEN, Role.OUTPUT]))
def test_a_wrong_exponent_is_seen(off_b, off_c, r, role):
    """The residuals can fail: an exponent that is off misses its condition by just that much."""
    solved = solve("kfac", uniform(r))
    wrong = replace(solved[role], b=solved[role].b + off_b, c=solved[role].c + Power(fan_in=off_c))
    missed = residuals("kfac", uniform(r), {**solved, role: wrong})
    assert missed[f"initial size of {role}"] == off_b
    # the output weights' size also enters every delta below, but not their own update
    assert missed[f"update of {role}"] == off_c


@given(rs, st.sampled_from(Role))
def test_eps_is_as_large_as_what_it_is_added_to(r, role):
    """Adam: an entry of the gradient, M^-s where fan-out grows. Muon and SOAP: its norm, |h| |delta|."""
    s, solved = 1 - r, {name: solve(name, uniform(r))[role].eps for name in METHODS}
    assert (-solved["adam"].fan_in, -solved["adam"].fan_out) == (0, -s * role.fan_out)
    for name in ("muon", "soap"):
        norm = (Fraction(role.fan_in, 2), Fraction(role.fan_out) * (1 - 2 * s) / 2)
        assert (-solved[name].fan_in, -solved[name].fan_out) == norm
    assert {name for name, eps in solved.items() if eps is not None} == {"adam", "muon", "soap"}


def test_eps_of_muP():
    hidden = {name: solve(name)[Role.HIDDEN].eps for name in ("adam", "muon", "soap")}
    assert {name: (-eps.fan_in, -eps.fan_out) for name, eps in hidden.items()} == {
        "adam": (0, -1),
        "muon": (Fraction(1, 2), Fraction(-1, 2)),
        "soap": (Fraction(1, 2), Fraction(-1, 2)),
    }
    assert solve("adam", "sp")[Role.HIDDEN].eps == Power()
    assert solve("adam", a=1)[Role.HIDDEN].eps.total == 2  # the gradient of w is smaller by M^a


def test_lion_is_adam_and_soap_is_muon():
    for scheme in (MUP, NTK):
        for one, other in (("lion", "adam"), ("soap", "muon"), ("soap", "shampoo")):
            pairs = zip(solve(one, scheme).values(), solve(other, scheme).values(), strict=True)
            assert all(a.c == b.c for a, b in pairs)


def test_feature_slopes_under_sp():
    assert list(feature_slopes("sgd", solve("sgd", "sp")).values()) == [-Fraction(1, 2), Fraction(1, 2), 1]
    assert list(feature_slopes("adam", solve("adam", "sp")).values()) == [0, 1, Fraction(3, 2)]


def test_feature_slopes_take_the_largest_way():
    """Each of the three ways a change can arrive decides in some parametrization."""
    base = solve("sgd", "mup")

    def slopes(**off):
        moved = {
            Role(name): replace(base[Role(name)], c=base[Role(name)].c + Power(value)) for name, value in off.items()
        }
        return list(feature_slopes("sgd", {**base, **moved}).values())

    assert slopes(input=Fraction(-1)) == [1, 1, 1]  # a fast first layer carries the others
    assert slopes(hidden=Fraction(-1)) == [0, 1, 1]
    assert slopes(output=Fraction(-1)) == [0, 0, 1]
    assert slopes(input=Fraction(1), hidden=Fraction(1)) == [-1, -1, 0]
    lazy = {**base, Role.OUTPUT: replace(base[Role.OUTPUT], b=Fraction(1, 2))}
    assert list(feature_slopes("kfac", {**solve("kfac"), Role.OUTPUT: lazy[Role.OUTPUT]}).values())[2] >= 0


def test_residual_of_condition_a2():
    solved = solve("kfac")
    slow = replace(solved[Role.HIDDEN], c=solved[Role.HIDDEN].c + Power(Fraction(1, 3)))
    missed = residuals("kfac", "mup", {**solved, Role.HIDDEN: slow})
    assert missed["output sees the moved features"] == Fraction(1, 3)


def test_names_and_strings():
    assert get_method("shampoo:1/2") == METHODS["shampoo"]
    assert get_method("AdamW") is METHODS["adam"]
    assert get_method("gn") is METHODS["gauss-newton"]
    assert get_method("kronecker:1,1/2").e_B == Fraction(1, 2)
    assert get_method(get_method("shampoo:1/4").name) == shampoo("1/4")
    assert get_scheme("uniform:0") == MUP
    assert get_scheme(uniform("1/4").name) == uniform(Fraction(1, 4))


@pytest.mark.parametrize("name", ["", "kfca", "kfac:1", "shampoo:x", "shampoo:-1", "kronecker:1", "kronecker:1,1/0"])
def test_unknown_methods_are_refused(name):
    with pytest.raises(ValueError, match="method"):
        get_method(name)


@pytest.mark.parametrize("name", ["", "mupp", "mup:1", "uniform", "uniform:x", "uniform:2/3", "uniform:-1/4"])
def test_unknown_schemes_are_refused(name):
    with pytest.raises(ValueError, match=r"scheme|must lie in \[0, 1/2\]"):
        get_scheme(name)


def test_sp_has_no_conditions():
    with pytest.raises(ValueError, match="not derived from conditions"):
        residuals("kfac", "sp", solve("kfac", "sp"))
