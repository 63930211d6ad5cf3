"""Exact powers of the width, kept apart by the side of the layer they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | int | str  # what users may write for an exact number: 1, Fraction(1, 2), "1/2"


@dataclass(frozen=True)
class Power:
    """``r_in ** fan_in * r_out ** fan_out``, for a layer whose sides are r_in and r_out times as wide as at the base.

    In the paper both sides have the width M, and only the sum ``total`` appears. A real network's layers
    need not grow by one ratio, so the two are kept apart.
    """

    fan_in: Fraction = Fraction(0)
    fan_out: Fraction = Fraction(0)

    @property
    def total(self) -> Fraction:
        return self.fan_in + self.fan_out

    def of(self, r_in: Fraction, r_out: Fraction) -> float:
        # Equal sides are joined first, so that opposite exponents cancel exactly.
        if r_in == r_out:
            return math.pow(r_in, self.total)
        return math.pow(r_in, self.fan_in) * math.pow(r_out, self.fan_out)

    def __add__(self, other: Power) -> Power:
        return Power(self.fan_in + other.fan_in, self.fan_out + other.fan_out)

    def __neg__(self) -> Power:
        return Power(-self.fan_in, -self.fan_out)

    def __rmul__(self, factor: Fraction | int) -> Power:
        return Power(factor * self.fan_in, factor * self.fan_out)

    def __str__(self) -> str:
        """As a factor in words: ``1``, ``r_in^-1/2``, ``r_out / r_in``."""
        sides = [("r_in", self.fan_in), ("r_out", self.fan_out)]
        up = [_monomial(side, power) for side, power in sides if power > 0]
        down = [_monomial(side, -power) for side, power in sides if power < 0]
        if up and down:
            return f"{' '.join(up)} / {' '.join(down)}"
        return " ".join(_monomial(side, power) for side, power in sides if power) or "1"


def _monomial(symbol: str, power: Fraction) -> str:
    return symbol if power == 1 else f"{symbol}^{power}"
