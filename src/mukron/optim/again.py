"""A second attempt at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mukron.curvature import double

if TYPE_CHECKING:
    from mukron.optim.transaction import Transaction


def measure_again(step: Transaction, ill: frozenset[str] = frozenset()) -> None:
    """Set up the next attempt: with a look at each inverse, or with layers in float64 whose damping is small."""
    for name in ill:
        statistics = step.statistics.get(name)
        if statistics is not None:
            if any(getattr(sums, "matrix", None) is not None for sums in (statistics.A, statistics.B)):
                step.imprecise.append(name)
            step.statistics[name] = double(statistics)
    step.double |= ill
    step.measure()
    step.prepare()
