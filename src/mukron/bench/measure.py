"""Timing. Methods take turns, so that disturbances of a shared machine affect all of them; medians are compared."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from mukron.bench.methods import TIMING_LR, BenchMethod, Trainer
from mukron.bench.tasks import Batches
from mukron.train.surroundings import precision

T = TypeVar("T")
ProgressTracker = Callable[[Sequence[T], str], Iterable[T]]  # iterates over items and shows a described progress bar
SLOW_ROUNDS = 3  # rounds of a method whose turn takes longer than ``Options.patience``
WARM_UP_TURNS = 2  # turns before the first that is timed


@dataclass(frozen=True)
class Options:
    """The options that all benchmarks share.

    Attributes:
        widths: Widths of the network, or sizes of the matrix.
        batch: Batch size.
        rounds: Turns of each method.
        device: "cpu" or "cuda".
        precision: Precision of float32 products on a GPU, "float32" or "tf32".
        against: Other libraries to time: "all" that are installed, "none", or names on PyPI separated by commas.
        patience: Seconds per turn; a slower method is timed for ``SLOW_ROUNDS`` rounds.
        memory: Whether to measure peak memory.
        profile: Whether to measure time by part of a step.

    Raises:
        ValueError: If a width is below 1, or device or precision is unknown or not available.

    Example:
        >>> Options((256, 1024), rounds=3).device
        'cpu'
    """

    widths: tuple[int, ...]
    batch: int = 256
    rounds: int = 20
    device: str = "cpu"
    precision: str = "float32"
    against: str = "all"
    patience: float = 20.0
    memory: bool = True
    profile: bool = False

    def __post_init__(self) -> None:
        if not self.widths or any(width < 1 for width in self.widths):
            raise ValueError(f"--widths {list(self.widths)}: expected whole numbers from 1 on, as in 256,1024")
        check_device(self.device, self.precision)


def check_device(device: str, precision: str = "float32") -> None:
    """Refuse a device or a precision that is not here.

    Args:
        device: "cpu" or "cuda".
        precision: Of matrix products: "float32" or "tf32".

    Raises:
        ValueError: One of them is not known, or not here.

    Example:
        >>> check_device("cpu")
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU here; choose cpu")
    if precision not in ("float32", "tf32"):
        raise ValueError(f"unknown precision {precision!r}; choose float32 or tf32")
    if precision == "tf32" and device == "cpu":
        raise ValueError("precision 'tf32' is of GPUs: choose --device cuda, or float32")


@contextmanager
def product_precision(name: str) -> Iterator[None]:
    """Sets the precision of matrix products and of convolutions, which torch computes in tf32 by default.

    Args:
        name: "float32" or "tf32".

    Example:
        >>> with product_precision("float32"):
        ...     torch.backends.cudnn.allow_tf32
        False
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = name == "tf32"
    try:
        with precision(name):
            yield
    finally:
        cudnn.allow_tf32 = before


@dataclass
class MethodTiming:
    """A method at one width: its trainer and what has been measured.

    Attributes:
        method: The method.
        trainer: Makes its steps; None before the warm-up and after a failure.
        batches: The batches to train on, without end.
        times: Milliseconds per step, one number per turn.
        failed: Why there are no times; empty if there are.
        rounds: How many turns are timed.
        memory: Peak memory in MiB, if it was measured.
    """

    method: BenchMethod
    trainer: Trainer | None = None
    batches: Iterator[tuple[Tensor, Tensor]] = field(default_factory=lambda: iter(()))
    times: list[float] = field(default_factory=list)
    failed: str = ""
    rounds: int = 0
    memory: float | None = None

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        """Records a failure, so that the other methods continue: out of memory, or any error of another library.

        Raises:
            RuntimeError: If a method of this library or of torch fails.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            self._drop("out of memory")
        except Exception as error:
            if self.method.package is None:
                raise RuntimeError(f"{self.method.name}: {error}") from error
            lines = str(error).strip().splitlines()
            self._drop(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}")

    def _drop(self, reason: str) -> None:
        self.failed, self.trainer = reason, None


def synchronize(device: str) -> None:
    """Waits until the device has finished its work.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        torch.cuda.synchronize()


def release_memory(device: str) -> None:
    """Frees unused memory, so that a peak belongs to one method.

    Args:
        device: "cpu" or "cuda".
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def warm_up(timing: MethodTiming, model: nn.Module, pool: Batches, options: Options) -> None:
    """Makes the first turns of a method, which are not timed, and sets its number of rounds.

    Args:
        timing: The method.
        model: The network it trains.
        pool: The batches to train on.
        options: The benchmark's options.
    """
    timing.trainer, timing.batches = timing.method.make(model, TIMING_LR), cycle(pool)
    if timing.method.warm_start is not None:
        timing.method.warm_start(timing.trainer, timing.batches)
    for _ in range(WARM_UP_TURNS):
        last = time_turn(timing, options.device)
    slow = last * timing.method.period > 1e3 * options.patience
    timing.rounds = SLOW_ROUNDS if slow else options.rounds


def take_turns(timings: Sequence[MethodTiming], rounds: Iterable[int], device: str) -> None:
    """Times all methods in turns of ``period`` steps, in an order that is shuffled each round.

    Args:
        timings: The methods; the measured times are appended to theirs.
        rounds: The numbers of the rounds.
        device: "cpu" or "cuda".
    """
    order = random.Random(0)
    for number in rounds:
        for timing in order.sample(timings, len(timings)):
            if timing.trainer is not None and number < timing.rounds:
                with timing.may_fail():
                    timing.times.append(time_turn(timing, device))


def time_turn(timing: MethodTiming, device: str) -> float:
    """Times one period of a method.

    Args:
        timing: The method, with its trainer.
        device: "cpu" or "cuda".

    Returns:
        Milliseconds per step.
    """
    assert timing.trainer is not None
    synchronize(device)
    start = time.perf_counter()
    losses = [timing.trainer(x, y) for x, y in islice(timing.batches, timing.method.period)]
    synchronize(device)
    elapsed = time.perf_counter() - start
    timing.trainer.check(losses)
    return 1e3 * elapsed / timing.method.period
