"""A benchmark of training steps: each width in turn, all methods side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from mukron.bench import memory, peers
from mukron.bench.agreement import LARGE_LR, Reference, difference
from mukron.bench.labels import parts_of
from mukron.bench.measure import FEW, Options, Racer, Track, products, release, take_turns, warm_up
from mukron.bench.methods import LR, Method
from mukron.bench.result import Row, begun
from mukron.bench.tasks import Batches, Task
from mukron.optim.base import SecondOrder

TINY = 2  # samples, with which libraries load what they load on first use


@dataclass(frozen=True)
class Bench:
    """Methods side by side on one task. The first method is what the others are measured in."""

    name: str
    task: Task
    methods: tuple[Method, ...]
    peers: tuple[Method, ...] = ()

    def method(self, name: str) -> Method:
        return next(method for method in (*self.methods, *self.peers) if method.name == name)


class StepsRun:
    """One run of such a benchmark; ``rows`` come width by width, so that an interrupted run leaves what it has."""

    def __init__(self, bench: Bench, options: Options, command: str) -> None:
        self.bench, self.options, self.task = bench, options, bench.task
        theirs, self.missing = peers.choose(bench.peers, options.against)
        self.methods = (*bench.methods, *theirs)
        self._agreement: dict[tuple[str, int], float | None] = {}
        self.result = begun(
            bench.name,
            f"One step, {self.task.title}, cross-entropy, batch {options.batch}, {options.precision}",
            self.methods[0].name,
            self._notes(),
            options,
            command,
            dict.fromkeys(method.package for method in theirs if method.package),
        )

    def _notes(self) -> Iterator[str]:
        width, batch = self.task.agree_at
        yield (
            f"median of {self.options.rounds} turns ({FEW} where one takes over {self.options.patience:g} s), methods "
            "taking turns in shuffled order; 'every 10': the mean over 10 steps, one of which refreshes"
        )
        if self.options.memory:
            alone = "a process of its own" if self.options.device == "cpu" else "the method alone"
            yield f"MiB: peak of {alone} above what torch takes; weights, gradients, states, activations"
        yield (
            "off by: the first update, |ours - float64| / |float64|, of the layer where it is largest "
            f"(at most at width {width}, batch {batch})"
        )
        if self.missing:
            yield f"not installed, not measured: {', '.join(self.missing)} (pip install 'mukron[peers]')"

    def rows(self, track: Track[Racer], rounds: Track[int]) -> Iterator[list[Row]]:
        with products(self.options.precision):
            pool = self.task.pool(self.options.batch, self.options.device)
            for width in self.options.widths:
                yield self._at(width, pool, track, rounds)

    def _at(self, width: int, pool: Batches, track: Track[Racer], rounds: Track[int]) -> list[Row]:
        racers = [Racer(method) for method in self.methods]
        differs = {}
        device = self.options.device
        for racer in track(racers, f"width {width}: each alone"):
            with racer.may_fail():
                differs[racer.method.name] = self._differs(racer.method, width, pool)
                racer.memory = self._memory(racer.method, width, pool)
        for racer in track([racer for racer in racers if not racer.failed], f"width {width}: warm-up"):
            with racer.may_fail():
                warm_up(racer, self.task.build(width, device), pool, self.options)
        take_turns(racers, rounds(range(self.options.rounds), f"width {width}: in turns"), device)
        found = [self._row(racer, width, differs.get(racer.method.name), pool) for racer in racers]
        for racer in racers:
            racer.trainer = None
        release(device)
        return found

    def _row(self, racer: Racer, width: int, differs: float | None, pool: Batches) -> Row:
        parts = None
        if self.options.profile and racer.trainer is not None and isinstance(racer.trainer.optimizer, SecondOrder):
            parts = parts_of(racer, pool, self.options.device)
        method = racer.method
        times = () if racer.failed else tuple(racer.times)
        return Row(method.name, width, times, racer.memory, differs, method.note, racer.failed, parts)

    def _memory(self, method: Method, width: int, pool: Batches) -> float | None:
        """MiB at the peak of its steps, above what was held before."""
        if not self.options.memory:
            return None
        if self.options.device == "cpu":
            return memory.elsewhere(self.bench.name, method.name, width, self.options.batch)
        return peak_alone(self.task, method, width, pool, self.options.device)

    def _differs(self, method: Method, width: int, pool: Batches) -> float | None:
        """Of the first update, from its truth."""
        width = min(width, self.task.agree_at[0])
        if method.truth is None:
            return None
        key = (method.name, width)
        if key not in self._agreement:
            x, y = (part[: self.task.agree_at[1]] for part in pool[0])
            expected = method.truth(self._reference(width, x, y))
            model = self.task.build(width, self.options.device)
            trainer = method.make(model, LARGE_LR)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            trainer(x, y)
            after = {name: parameter.detach() for name, parameter in model.named_parameters()}
            self._agreement[key] = difference(before, after, LARGE_LR, expected)
        return self._agreement[key]

    def _reference(self, width: int, x: torch.Tensor, y: torch.Tensor) -> Reference:
        return Reference(self.task.build(width, self.options.device), x, y)


def peak_alone(task: Task, method: Method, width: int, pool: Batches, device: str) -> float:
    """MiB at the peak of one method's steps up to its second refresh, while it has the device to itself."""
    few = [(x[:TINY], y[:TINY]) for x, y in pool]
    _steps(task, method, 1, few, device)  # what libraries load on first use is not the method's
    release(device)
    before = memory.reset_peak(device)
    _steps(task, method, width, pool, device)
    found = memory.peak(device) - before
    release(device)
    return found


def _steps(task: Task, method: Method, width: int, pool: Batches, device: str) -> None:
    trainer = method.make(task.build(width, device), LR)
    for x, y in islice(cycle(pool), method.period + 1):
        trainer(x, y)
