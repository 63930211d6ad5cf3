"""Tables of the exponents, to print."""

from __future__ import annotations

from collections.abc import Sequence

from mukron.table import Table
from mukron.theory.methods import METHODS, Method, get_method
from mukron.theory.power import Power
from mukron.theory.roles import Role
from mukron.theory.schemes import MUP, Scheme, get_scheme
from mukron.theory.solve import Exponents, solve

ROLE_MEANINGS = {
    Role.INPUT: "finite -> infinite (first layer, embedding)",
    Role.HIDDEN: "infinite -> infinite",
    Role.OUTPUT: "infinite -> finite (head)",
    Role.VECTOR: "bias or gain of an infinite layer",
    Role.SCALAR: "no infinite side (output bias)",
}
LEGEND = (
    "r_in and r_out: fan-in and fan-out over those at the base width (1 for a finite side).",
    "Paper's exponents at a = 0: initial std ~ M^-b, learning rate ~ M^-c, damping ~ M^-d.",
)


def method_table(method: Method | str, scheme: Scheme | str = MUP) -> Table:
    """Tabulate one method: (b, c, d) of every role, and the factors by which each number scales with the width.

    A note below gives the factors that depend on the depth, which are the same for every role.

    Args:
        method: The method of optimization, or its name.
        scheme: The parametrization, or its name.

    Returns:
        A table with one row per role.

    Example:
        >>> from mukron.theory import method_table
        >>> table = method_table("sgd")
        >>> dict(zip(table.columns, table.rows[2]))["learning rate x"]
        'r_in^-1'
    """
    method, scheme = get_method(method), get_scheme(scheme)
    statistics = [statistic.name for statistic in method.damped]
    rows = []
    solved = solve(method, scheme)
    for role, exponents in solved.items():
        std = Power(fan_in=-exponents.b)
        own = {statistic.name for statistic in (method.damped_in_vectors if role is Role.VECTOR else method.damped)}
        damping = {name: exponents.d[name] if name in own else None for name in statistics}
        numbers = [exponents.b, exponents.c.total, *("-" if d is None else d.total for d in damping.values())]
        multipliers = [std, -exponents.c.of_width, *("-" if d is None else -d.of_width for d in damping.values())]
        multipliers += [] if exponents.eps is None else [-exponents.eps.of_width]
        rows.append((str(role), *map(str, numbers), *map(str, multipliers), ROLE_MEANINGS[role]))
    columns = (
        *("role", "b", "c", *(f"d_{name}" for name in statistics)),
        *("initial std x", "learning rate x", *(f"rho_{name} x" for name in statistics)),
        *(("eps x",) if method.has_eps else ()),
        "what it is",
    )
    return Table(f"{method.title}, {scheme}", columns, tuple(rows), (*LEGEND, depth_law(solved[Role.HIDDEN])))


def depth_law(exponents: Exponents) -> str:
    """Say in a sentence what the depth adds to the factors of a parameter inside of a residual block.

    Args:
        exponents: The exponents of any role: the depth's are the same for all.

    Returns:
        The sentence.

    Example:
        >>> from mukron.theory import Role, solve
        >>> from mukron.theory.tables import depth_law
        >>> depth_law(solve("kfac")[Role.HIDDEN])
        'Inside of residual blocks multiplied by 1/L, L = depth over base depth: learning rate x L^-1, rho_B x L^-2.'
    """
    factors = {"learning rate": -exponents.c, **{f"rho_{name}": -d for name, d in exponents.d.items()}}
    factors |= {} if exponents.eps is None else {"eps": -exponents.eps}
    scaled = [f"{name} x {power.of_depth}" for name, power in factors.items() if power.depth]
    law = ", ".join(scaled) or "nothing is scaled"
    return f"Inside of residual blocks multiplied by 1/L, L = depth over base depth: {law}."


def comparison_table(scheme: Scheme | str = MUP, methods: Sequence[Method | str] | None = None) -> Table:
    """Tabulate several methods side by side, in the form of the paper's Table 1 with the damping added.

    Args:
        scheme: The parametrization, or its name.
        methods: The methods, or their names; all of ``METHODS`` by default.

    Returns:
        A table with one row per method.

    Example:
        >>> from mukron.theory import comparison_table
        >>> comparison_table("mup", ["sgd"]).rows
        (('SGD', 'b=0, c=-1', 'b=1/2, c=0', 'b=1, c=1'),)
    """
    scheme = get_scheme(scheme)
    columns = {"input and vector": Role.INPUT, "hidden": Role.HIDDEN, "output": Role.OUTPUT}
    rows = []
    for method in map(get_method, METHODS if methods is None else methods):
        exponents = solve(method, scheme)
        rows.append((method.title, *(_cell(exponents[role]) for role in columns.values())))
    notes = (LEGEND[1], "A vector (bias, gain) scales as an input weight; a scalar has b = c = d = 0.")
    return Table(f"Every method, {scheme}", ("method", *columns), tuple(rows), notes)


def _cell(exponents: Exponents) -> str:
    damping = (f"d_{name}={power.total}" for name, power in exponents.d.items())
    return ", ".join((f"b={exponents.b}", f"c={exponents.c.total}", *damping))
