"""How the learning rate goes over a run: what the configured one is multiplied by, from the number of the step alone.

warmup    rises in equal steps to 1
constant  1
cosine    (1 + cos(pi t)) / 2     t from 0 to 1 over what is left after the warmup
linear    1 - t
step:60,120,160                   0.2 to the number of these epochs that are over
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
DROP = 0.2


@dataclass(frozen=True)
class Schedule:
    """The shape of a learning rate; ``str`` of it is how it is written."""

    shape: str
    milestones: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Schedule:
        known = f"known: {', '.join(SHAPES)}, step:EPOCH,EPOCH,..."
        if not isinstance(text, str):
            raise ValueError(known)
        shape, _, argument = text.strip().lower().partition(":")
        if shape in SHAPES and not argument:
            return cls(shape)
        if shape != "step":
            raise ValueError(known)
        try:
            milestones = tuple(float(each) for each in argument.split(","))
        except ValueError:
            milestones = ()
        if not milestones or not all(a < b < math.inf for a, b in zip((0.0, *milestones), milestones, strict=False)):
            raise ValueError("a step schedule names rising epochs, as in step:60,120,160")
        return cls(shape, milestones)

    def __str__(self) -> str:
        return f"{self.shape}:{','.join(f'{each:g}' for each in self.milestones)}" if self.milestones else self.shape

    @property
    def knows_its_end(self) -> bool:
        """Whether the run's length changes what its first steps do."""
        return self.shape in ("cosine", "linear")

    def factor(self, step: int, steps_per_epoch: int, epochs: int, warmup: float) -> float:
        """What the learning rate is multiplied by at that step, counted from 0; epochs and warmup in epochs."""
        rising = round(warmup * steps_per_epoch)
        if step < rising:
            return (step + 1) / rising
        if self.milestones:
            return DROP ** sum(each * steps_per_epoch <= step for each in self.milestones)
        left = epochs * steps_per_epoch - rising
        return SHAPES[self.shape]((step - rising) / left)
