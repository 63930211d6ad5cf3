"""Initial values: from what the user's initializer drew to what the scheme asks for.

The scheme fixes the spread at any width from the spread at the base width:  std = std_base * r_in^-b.
How the user's own initializer went with the width is read off the values themselves, so a fan-in one (std ~ r^-1/2),
a constant one (GPT-2's 0.02), a truncated or an orthogonal one all end at the same place.

A measured spread carries sampling noise, of relative size (2 N)^-1/2 for N numbers. Initializers follow simple laws,
std ~ R^-k with k = 0, 1/2 or 1 and R how much some dimension of the network grew. A measurement that one of them
explains within its noise is taken to be that law, and the correction is then an exact power, often just 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

LAWS = (Fraction(0), Fraction(1, 2), Fraction(1))
NOISE_SIGMAS = 4.0
TOLERANCE = 0.005  # no initializer is known, nor needed, better than this


def std_of(values: torch.Tensor) -> float:
    """The standard deviation of a tensor's entries; 0 if they are all equal (zeros, ones)."""
    values = values.detach()
    if values.numel() < 2 or not values.is_floating_point():
        return 0.0
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    low, high = torch.aminmax(values)
    return 0.0 if bool(low == high) else float(values.std(correction=0))


@dataclass(frozen=True)
class Spread:
    """A standard deviation and the number of values it was measured on."""

    std: float
    numbers: int


def correction(drawn: Spread, base: Spread, r: Fraction, b: Fraction, ratios: Iterable[Fraction]) -> float:
    """The factor that takes values of spread ``drawn`` to ``base.std * r**-b``.

    ratios: by how much the network's dimensions grew, for the laws that an initializer may have followed.
    """
    change = math.log(drawn.std / base.std)
    candidates = {(ratio, law): -float(law) * math.log(ratio) for ratio in {r, *ratios} for law in LAWS}
    (ratio, law), predicted = min(candidates.items(), key=lambda item: (abs(item[1] - change), item[0][0] != r))
    noise = (1 / (2 * drawn.numbers) + 1 / (2 * base.numbers)) ** 0.5
    if abs(predicted - change) > NOISE_SIGMAS * noise + TOLERANCE:
        return math.exp(-float(b) * math.log(r) - change)
    if ratio == r or law == 0:
        return math.pow(r, law - b)
    return math.pow(ratio, law) * math.pow(r, -b)
