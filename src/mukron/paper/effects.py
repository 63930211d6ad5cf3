"""Sizes of effects: a verdict says whether a claim holds, an effect how much, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mukron.exponents import Exponent
from mukron.typed import MaybeInfinite

POINTS, PER_DOUBLING, EXPONENT = "points", "per doubling", "in the exponent"


@dataclass(frozen=True)
class Effect:
    """A number that a claim is about, with its interval.

    Attributes:
        value: The number.
        low: The lower end of its interval, -inf where the data do not bound it; None with one seed.
        high: The upper end.
        unit: The unit: "points" of accuracy, "per doubling" of the width for powers of two of a best setting, "in the
            exponent" for a difference from the exponent that theory predicts; empty for the metric's own.

    Example:
        >>> str(Effect(18.9, 18.1, 19.7, "points"))
        '+18.90 [+18.10, +19.70] points'
    """

    value: float
    low: MaybeInfinite | None
    high: MaybeInfinite | None
    unit: str

    @property
    def numbers(self) -> str:
        """The number and its interval, without the unit."""
        return f"{self.value:+.2f}{self._interval}"

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        one_seed = self.low is None
        return f"{self.value:+.2f}{unit}{self._interval}" if one_seed else f"{self.numbers}{unit}"

    @property
    def _interval(self) -> str:
        one_seed = self.low is None or self.high is None
        return " (one seed)" if one_seed else f" [{self.low:+.2f}, {self.high:+.2f}]"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as data for JSON, which has no infinite numbers: those are the texts "inf" and "-inf"."""
        fields = asdict(self).items()
        return {name: str(each) if isinstance(each, float) and math.isinf(each) else each for name, each in fields}


def effect_of(value: float, low: float | None, high: float | None, unit: str) -> Effect | None:
    """Returns an effect rounded to two decimals, which is how it is stored and shown; None if it is not finite.

    Args:
        value: The number.
        low: The lower end of its interval; None if nothing is known of its noise.
        high: The upper end.
        unit: The unit.

    Returns:
        The effect.

    Example:
        >>> effect_of(0.12345, 0.1, 0.2, "points").value
        0.12
    """
    if not math.isfinite(value):
        return None
    low, high = (None if end is None else round(end, 2) + 0.0 for end in (low, high))  # + 0.0: no -0.00
    return Effect(round(value, 2) + 0.0, low, high, unit)


def worst_exponent(exponents: Mapping[Any, tuple[Exponent, float]]) -> Effect | None:
    """Returns the largest difference of a fitted exponent from the predicted one.

    Args:
        exponents: Pairs of a fitted exponent and the predicted one.

    Returns:
        The effect; None if there are no exponents.

    Example:
        >>> print(worst_exponent({"fc1": (Exponent(0.5, 0.4, 0.6), 0.5), "fc2": (Exponent(0.1, 0.0, 0.2), 0.0)}))
        +0.10 [+0.00, +0.20] in the exponent
    """
    if not exponents:
        return None
    fitted, predicted = max(exponents.values(), key=lambda pair: abs(pair[0].slope - pair[1]))
    return effect_of(fitted.slope - predicted, fitted.low - predicted, fitted.high - predicted, EXPONENT)
