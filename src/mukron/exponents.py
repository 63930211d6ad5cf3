"""The exponent of a power law, measured: value ~ width^slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Exponent:
    """A fitted slope of log value against log width with its confidence interval."""

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.slope:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def fit_exponent(widths: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> Exponent:
    """Least squares over all points, one a width and seed; Student's interval for the slope.

    The interval is that of the seeds' noise around one power law. A curve that is none (a narrow network far from its
    limit) makes it wider, since the misfit counts as noise. With as many points as parameters it is infinite.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"an exponent needs at least two widths, got {sorted(set(widths))}")
    if not all(0 < value < math.inf for value in values):
        raise ValueError("an exponent is fitted to positive, finite values")
    x, y = np.log(np.asarray(widths, float)), np.log(np.asarray(values, float))
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    freedom = len(x) - 2
    if freedom == 0:
        return Exponent(slope, -math.inf, math.inf)
    residual = y - y.mean() - slope * centred
    error = math.sqrt(float(residual @ residual) / freedom / spread)
    reach = student_quantile((1 + confidence) / 2, freedom) * error
    return Exponent(slope, slope - reach, slope + reach)


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's t distribution: from the exact finite sum for its distribution function, by bisection."""
    low, high = 0.0, 1.0
    while _student(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student(t: float, freedom: int) -> float:
    """P(T < t) for t > 0 and a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cos2, odd = math.cos(angle) ** 2, freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    if odd:
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    else:
        inside = math.sin(angle) * total
    return (1 + inside) / 2
