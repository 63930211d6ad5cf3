"""The recipes of the two tables of exponents, which run nothing: theory is exact at every scale."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from mukron.paper import drawing
from mukron.paper.claims import ClaimCheck
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import FAILS, HOLDS, Claim, Experiment, Finding, Scale, recipe
from mukron.table import Table
from mukron.theory import NTK, SP, Role, Scheme, get_method, get_scheme, solve

# By method, (b, c) of input, output and hidden weights as the paper prints them.
Printed = Mapping[str, tuple[str, str, str]]
ROLES = {"input weights and biases": Role.INPUT, "output weights": Role.OUTPUT, "hidden weights": Role.HIDDEN}
PRINTED_MUP: Printed = {
    "sgd": ("0, -1", "1, 1", "1/2, 0"),
    "shampoo": ("0, -1/2", "1, 1/2", "1/2, 0"),
    "kfac": ("0, 0", "1, 0", "1/2, 0"),
}
PRINTED_LAZY: Printed = {
    "sgd": ("0, 0", "1/2, 1", "1/2, 1"),
    "shampoo": ("0, 0", "1/2, 1/2", "1/2, 1/2"),
    "kfac": ("0, 0", "1/2, 0", "1/2, 0"),
    "foof": ("0, 0", "1/2, 0", "1/2, 0"),
}


def solved_exponents(method: str, scheme: Scheme) -> tuple[tuple[Fraction, Fraction], ...]:
    """Returns the exponents (b, c) of input, output and hidden weights that theory derives.

    Args:
        method: The method's name.
        scheme: The parametrization.

    Returns:
        The pairs in the order of ``ROLES``.

    Example:
        >>> solved_exponents("kfac", SP)[0]
        (Fraction(0, 1), Fraction(0, 1))
    """
    exponents = solve(get_method(method), scheme)
    return tuple((exponents[role].b, exponents[role].c.total) for role in ROLES.values())


def matches_printed(scheme: Scheme, printed: Printed) -> ClaimCheck:
    """Checks that the exponents (b, c) that theory derives are those that the paper prints."""

    def check(evidence: Evidence) -> Finding:
        wrong = [
            method
            for method, cells in printed.items()
            if solved_exponents(method, scheme) != tuple(map(_exponents, cells))
        ]
        summary = f"{len(printed) - len(wrong)} of {len(printed)} methods as printed"
        return Finding(FAILS if wrong else HOLDS, summary + (f"; others: {', '.join(wrong)}" if wrong else ""))

    return check


def _exponents(text: str) -> tuple[Fraction, Fraction]:
    b, c = text.split(",")
    return Fraction(b.strip()), Fraction(c.strip())


def _table(title: str, scheme: Scheme, printed: Printed) -> Table:
    rows = []
    for method in printed:
        cells = [f"b = {b}, c = {c}" for b, c in solved_exponents(method, scheme)]
        rows.append((get_method(method).title, *cells))
    return Table(title, ("method", *ROLES), tuple(rows), ("initial std ~ M^-b, learning rate ~ M^-c",))


@recipe("abc-parametrization", "Table 1", "muP for K-FAC and Shampoo")
def abc(scale: Scale) -> Experiment:
    mup = get_scheme("mup")
    claims = [
        Claim(
            "The conditions of muP give these exponents for SGD, Shampoo and K-FAC.",
            matches_printed(mup, PRINTED_MUP),
            "the table",
        ),
        Claim(
            "SP: b = 0 for input weights, 1/2 for the others, c = 0.",
            matches_printed(SP, {"kfac": ("0, 0", "1/2, 0", "1/2, 0")}),
            "the table",
        ),
    ]
    return Experiment({}, claims, drawing.table(lambda evidence: _table("muP", mup, PRINTED_MUP)))


@recipe("abc-parametrization-lazy", "Appendix I, table", "Lazy parametrization for SGD, K-FAC, FOOF and Shampoo")
def lazy(scale: Scale) -> Experiment:
    claims = [
        Claim(
            "The uniform parametrization at r = 1/2 has these exponents.",
            matches_printed(NTK, PRINTED_LAZY),
            "the table",
        )
    ]
    choices = (
        "The paper prints the term with e_B in the conditions for general r with the other sign; at r = 1/2, which is "
        "this table, both agree.",
    )
    return Experiment({}, claims, drawing.table(lambda evidence: _table("lazy, r = 1/2", NTK, PRINTED_LAZY)), choices)
