"""The parametrizations: the standard one (SP), and the uniform ones from muP to NTK."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mukron.readers import exact_number, shown
from mukron.theory.power import Number

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Scheme:
    """A parametrization, given by how fast the features change with the width M.

    One step changes the features below the output by Theta(M^-r).

    Attributes:
        r: The exponent of the change: 0 for muP, 1/2 for NTK, anything between for the uniform parametrizations
            between them; None for the standard parametrization, which scales neither learning rates nor damping.

    Raises:
        ValueError: r does not lie in [0, 1/2].

    Example:
        >>> from mukron.theory import MUP, Scheme, get_scheme
        >>> get_scheme("mup") == MUP == Scheme(r=0)
        True
        >>> MUP.name, MUP.s
        ('mup', Fraction(1, 1))
    """

    r: Fraction | None

    def __post_init__(self) -> None:
        if self.r is not None and not 0 <= self.r <= HALF:
            raise ValueError(f"r must lie in [0, 1/2] (0 is muP, 1/2 is NTK), got {self.r}")

    @property
    def name(self) -> str:
        """The name by which ``get_scheme`` finds this scheme."""
        names = {None: "sp", Fraction(0): "mup", HALF: "ntk"}
        return names.get(self.r, f"uniform:{self.r}")

    @property
    def s(self) -> Fraction:
        """The exponent a_L + b_L of the output weights' initial size (Condition A.2 gives 1 - r)."""
        return HALF if self.r is None else 1 - self.r

    def __str__(self) -> str:
        return self.name


SP, MUP, NTK = Scheme(None), Scheme(Fraction(0)), Scheme(HALF)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (SP, MUP, NTK)}


def uniform(r: Number) -> Scheme:
    """Return the uniform parametrization between muP (r = 0) and NTK (r = 1/2).

    Args:
        r: The exponent of the features' change, from 0 to 1/2: an integer, a fraction or a text such as ``"1/4"``.

    Returns:
        The scheme.

    Raises:
        ValueError: r does not lie in [0, 1/2].

    Example:
        >>> from mukron.theory import uniform
        >>> uniform("1/4").name
        'uniform:1/4'
    """
    return Scheme(exact_number(r))


def get_scheme(scheme: Scheme | str) -> Scheme:
    """Return the scheme of a name.

    Args:
        scheme: ``"mup"``, ``"sp"``, ``"ntk"`` or ``"uniform:R"`` with R from 0 to 1/2, as in ``"uniform:1/4"``. A
            ``Scheme`` is returned as it is.

    Returns:
        The scheme.

    Raises:
        ValueError: There is no scheme of this name.
        TypeError: It is no name.

    Example:
        >>> from mukron.theory import get_scheme
        >>> get_scheme("uniform:1/4").r
        Fraction(1, 4)
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f'scheme must be a name, such as "mup", or a Scheme, got {scheme!r:.80}')
    name, _, argument = scheme.strip().lower().partition(":")
    if name == "uniform" and argument:
        try:
            return uniform(argument)
        except ValueError as error:
            raise ValueError(f"scheme {shown(scheme)}: {error}; r is an exact number, as in 'uniform:1/4'") from error
    if argument or name not in SCHEMES:
        known = ", ".join(map(repr, SCHEMES))
        raise ValueError(f"unknown scheme {shown(scheme)}; known: {known}, 'uniform:R' with R from 0 to 1/2")
    return SCHEMES[name]
