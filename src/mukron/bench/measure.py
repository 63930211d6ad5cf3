"""Times in turns. On a shared machine all methods feel the same disturbances, and medians are compared."""

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

from mukron.bench.methods import LR, Method, Trainer
from mukron.bench.tasks import Batches
from mukron.train.surroundings import precision

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]  # shows how far one has come with something
FEW = 3  # rounds of a method that is slower than one's patience
WARM_UP = 2  # turns before the first that counts


@dataclass(frozen=True)
class Options:
    """What is the same for all benchmarks."""

    widths: tuple[int, ...]
    batch: int = 256
    rounds: int = 20
    device: str = "cpu"
    precision: str = "float32"
    against: str = "all"
    patience: float = 20.0  # seconds a turn; a slower method is measured for FEW rounds
    memory: bool = True
    profile: bool = False

    def __post_init__(self) -> None:
        if not self.widths or any(width < 1 for width in self.widths):
            raise ValueError(f"--widths {list(self.widths)}: expected whole numbers from 1 on, as in 256,1024")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; choose cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda': torch finds no GPU here; choose cpu")
        if self.precision not in ("float32", "tf32"):
            raise ValueError(f"unknown precision {self.precision!r}; choose float32 or tf32")
        if self.precision == "tf32" and self.device == "cpu":
            raise ValueError("precision 'tf32' is of GPUs: choose --device cuda, or float32")


@contextmanager
def products(name: str) -> Iterator[None]:
    """Precision of matrix products and of convolutions alike, which torch by itself makes in tf32."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = name == "tf32"
    try:
        with precision(name):
            yield
    finally:
        cudnn.allow_tf32 = before


@dataclass
class Racer:
    """A method in the race."""

    method: Method
    trainer: Trainer | None = None
    batches: Iterator[tuple[Tensor, Tensor]] = field(default_factory=lambda: iter(()))
    times: list[float] = field(default_factory=list)
    failed: str = ""
    rounds: int = 0
    memory: float | None = None

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        """Out of memory, or a peer that breaks: it is listed so, and the others go on. What is ours must not break."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._drop("out of memory")
        except Exception as error:
            if self.method.package is None:
                raise RuntimeError(f"{self.method.name}: {error}") from error
            said = str(error).strip().splitlines()
            self._drop(f"{type(error).__name__}: {said[0] if said else 'no reason given'}")

    def _drop(self, reason: str) -> None:
        self.failed, self.trainer = reason, None


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """What is no longer used goes back, so that a peak of memory is a method's own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def warm_up(racer: Racer, model: nn.Module, pool: Batches, options: Options) -> None:
    """The first turns, which do not count; the last of them tells how patient one must be."""
    racer.trainer, racer.batches = racer.method.make(model, LR), cycle(pool)
    if racer.method.prime is not None:
        racer.method.prime(racer.trainer, racer.batches)
    for _ in range(WARM_UP):
        last = turn(racer, options.device)
    slow = last * racer.method.period > 1e3 * options.patience
    racer.rounds = FEW if slow else options.rounds


def take_turns(racers: Sequence[Racer], rounds: Iterable[int], device: str) -> None:
    """Every method makes ``period`` steps a turn, in an order that is shuffled each round; their times are added."""
    order = random.Random(0)
    for number in rounds:
        for racer in order.sample(racers, len(racers)):
            if racer.trainer is not None and number < racer.rounds:
                with racer.may_fail():
                    racer.times.append(turn(racer, device))


def turn(racer: Racer, device: str) -> float:
    """Milliseconds a step, over one period."""
    assert racer.trainer is not None
    synchronize(device)
    start = time.perf_counter()
    losses = [racer.trainer(x, y) for x, y in islice(racer.batches, racer.method.period)]
    synchronize(device)
    elapsed = time.perf_counter() - start
    racer.trainer.check(losses)
    return 1e3 * elapsed / racer.method.period
