"""Fit the exponent of a power law, value ~ width^slope, to measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Exponent:
    """A fitted exponent: the slope of log value against log width, with its confidence interval.

    Attributes:
        slope: The fitted exponent.
        low: The lower end of the confidence interval.
        high: The upper end of the confidence interval.

    Example:
        >>> from mukron.exponents import Exponent
        >>> print(Exponent(slope=0.5, low=0.4, high=0.6))
        +0.50 [+0.40, +0.60]
    """

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.slope:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def fit_exponent(widths: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> Exponent:
    """Fit a power law by least squares in the logarithms, with Student's confidence interval for its exponent.

    The interval reflects the noise of the seeds around one power law. A curve that is no power law (a narrow network
    far from its limit) makes it wider, since the misfit counts as noise. With two points it is infinite.

    Args:
        widths: The widths of the points, one for each combination of width and seed.
        values: The measured values, positive and finite.
        confidence: The confidence level of the interval.

    Returns:
        The exponent with its interval.

    Raises:
        ValueError: There are fewer than two different widths, or a value is not positive and finite.

    Example:
        >>> from mukron.exponents import fit_exponent
        >>> round(fit_exponent([64, 128, 256], [1.0, 2.0, 4.0]).slope, 6)
        1.0
    """
    if len(set(widths)) < 2:
        raise ValueError(f"an exponent needs at least two widths, got {sorted(set(widths))}")
    if not all(0 < value < math.inf for value in values):
        raise ValueError("an exponent is fitted to positive, finite values")
    x, y = np.log(np.asarray(widths, float)), np.log(np.asarray(values, float))
    centred = x - x.mean()
    squares = float(centred @ centred)
    slope = float(centred @ y) / squares
    freedom = len(x) - 2
    if freedom == 0:
        return Exponent(slope, -math.inf, math.inf)
    residual = y - y.mean() - slope * centred
    standard_error = math.sqrt(float(residual @ residual) / freedom / squares)
    margin = student_quantile((1 + confidence) / 2, freedom) * standard_error
    return Exponent(slope, slope - margin, slope + margin)


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, by bisection of its distribution function.

    Args:
        probability: The probability below the quantile, at least 1/2.
        freedom: The degrees of freedom, at least 1.

    Returns:
        The quantile.

    Example:
        >>> from mukron.exponents import student_quantile
        >>> round(student_quantile(0.975, 10), 3)
        2.228
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """Return P(T < t) for t > 0 by the exact finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cos2, odd = math.cos(angle) ** 2, freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    if odd:
        central = 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    else:
        central = math.sin(angle) * total
    return (1 + central) / 2
