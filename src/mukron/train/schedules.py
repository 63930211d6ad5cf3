"""Learning-rate schedules: the factor on the configured learning rate, as a function of the step's number.

warmup    rises in equal steps to 1
constant  1
cosine    (1 + cos(pi t)) / 2     t goes from 0 to 1 over the steps after the warmup
linear    1 - t
step:60,120,160                   0.2^k after k of these epochs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
}
DROP = 0.2  # the factor at each milestone of "step"


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule; ``str(schedule)`` is the text that ``parse`` reads.

    Attributes:
        shape: "constant", "cosine", "linear" or "step".
        milestones: For "step", the epochs after which the rate drops to a fifth.

    Example:
        >>> Schedule("step", (60.0, 120.0)).factor(step=61, steps_per_epoch=1, epochs=160, warmup=0)
        0.2
    """

    shape: str
    milestones: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads a schedule as it is written in a configuration.

        Args:
            text: "constant", "cosine", "linear" or "step:EPOCH,EPOCH,...".

        Returns:
            The schedule.

        Raises:
            ValueError: If the schedule is unknown or its epochs do not rise.

        Example:
            >>> Schedule.parse("step:60,120")
            Schedule(shape='step', milestones=(60.0, 120.0))
        """
        known = f"known: {', '.join(SHAPES)}, step:EPOCH,EPOCH,..."
        if not isinstance(text, str):
            raise ValueError(known)
        shape, _, argument = text.strip().lower().partition(":")
        if shape in SHAPES and not argument:
            return cls(shape)
        if shape != "step":
            raise ValueError(known)
        try:
            milestones = tuple(float(epoch) for epoch in argument.split(","))
        except ValueError:
            milestones = ()
        if not milestones or not all(a < b < math.inf for a, b in zip((0.0, *milestones), milestones, strict=False)):
            raise ValueError("a step schedule names rising epochs, as in step:60,120,160")
        return cls(shape, milestones)

    def __str__(self) -> str:
        return f"{self.shape}:{','.join(f'{epoch:g}' for epoch in self.milestones)}" if self.milestones else self.shape

    @property
    def knows_its_end(self) -> bool:
        """Whether the learning rates of the first steps depend on the run's length."""
        return self.shape in ("cosine", "linear")

    def factor(self, step: int, steps_per_epoch: int, epochs: int, warmup: float) -> float:
        """Returns the factor on the learning rate.

        Args:
            step: The step, counted from 0.
            steps_per_epoch: The number of steps in an epoch.
            epochs: The length of the run.
            warmup: The length of the warmup, in epochs.

        Returns:
            The factor, at most 1.

        Example:
            >>> [Schedule("linear").factor(step, 2, 2, warmup=0.5) for step in range(4)]
            [1.0, 1.0, 0.6666666666666667, 0.33333333333333337]
        """
        warmup_steps = round(warmup * steps_per_epoch)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if self.milestones:
            return DROP ** sum(epoch * steps_per_epoch <= step for epoch in self.milestones)
        remaining = epochs * steps_per_epoch - warmup_steps
        return SHAPES[self.shape]((step - warmup_steps) / remaining)
