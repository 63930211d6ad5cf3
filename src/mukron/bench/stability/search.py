"""The learning rate that is best when inverses are refreshed at every step: the lowest point of a grid that grows."""

from __future__ import annotations

from collections.abc import Mapping

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


def best_power(finals: Mapping[int, float]) -> int:
    """Return the power with the lowest final loss; of equal ones the lowest power.

    Args:
        finals: Final losses by power.

    Returns:
        The power.

    Example:
        >>> best_power({-9: 0.5, -7: 0.2, -5: float("inf")})
        -7
    """
    return min(sorted(finals), key=lambda power: finals[power])


def next_power(finals: Mapping[int, float]) -> int | None:
    """Return the power to try next: beyond the edge of the grid on which the lowest final loss lies.

    Args:
        finals: Final losses by power.

    Returns:
        The power, or None if the lowest point lies inside the grid or the grid may not grow.

    Example:
        >>> next_power({-9: 0.5, -7: 0.2, -5: 0.1})
        -3
        >>> next_power({-9: 0.5, -7: 0.1, -5: 0.2}) is None
        True
    """
    best = best_power(finals)
    power = best - RATE_STEP if best == min(finals) else best + RATE_STEP if best == max(finals) else None
    return power if power is not None and LOWEST_POWER <= power <= HIGHEST_POWER else None
