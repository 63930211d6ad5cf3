"""The exponents as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from mukron.table import Table
from mukron.theory.methods import METHODS, Method, get_method
from mukron.theory.power import Power
from mukron.theory.roles import Role
from mukron.theory.schemes import MUP, Scheme, get_scheme
from mukron.theory.solve import Exponents, solve

MEANING = {
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
    """One method: (b, c, d) of every role, and what each number is multiplied by as the width grows."""
    method, scheme = get_method(method), get_scheme(scheme)
    exponents = solve(method, scheme)
    names = [factor.name for factor in method.damped]
    rows = []
    for role, own in exponents.items():
        std = Power(fan_in=-own.b)
        numbers = [own.b, own.c.total, *(own.d[name].total for name in names)]
        factors = [std, -own.c, *(-own.d[name] for name in names)]
        rows.append((str(role), *map(str, numbers), *map(str, factors), MEANING[role]))
    columns = (
        *("role", "b", "c", *(f"d_{name}" for name in names)),
        *("initial std x", "learning rate x", *(f"rho_{name} x" for name in names), "what it is"),
    )
    return Table(f"{method.title}, {scheme}", columns, tuple(rows), LEGEND)


def comparison_table(scheme: Scheme | str = MUP, methods: Sequence[Method | str] | None = None) -> Table:
    """Methods side by side (all that are known, if none are given), as in the paper's Table 1, with damping."""
    scheme = get_scheme(scheme)
    shown = {"input and vector": Role.INPUT, "hidden": Role.HIDDEN, "output": Role.OUTPUT}
    rows = []
    for method in map(get_method, METHODS if methods is None else methods):
        exponents = solve(method, scheme)
        rows.append((method.title, *(_cell(exponents[role]) for role in shown.values())))
    notes = (LEGEND[1], "A vector (bias, gain) scales as an input weight; a scalar has b = c = d = 0.")
    return Table(f"Every method, {scheme}", ("method", *shown), tuple(rows), notes)


def _cell(own: Exponents) -> str:
    damping = (f"d_{name}={power.total}" for name, power in own.d.items())
    return ", ".join((f"b={own.b}", f"c={own.c.total}", *damping))
