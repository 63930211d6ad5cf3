"""The learning rate that is best when inverses are refreshed at every step: the lowest point of a grid that grows."""

from __future__ import annotations

from collections.abc import Mapping

from mukron.bench.stability.rule import RULE
from mukron.bench.stability.runs import StabilityOutcome

RATE_STEP = 2  # the grid's learning rates are powers of 2^2 apart
LOWEST_POWER, HIGHEST_POWER = -21, 9  # the grid never grows beyond


def first_powers(lr_range: tuple[int, int]) -> tuple[int, ...]:
    """Return the three learning rates to begin with, as powers of two: in the middle of a method's range.

    Args:
        lr_range: The lowest and the highest power that are usually searched.

    Returns:
        Three powers.

    Example:
        >>> first_powers((-11, -2))
        (-9, -7, -5)
    """
    middle = sum(lr_range) // 2
    return middle - RATE_STEP, middle, middle + RATE_STEP


def best_power(fresh: Mapping[int, StabilityOutcome]) -> int:
    """Return the power with the lowest final loss of those whose run is stable itself; of equal ones the lowest.

    Final losses below the rule's floor are equal, as they are in the rule.

    Args:
        fresh: By power, what was measured with a refresh at every step.

    Returns:
        The power. If no run is stable, that with the lowest final loss.

    Example:
        >>> slow, calm, wild = (StabilityOutcome(2.3, *numbers) for numbers in ((2.3, 0.9), (2.4, 0.5), (9.2, 0.1)))
        >>> best_power({-9: slow, -7: calm, -5: wild}), lowest_power({-9: slow, -7: calm, -5: wild})
        (-7, -5)
    """
    stable = {power: outcome for power, outcome in fresh.items() if RULE.stable(outcome)}
    return (
        min(sorted(stable), key=lambda power: max(stable[power].final, RULE.floor)) if stable else lowest_power(fresh)
    )


def lowest_power(fresh: Mapping[int, StabilityOutcome]) -> int:
    """Return the power with the lowest final loss, stable or not: what was chosen by the first rule.

    Args:
        fresh: By power, what was measured with a refresh at every step.

    Returns:
        The power; of equal ones the lowest.
    """
    return min(sorted(fresh), key=lambda power: fresh[power].final)


def next_power(fresh: Mapping[int, StabilityOutcome]) -> int | None:
    """Return the power to try next: beyond the edge of the grid, if the best power or the lowest loss lies on it.

    Args:
        fresh: By power, what was measured with a refresh at every step.

    Returns:
        The power, or None if both lie inside the grid or the grid may not grow.

    Example:
        >>> falling = {power: StabilityOutcome(2.3, 2.3, 2.0**-power) for power in (-9, -7, -5)}
        >>> next_power(falling)
        -3
        >>> next_power({**falling, -5: StabilityOutcome(2.3, 2.3, 1e3)}) is None
        True
    """
    for power in (best_power(fresh), lowest_power(fresh)):
        for edge, beyond in ((min(fresh), power - RATE_STEP), (max(fresh), power + RATE_STEP)):
            if power == edge and LOWEST_POWER <= beyond <= HIGHEST_POWER:
                return beyond
    return None
