"""What a factor remembers: this batch only, a moving average, a sum, or a window of batches.

A memory says how old and new statistics are weighted, and nothing about the form in which a factor is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mukron.arguments import check_number, check_whole
from mukron.linalg import Factor, RowsFactor, State

LARGEST_AVERAGED = 2048  # the size of a factor above which an average of rows would cost more than the step


@dataclass(frozen=True)
class Memory:
    """Base of all memories.

    Example:
        >>> Memory.of("ema:0.95")
        EMA(decay=0.95)
    """

    keeps: ClassVar[bool] = True  # something of one step is used in the next
    averages: ClassVar[bool] = True  # batches of any age are mixed, which only a matrix can hold

    def weights(self, updates: int) -> tuple[float, float]:
        """How much the kept statistic and the new one count.

        Args:
            updates: The number of the update, from 1.

        Returns:
            Two weights: of what is kept and of this batch.
        """
        return 0.0, 1.0

    def batches_in(self, kept: State) -> float:
        """How many batches are remembered; an average counts each by its weight beside the newest one's.

        Args:
            kept: The state of a factor.
        """
        return 1.0

    def update(self, kept: State, factor: Factor) -> Factor:
        """Add this batch's factor, and return what is remembered.

        Args:
            kept: The state of this factor; it is changed.
            factor: This batch's factor.
        """
        kept["updates"] = kept.get("updates", 0) + 1
        return factor.mix(kept, *self.weights(kept["updates"]))

    @staticmethod
    def of(memory: Memory | str) -> Memory:
        """Make a memory from its text: "batch", "sum", "ema:0.95", "auto" or "window:4".

        Args:
            memory: The text, or a memory, which is returned as it is.
        """
        return memory if isinstance(memory, Memory) else parse_memory(memory)


@dataclass(frozen=True)
class Batch(Memory):
    """This batch alone.

    Example:
        >>> Batch()
        Batch()
    """

    keeps: ClassVar[bool] = False
    averages: ClassVar[bool] = False


@dataclass(frozen=True)
class EMA(Memory):
    """Exponential moving average, M <- decay M + (1 - decay) M_batch, corrected for its start at zero.

    Attributes:
        decay: Weight of the past, from 0 to below 1.

    Example:
        >>> EMA(0.9)
        EMA(decay=0.9)
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        check_number("EMA's decay", self.decay)
        if not 0 <= self.decay < 1:
            raise ValueError(f"EMA's decay must lie in [0, 1), got {self.decay}")

    def weights(self, updates: int) -> tuple[float, float]:
        """The weights of a moving average, corrected for its start.

        Args:
            updates: The number of the update, from 1.
        """
        new = (1 - self.decay) / (1 - self.decay**updates)
        return 1 - new, new

    def batches_in(self, kept: State) -> float:
        """How many batches are remembered, each counted by its weight beside the newest one's; at most 1 / (1 - decay).

        Args:
            kept: The state of a factor.
        """
        return 1 / self.weights(kept["updates"])[1] if "updates" in kept else 1.0


@dataclass(frozen=True)
class Auto(EMA):
    """A moving average, except for sides of a layer that are so large that matrices of their size are not formed.

    Where a side is longer than 2048 and has fewer rows a batch, the batch's rows alone are used, in sample space.

    Attributes:
        decay: Weight of the past, from 0 to below 1.

    Example:
        >>> Auto()
        Auto(decay=0.95)
    """

    averages: ClassVar[bool] = False

    def update(self, kept: State, factor: Factor) -> Factor:
        """Add this batch's factor to the average, unless the factor is of rows and large.

        Args:
            kept: The state of this factor; it is changed.
            factor: This batch's factor.
        """
        return (
            factor if isinstance(factor, RowsFactor) and factor.d > LARGEST_AVERAGED else super().update(kept, factor)
        )


@dataclass(frozen=True)
class Sum(Memory):
    """The sum of all batches so far (Shampoo's own, without a trust).

    Example:
        >>> Sum()
        Sum()
    """

    def weights(self, updates: int) -> tuple[float, float]:
        """Both count once.

        Args:
            updates: The number of the update, from 1.
        """
        return 1.0, 1.0

    def batches_in(self, kept: State) -> float:
        """All of them.

        Args:
            kept: The state of a factor.
        """
        return float(kept.get("updates", 1))


@dataclass(frozen=True)
class Window(Memory):
    """The mean of the last batches, kept as rows: no matrix of the layer's size.

    Attributes:
        batches: How many batches are kept.

    Example:
        >>> Window(batches=2)
        Window(batches=2)
    """

    averages: ClassVar[bool] = False
    batches: int = 4

    def __post_init__(self) -> None:
        check_whole("Window's batches", self.batches)
        if self.batches < 1:
            raise ValueError(f"a window holds at least one batch, got {self.batches}")

    def update(self, kept: State, factor: Factor) -> Factor:
        """Append this batch's rows, and drop those that are too old.

        Args:
            kept: The state of this factor; it is changed.
            factor: This batch's factor.
        """
        return factor.append(kept, self.batches)

    def batches_in(self, kept: State) -> float:
        """Those that are kept so far.

        Args:
            kept: The state of a factor.
        """
        return float(len(kept.get("batches", [None])))


def parse_memory(text: str) -> Memory:
    """A memory from text.

    Args:
        text: "batch", "sum", "ema:DECAY", "auto:DECAY" or "window:BATCHES"; the numbers may be left out.

    Returns:
        The memory.

    Raises:
        ValueError: The text names no memory, or its number cannot be.

    Example:
        >>> parse_memory("ema:0.9")
        EMA(decay=0.9)
    """
    name, _, number = str(text).strip().lower().partition(":")
    kinds: dict[str, type[Memory]] = {"batch": Batch, "sum": Sum, "ema": EMA, "auto": Auto, "window": Window}
    if name not in kinds or (number and name in ("batch", "sum")):
        raise ValueError(f"unknown memory {text!r}; known: batch, sum, ema:DECAY, auto:DECAY, window:BATCHES")
    if not number:
        return kinds[name]()
    return kinds[name](int(number) if name == "window" else float(number))  # type: ignore[call-arg]
