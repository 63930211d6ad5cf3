"""Exact powers of width and depth; those of the width are kept apart by the side of the layer they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | int | str  # what users may write for an exact number: 1, Fraction(1, 2), "1/2"


@dataclass(frozen=True)
class Power:
    """A power of a layer's growth, ``r_in ** fan_in * r_out ** fan_out * L ** depth``, with exact exponents.

    r_in and r_out are the layer's fan-in and fan-out divided by those at the base width. In the paper both sides
    have the width M, and only the sum ``total`` appears. The layers of a real network need not grow by one ratio, so
    the two exponents are kept apart. L is the number of residual blocks divided by that at the base depth, for
    parameters inside of these blocks, and 1 for all others.

    Attributes:
        fan_in: The exponent of r_in.
        fan_out: The exponent of r_out.
        depth: The exponent of L.

    Example:
        >>> from fractions import Fraction
        >>> from mukron.theory import Power
        >>> rate = Power(fan_in=Fraction(-1), fan_out=Fraction(1))
        >>> print(rate)
        r_out / r_in
        >>> rate.of(Fraction(8), Fraction(2))
        0.25
        >>> print(rate + Power(depth=Fraction(1)))
        r_out L / r_in
    """

    fan_in: Fraction = Fraction(0)
    fan_out: Fraction = Fraction(0)
    depth: Fraction = Fraction(0)

    @property
    def total(self) -> Fraction:
        """The exponent of M where both sides of the layer have the width M."""
        return self.fan_in + self.fan_out

    @property
    def of_width(self) -> Power:
        """The part that depends on the width: the power of a layer outside of residual blocks."""
        return Power(self.fan_in, self.fan_out)

    @property
    def of_depth(self) -> Power:
        """The part that depends on the depth: what being inside of a residual block adds."""
        return Power(depth=self.depth)

    def of(self, r_in: Fraction, r_out: Fraction, L: Fraction = Fraction(1)) -> float:
        """Evaluate the power for a layer.

        Args:
            r_in: The fan-in divided by the fan-in at the base width.
            r_out: The fan-out divided by the fan-out at the base width.
            L: The number of residual blocks divided by that at the base depth; 1 outside of residual blocks.

        Returns:
            ``r_in ** fan_in * r_out ** fan_out * L ** depth``.

        Raises:
            ValueError: No floating-point number is as large.
        """
        try:
            # Equal sides are combined first, so that opposite exponents cancel exactly.
            if r_in == r_out:
                return math.pow(r_in, self.total) * math.pow(L, self.depth)
            return math.pow(r_in, self.fan_in) * math.pow(r_out, self.fan_out) * math.pow(L, self.depth)
        except OverflowError:
            raise ValueError(
                f"{self} is beyond all floating-point numbers where r_in = {float(r_in):g}, r_out = {float(r_out):g}, "
                f"L = {float(L):g}; give smaller exponents"
            ) from None

    def __add__(self, other: Power) -> Power:
        return Power(self.fan_in + other.fan_in, self.fan_out + other.fan_out, self.depth + other.depth)

    def __neg__(self) -> Power:
        return Power(-self.fan_in, -self.fan_out, -self.depth)

    def __rmul__(self, factor: Fraction | int) -> Power:
        return Power(factor * self.fan_in, factor * self.fan_out, factor * self.depth)

    def __str__(self) -> str:
        """Write the power as a formula: ``1``, ``r_in^-1/2``, ``r_out / r_in``, ``r_out L / r_in``."""
        sides = [("r_in", self.fan_in), ("r_out", self.fan_out), ("L", self.depth)]
        numerator = [_monomial(side, exponent) for side, exponent in sides if exponent > 0]
        denominator = [_monomial(side, -exponent) for side, exponent in sides if exponent < 0]
        if numerator and denominator:
            return f"{' '.join(numerator)} / {' '.join(denominator)}"
        return " ".join(_monomial(side, exponent) for side, exponent in sides if exponent) or "1"


def _monomial(symbol: str, exponent: Fraction) -> str:
    return symbol if exponent == 1 else f"{symbol}^{exponent}"
