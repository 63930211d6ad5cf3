"""Momentum: on the update, or on the gradient before it is preconditioned. A number is short for one of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mukron.arguments import check_flag, check_number


@dataclass(frozen=True)
class HeavyBall:
    """Momentum on the update: buffer <- beta buffer + update, and the buffer is what the weights move by.

    Attributes:
        beta: From 0, no momentum, to below 1.
        nesterov: Look one step ahead along the buffer.

    Example:
        >>> HeavyBall(0.9, nesterov=True)
        HeavyBall(beta=0.9, nesterov=True)
    """

    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_momentum(self.beta, self.nesterov)


@dataclass(frozen=True)
class GradientMomentum:
    """Momentum on the gradient, before it is preconditioned: its moving average, corrected for its start at zero.

    Attributes:
        beta: Weight of the past, from 0 to below 1.
        nesterov: Look one step ahead: the average with the gradient mixed in once more.

    Example:
        >>> GradientMomentum(0.95)
        GradientMomentum(beta=0.95, nesterov=False)
    """

    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_momentum(self.beta, self.nesterov)


Momentum = HeavyBall | GradientMomentum


def momentum_entries(
    momentum: float | Momentum | None, nesterov: bool, kind: type[Momentum] | None, bounded: bool
) -> dict[str, Any]:
    """Momentum as entries of a parameter group, where schedulers look for numbers.

    kind: what a number means. None: with a bound it is on the gradient, since the bound is on a single move, of which
    heavy ball would add many up; without one, and with nesterov, on the update.
    """
    check_flag("nesterov", nesterov)
    means = kind or (GradientMomentum if bounded and not nesterov else HeavyBall)
    if isinstance(momentum, Momentum) and nesterov:
        raise ValueError(f"nesterov=True goes with a number as momentum; got {momentum}. Use HeavyBall(nesterov=True)")
    if momentum is None:
        momentum = 0.0 if means is HeavyBall else 0.9
    if not isinstance(momentum, Momentum):
        momentum = means(momentum, nesterov)
    if kind is GradientMomentum and not isinstance(momentum, GradientMomentum):
        raise TypeError(f"momentum is on the gradient here: a number, or GradientMomentum(beta); got {momentum}")
    place = "update" if isinstance(momentum, HeavyBall) else "gradient"
    return {"momentum": momentum.beta, "nesterov": momentum.nesterov, "momentum_on": place}


def check_momentum(beta: float, nesterov: bool) -> None:
    check_number("momentum", beta)
    check_flag("nesterov", nesterov)
    if not 0 <= beta < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {beta}")
    if nesterov and not beta:
        raise ValueError("nesterov=True needs momentum > 0")
