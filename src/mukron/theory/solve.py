"""Solve for the exponents (a, b, c, d) of every role, given a method and a scheme, in exact fractions.

Legend (Section 3.2 and Appendix A of the paper; M is the width):

    W_l = w_l / M^a,   w_l ~ N(0, sigma^2 / M^(2b)),   eta_l = eta / M^c,   rho_X = rho / M^(d_X)
    s   = a_L + b_L                          the exponent of the output weights' size
    r_l : dW_l h_(l-1) = Theta(M^-r_l)       how fast one step changes layer l's output

The conditions, for a uniform parametrization with 0 <= r <= 1/2 (r = 0 is muP, r = 1/2 is NTK):

    a_1 + b_1 = 0,  a_l + b_l = 1/2          Assumption A.3: activations are Theta(1) at the start
    r_l = r for l < L,  r_L = 0              Condition A.1: every layer's update is maximal (or M^-r of that)
    s = 1 - r                                Condition A.2: the changed features change the output by Theta(1)
    rho_X = Theta(|X|)                       Definition A.6: damping stays proportional to its statistic
    eps   = Theta(what G is divided by)      likewise, for Adam, Muon and SOAP (not in the paper)

For Kronecker exponents (e_A, e_B), with i and o equal to 1 where the fan-in and the fan-out grow and 0 elsewhere, all
rows of the paper are one line:

    r_l = 2a + c + (e_A - 1) i + (s - e_B (2s - 1)) o

**Depth.** L is the number of residual blocks over that at the base depth. Each branch is multiplied by 1/L, so delta is
of order 1/L inside of a block, and G with it. A weight there must change its own layer's output by Theta(1) at every
depth, which gives the learning rate the factor L^(1 - 2 e_B), and damping on a statistic with |delta|^2 the factor
L^-2, whatever the role. c and d below hold the powers of L beside those of the width; outside of blocks L is 1. See
"Depth" in docs/theory.md.

**A reading of the paper (lazy appendix, sign).** Putting s = 1 - r into that line gives
``2a_1 + c_1 + e_B (2r - 1) = 2r - 1`` and ``2a_l + c_l + e_A + e_B (2r - 1) = 2r``. Appendix "lazy parameterization"
prints the e_B terms with a minus sign. At r = 1/2, the only value used there, the term is zero and both forms agree; at
r = 0 only the form above agrees with Proposition 4.1 (c_1 = e_B - 1). ``tests/theory/test_paper.py`` checks both.

**A reading of the paper (rescaled damping, what to divide by).** The main text has rho_A = rho' tr(A), the appendix
rho_A = rho tr(A) / M. They differ in d: tr(A) grows like M in a hidden layer, tr(A) / M does not, and only d_A = -1 is
valid. Our rule divides by the size *at the base width*, which is the appendix's number at the base width and the
main text's growth beyond it. The exponents d below are those of the statistic itself, hence of that rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from mukron.readers import exact_number
from mukron.theory.methods import Method, get_method
from mukron.theory.power import Number, Power
from mukron.theory.roles import Role
from mukron.theory.schemes import HALF, MUP, Scheme, get_scheme

DampingExponents = Mapping[str, Power]


@dataclass(frozen=True)
class Exponents:
    """The exponents (a, b, c, d) of one role.

    The weights are w / M^a with initial standard deviation M^-b, the learning rate is multiplied by M^-c and the
    damping by M^-d, where M is the width. c and d keep the two sides of the layer apart; ``c.total`` is the paper's c.
    They hold the exponents of the depth too, which apply to parameters inside of residual blocks alone.

    Attributes:
        a: The exponent of the multiplier.
        b: The exponent of the initial standard deviation.
        c: The exponent of the learning rate.
        d: The exponents of the damping, by the name of the statistic that it is added to.
        eps: The exponent of a method's eps, which is multiplied by M^-eps; None: the method has none.

    Example:
        >>> from mukron.theory import Role, solve
        >>> hidden = solve("sgd")[Role.HIDDEN]
        >>> print(hidden.b, -hidden.c)
        1/2 r_out L / r_in
    """

    a: Fraction
    b: Fraction
    c: Power
    d: DampingExponents
    eps: Power | None = None


def solve(
    method: Method | str, scheme: Scheme | str = MUP, a: Number | Mapping[Role, Number] = 0
) -> dict[Role, Exponents]:
    """Solve the conditions of a parametrization for the exponents of every role.

    Args:
        method: The method of optimization, or its name.
        scheme: The parametrization, or its name.
        a: The exponent of the multipliers: one number for all roles, or numbers by role (0 where none is given).

    Returns:
        The exponents by role.

    Raises:
        ValueError: The method or the scheme is unknown.

    Example:
        >>> from mukron.theory import Role, solve
        >>> output = solve("shampoo", "mup")[Role.OUTPUT]
        >>> output.b, output.c.total
        (Fraction(1, 1), Fraction(1, 2))
    """
    method, scheme = get_method(method), get_scheme(scheme)
    multipliers = a if isinstance(a, Mapping) else dict.fromkeys(Role, a)
    return {role: _solve_role(method, scheme, role, exact_number(multipliers.get(role, 0))) for role in Role}


def _solve_role(method: Method, scheme: Scheme, role: Role, a: Fraction) -> Exponents:
    s, r = scheme.s, scheme.r
    if r is None:  # standard: learning rates and damping do not depend on the width
        c = Power()
        d = {statistic.name: Power() for statistic in method.damped}
    else:
        # r_l = shift a + c - response = r below the output, 0 at it
        c = Power(fan_out=r * role.fan_out) + method.response(role, s)
        d = {statistic.name: -statistic.size(role, s) for statistic in method.damped}
    side = Power(fan_in=a) if role.fan_in else Power(fan_out=a)
    eps = (Power() if r is None else -method.divisor(role, s)) if method.has_eps else None
    if eps is not None and method.entrywise:
        eps = eps + side  # of the gradient of w, which is that of W over M^a
    return Exponents(a=a, b=initial_exponent(role, s) - a, c=c + -method.shift * side, d=d, eps=eps)


def initial_exponent(role: Role, s: Fraction) -> Fraction:
    """Return a + b of a role: the size of the initial weights is Theta(M^-(a + b)).

    Args:
        role: The role of the weight.
        s: The exponent of the output weights' size, ``scheme.s``.

    Returns:
        The exponent.

    Example:
        >>> from mukron.theory import MUP, Role, initial_exponent
        >>> initial_exponent(Role.HIDDEN, MUP.s)
        Fraction(1, 2)
    """
    if role is Role.OUTPUT:
        return s
    return HALF if role is Role.HIDDEN else Fraction(0)


def update_exponent(method: Method | str, role: Role, exponents: Mapping[Role, Exponents]) -> Fraction:
    """Return r_l of a role: one step changes the layer's output by dW h = Theta(M^-r_l).

    The damping is taken to be proportional to the statistic that it is added to.

    Args:
        method: The method of optimization, or its name.
        role: The role of the layer's weight.
        exponents: The exponents of every role, as ``solve`` returns them.

    Returns:
        The exponent r_l.

    Example:
        >>> from mukron.theory import Role, solve, update_exponent
        >>> update_exponent("sgd", Role.HIDDEN, solve("sgd", "sp"))  # under SP the update grows with the width
        Fraction(-1, 2)
    """
    method, layer, output = get_method(method), exponents[role], exponents[Role.OUTPUT]
    return method.shift * layer.a + layer.c.total - method.response(role, output.a + output.b).total


def residuals(method: Method | str, scheme: Scheme | str, exponents: Mapping[Role, Exponents]) -> dict[str, Fraction]:
    """Return by how much exponents violate each of the paper's conditions.

    All residuals are zero for the exponents that ``solve`` returns.

    Args:
        method: The method of optimization, or its name.
        scheme: The parametrization, or its name.
        exponents: The exponents of every role.

    Returns:
        The residuals by condition.

    Raises:
        ValueError: The scheme is the standard parametrization, which is not derived from conditions.

    Example:
        >>> from mukron.theory import residuals, solve
        >>> set(residuals("kfac", "mup", solve("kfac", "mup")).values())
        {Fraction(0, 1)}
    """
    scheme = get_scheme(scheme)
    if scheme.r is None:
        raise ValueError("scheme 'sp' is not derived from conditions; choose 'mup', 'ntk' or 'uniform:R'")
    updates = {role: update_exponent(method, role, exponents) for role in Role}
    violations = {f"update of {role}": updates[role] - scheme.r * role.fan_out for role in Role}
    for role in Role:
        of_layer = get_method(method).response(role, scheme.s)
        violations[f"update of {role} in a residual block"] = exponents[role].c.depth - of_layer.depth
    for role in Role:
        size = exponents[role].a + exponents[role].b
        violations[f"initial size of {role}"] = size - initial_exponent(role, scheme.s)
    # Condition A.2': W_L (changed features) = Theta(M^-(s - 1 + r_(L-1))) = Theta(1)
    output = exponents[Role.OUTPUT]
    violations["output sees the moved features"] = output.a + output.b - 1 + updates[Role.HIDDEN]
    return violations


def feature_slopes(method: Method | str, exponents: Mapping[Role, Exponents]) -> dict[Role, Fraction]:
    """Predict how the change of the features grows with the width: the slope of its logarithm against log M.

    The prediction holds after a few small steps. A layer's features change by the update of its own weights and by
    the change of its input. A hidden layer passes the change of its input on at the same size; the output weights are
    aligned with it and pass on M^(1 - s) times as much.

    Args:
        method: The method of optimization, or its name.
        exponents: The exponents of every role, as ``solve`` returns them.

    Returns:
        The slopes by the role of the layer's weight: input, hidden and output.

    Example:
        >>> from mukron.theory import feature_slopes, solve
        >>> {role.value: str(slope) for role, slope in feature_slopes("sgd", solve("sgd", "sp")).items()}
        {'input': '-1/2', 'hidden': '1/2', 'output': '1'}
    """
    method = get_method(method)
    updates = {role: -update_exponent(method, role, exponents) for role in (Role.INPUT, Role.HIDDEN, Role.OUTPUT)}
    hidden = max(updates[Role.INPUT], updates[Role.HIDDEN])
    output = exponents[Role.OUTPUT]
    return {
        Role.INPUT: updates[Role.INPUT],
        Role.HIDDEN: hidden,
        Role.OUTPUT: max(updates[Role.OUTPUT], hidden + 1 - (output.a + output.b)),
    }
