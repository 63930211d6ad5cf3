"""From a method and a scheme to (a, b, c, d) of every role, in exact fractions.

Legend (Section 3.2 and Appendix A of the paper; M is the width):

    W_l = w_l / M^a,   w_l ~ N(0, sigma^2 / M^(2b)),   eta_l = eta / M^c,   rho_X = rho / M^(d_X)
    s   = a_L + b_L                          the exponent of the output weights' size
    r_l : dW_l h_(l-1) = Theta(M^-r_l)       how fast one step moves layer l's output

The conditions, for a uniform parametrization with 0 <= r <= 1/2 (r = 0 is muP, r = 1/2 is NTK):

    a_1 + b_1 = 0,  a_l + b_l = 1/2          Assumption A.3: activations are Theta(1) at the start
    r_l = r for l < L,  r_L = 0              Condition A.1: every layer's update is maximal (or M^-r of that)
    s = 1 - r                                Condition A.2: the output sees the moved features at Theta(1)
    rho_X = Theta(|X|)                       Definition A.6: damping stays in proportion to its factor

Written out for Kronecker exponents (e_A, e_B), with i and o telling whether fan-in and fan-out grow, all rows of the
paper are one line:

    r_l = 2a + c + (e_A - 1) i + (s - e_B (2s - 1)) o

**A reading of the paper (lazy appendix, sign).** Putting s = 1 - r into that line gives
``2a_1 + c_1 + e_B (2r - 1) = 2r - 1`` and ``2a_l + c_l + e_A + e_B (2r - 1) = 2r``. Appendix "lazy parameterization"
prints the e_B terms with a minus sign. At r = 1/2, the only value used there, the term is zero and both forms agree; at
r = 0 only the form above gives back Proposition 4.1 (c_1 = e_B - 1). ``tests/theory/test_paper.py`` holds both facts.

**A reading of the paper (rescaled damping, what to divide by).** The main text has rho_A = rho' tr(A), the appendix
rho_A = rho tr(A) / M. They differ in d: tr(A) grows like M in a hidden layer, tr(A) / M does not, and only d_A = -1 is
valid. Our rule divides by the size *at the base width*, which is the appendix's number at the base width and the
main text's growth beyond it. The exponents d below are those of the factor itself, hence of that rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from mukron.theory.methods import Method, get_method
from mukron.theory.power import Number, Power
from mukron.theory.roles import Role
from mukron.theory.schemes import HALF, MUP, Scheme, get_scheme

Damping = Mapping[str, Power]


@dataclass(frozen=True)
class Exponents:
    """(a, b, c, d) of one role. c and d keep the two sides of the layer apart; ``c.total`` is the paper's c."""

    a: Fraction
    b: Fraction
    c: Power
    d: Damping


def solve(
    method: Method | str, scheme: Scheme | str = MUP, a: Number | Mapping[Role, Number] = 0
) -> dict[Role, Exponents]:
    """The exponents of every role; ``a``, the multipliers' exponent, is one for all roles or one a role (else 0)."""
    method, scheme = get_method(method), get_scheme(scheme)
    shifts = a if isinstance(a, Mapping) else dict.fromkeys(Role, a)
    return {role: _solve_role(method, scheme, role, Fraction(shifts.get(role, 0))) for role in Role}


def _solve_role(method: Method, scheme: Scheme, role: Role, a: Fraction) -> Exponents:
    s, r = scheme.s, scheme.r
    if r is None:  # standard: learning rates and damping do not know the width
        c = Power()
        d = {factor.name: Power() for factor in method.damped}
    else:
        # r_l = shift a + c - response = r below the output, 0 at it
        c = Power(fan_out=r * role.fan_out) + method.response(role, s)
        d = {factor.name: -factor.size(role, s) for factor in method.damped}
    shift = Power(fan_in=-method.shift * a) if role.fan_in else Power(fan_out=-method.shift * a)
    return Exponents(a=a, b=initial_exponent(role, s) - a, c=c + shift, d=d)


def initial_exponent(role: Role, s: Fraction) -> Fraction:
    """a + b: the initial weights' size is Theta(M^-(a + b))."""
    if role is Role.OUTPUT:
        return s
    return HALF if role is Role.HIDDEN else Fraction(0)


def update_exponent(method: Method | str, role: Role, exponents: Mapping[Role, Exponents]) -> Fraction:
    """r_l of that role: one step moves the layer's output by dW h = Theta(M^-r_l), with damping in proportion."""
    method, own, output = get_method(method), exponents[role], exponents[Role.OUTPUT]
    return method.shift * own.a + own.c.total - method.response(role, output.a + output.b).total


def residuals(method: Method | str, scheme: Scheme | str, exponents: Mapping[Role, Exponents]) -> dict[str, Fraction]:
    """By how much each of the paper's conditions is missed: all zero for what ``solve`` returns (except under SP)."""
    scheme = get_scheme(scheme)
    if scheme.r is None:
        raise ValueError("scheme 'sp' is not derived from conditions; choose 'mup', 'ntk' or 'uniform:R'")
    moves = {role: update_exponent(method, role, exponents) for role in Role}
    missed = {f"update of {role}": moves[role] - scheme.r * role.fan_out for role in Role}
    for role in Role:
        size = exponents[role].a + exponents[role].b
        missed[f"initial size of {role}"] = size - initial_exponent(role, scheme.s)
    # Condition A.2': W_L (moved features) = Theta(M^-(s - 1 + r_(L-1))) = Theta(1)
    output = exponents[Role.OUTPUT]
    missed["output sees the moved features"] = output.a + output.b - 1 + moves[Role.HIDDEN]
    return missed


def feature_slopes(method: Method | str, exponents: Mapping[Role, Exponents]) -> dict[Role, Fraction]:
    """The slope of log |change of features| against log M, after a few small steps, layer by layer.

    A layer's features move by its own update and by what arrives from below. A hidden layer passes the change on at
    the same size; the output weights line up with it and pass on M^(1 - s) times as much.
    """
    method = get_method(method)
    own = {role: -update_exponent(method, role, exponents) for role in (Role.INPUT, Role.HIDDEN, Role.OUTPUT)}
    hidden = max(own[Role.INPUT], own[Role.HIDDEN])
    output = exponents[Role.OUTPUT]
    return {
        Role.INPUT: own[Role.INPUT],
        Role.HIDDEN: hidden,
        Role.OUTPUT: max(own[Role.OUTPUT], hidden + 1 - (output.a + output.b)),
    }
