"""How fast features may move: the standard parametrization, and the uniform ones from muP to NTK."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mukron.theory.power import Number

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Scheme:
    """A parametrization: a step moves the features below the output by Theta(M^-r); r = None scales nothing."""

    r: Fraction | None

    def __post_init__(self) -> None:
        if self.r is not None and not 0 <= self.r <= HALF:
            raise ValueError(f"r must lie in [0, 1/2] (0 is muP, 1/2 is NTK), got {self.r}")

    @property
    def name(self) -> str:
        named = {None: "sp", Fraction(0): "mup", HALF: "ntk"}
        return named.get(self.r, f"uniform:{self.r}")

    @property
    def s(self) -> Fraction:
        """a_L + b_L: the exponent of the output weights' initial size (Condition A.2 gives 1 - r)."""
        return HALF if self.r is None else 1 - self.r

    def __str__(self) -> str:
        return self.name


SP, MUP, NTK = Scheme(None), Scheme(Fraction(0)), Scheme(HALF)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (SP, MUP, NTK)}


def uniform(r: Number) -> Scheme:
    """The uniform parametrization between muP (r = 0) and NTK (r = 1/2)."""
    return Scheme(Fraction(r))


def get_scheme(scheme: Scheme | str) -> Scheme:
    """The scheme of that name: ``"mup"``, ``"sp"``, ``"ntk"`` or ``"uniform:1/4"``."""
    if isinstance(scheme, Scheme):
        return scheme
    name, _, argument = scheme.strip().lower().partition(":")
    if name == "uniform" and argument:
        try:
            r = Fraction(argument)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"scheme {scheme!r}: r must be an exact number, as in 'uniform:1/4'") from error
        return uniform(r)
    if argument or name not in SCHEMES:
        known = ", ".join(map(repr, SCHEMES))
        raise ValueError(f"unknown scheme {scheme!r}; known: {known}, 'uniform:R' with R from 0 to 1/2")
    return SCHEMES[name]
