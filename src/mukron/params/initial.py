"""Initial values: from what the user's initializer drew to what the scheme asks for.

The scheme fixes the spread at any width from the spread at the base width:  std = std_base * r_in^-b.
How the user's own initializer went with the width is read off the values themselves, so a fan-in one (std ~ r^-1/2),
a constant one (GPT-2's 0.02), a truncated or an orthogonal one all end at the same place.

Initializers follow simple laws, std ~ R^-k with k = 0, 1/2 or 1 and R how much some dimension of the network grew. A
measured spread carries sampling noise, of relative size (2 N)^-1/2 for N normal numbers. If what was drawn is what is
wanted, within that noise, it is left alone. Else the law that explains it within its noise is taken, and the correction
is an exact power. What no law explains (an orthogonal matrix that turns from tall to wide) is corrected as measured, if
there are enough numbers to measure; with few, the nearest law is taken: nothing is ever corrected by more than a law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

LAWS = (Fraction(0), Fraction(1, 2), Fraction(1))
NOISE_SIGMAS = 4.0
TOLERANCE = 0.005  # no initializer is known, nor needed, better than this
ENOUGH = 256  # numbers, to trust a measurement against every law


@dataclass(frozen=True)
class Spread:
    """How initial values are spread: the root mean square of their distance from ``center``, over that many numbers."""

    std: float  # 0: they are all equal
    numbers: int
    center: float = 0.0  # 0 unless the initializer clearly draws around something else, as around 1 for a gain
    kurtosis: float = 3.0  # 3 for normal values, 1.8 for uniform ones: how noisy a measured spread is


def measure(draws: Sequence[Tensor]) -> Spread:
    """The spread of one parameter over several draws of its initializer."""
    values = torch.cat([draw.detach().flatten().double() for draw in draws])
    numbers = values.numel()
    if not numbers or not values.isfinite().all():
        return Spread(math.nan if numbers else 0.0, numbers)
    if bool((values == values[0]).all()):
        return Spread(0.0, numbers, float(values[0]))
    mean, deviation = float(values.mean()), float(values.std(correction=0))
    clearly_off = abs(mean) > 8 * deviation / math.sqrt(numbers) and numbers >= 16
    center = mean if clearly_off else 0.0
    std = distance(values, center)
    kurtosis = float(((values - center) / std).pow(4).mean()) if numbers >= 64 else 3.0
    return Spread(std, numbers, center, max(1.2, kurtosis))


def distance(values: Tensor, center: float) -> float:
    """The root mean square distance of a tensor's entries from ``center``."""
    values = values.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    return float((values - center if center else values).square().mean().sqrt())


def is_constant(values: Tensor) -> bool:
    return not values.numel() or bool((values == values.flatten()[0]).all())


def correction(std: float, numbers: int, base: Spread, r: Fraction, b: Fraction, ratios: Iterable[Fraction]) -> float:
    """The factor that takes ``numbers`` values of spread ``std`` to the spread ``base.std * r**-b``.

    ratios: by how much the network's dimensions grew, for the laws that an initializer may have followed.
    """
    change = math.log(std / base.std)
    candidates = {(ratio, law): -float(law) * math.log(ratio) for ratio in {r, *ratios} for law in LAWS}
    (ratio, law), predicted = min(candidates.items(), key=lambda item: (abs(item[1] - change), item[0][0] != r))
    noise = ((base.kurtosis - 1) / 4 * (1 / numbers + 1 / base.numbers)) ** 0.5
    if abs(change + float(b) * math.log(r)) <= 2 * noise + TOLERANCE:
        return 1.0
    if abs(predicted - change) > NOISE_SIGMAS * noise + TOLERANCE and min(numbers, base.numbers) >= ENOUGH:
        return math.exp(-float(b) * math.log(r) - change)
    if ratio == r or law == 0:
        return math.pow(r, law - b)
    return math.pow(ratio, law) * math.pow(r, -b)
