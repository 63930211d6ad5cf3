"""A benchmark of training steps: one width after the other, with all methods taking turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from mukron.bench import memory, peers
from mukron.bench.agreement import COMPARISON_LR, Reference, relative_difference
from mukron.bench.labels import profile_step
from mukron.bench.measure import (
    SLOW_ROUNDS,
    MethodTiming,
    Options,
    ProgressTracker,
    product_precision,
    release_memory,
    take_turns,
    warm_up,
)
from mukron.bench.methods import STEP_SETTINGS, TIMING_LR, BenchMethod
from mukron.bench.result import MethodResult, new_result
from mukron.bench.tasks import Batches, Task
from mukron.optim import SecondOrder

TINY_BATCH = 2  # samples of a step before measuring, in which libraries load their lazily loaded parts


@dataclass(frozen=True)
class Bench:
    """Methods that are compared on one task.

    Attributes:
        name: The benchmark's name.
        task: The network and its data.
        methods: This library's and torch's methods; the others are compared with the first.
        peers: Methods of other libraries.

    Example:
        >>> from mukron.bench.kfac_step import KFAC_STEP
        >>> KFAC_STEP.method("FOOF").period
        1
    """

    name: str
    task: Task
    methods: tuple[BenchMethod, ...]
    peers: tuple[BenchMethod, ...] = ()

    def method(self, name: str) -> BenchMethod:
        """Returns the method of that name.

        Args:
            name: The method's name in tables.

        Returns:
            The method.

        Raises:
            StopIteration: If there is none.
        """
        return next(method for method in (*self.methods, *self.peers) if method.name == name)


class StepsRun:
    """A run of a benchmark of steps.

    Args:
        bench: The benchmark.
        options: The options.
        command: The command that runs it again.

    Example:
        >>> from mukron.bench.methods import TORCH_SGD
        >>> from mukron.bench.tasks import mlp_task
        >>> options = Options((4,), batch=2, rounds=1, against="none", memory=False)
        >>> StepsRun(Bench("sgd", mlp_task(), (TORCH_SGD,)), options, "").result.base
        'SGD'
    """

    def __init__(self, bench: Bench, options: Options, command: str) -> None:
        self.bench, self.options, self.task = bench, options, bench.task
        chosen, self.missing = peers.choose_peers(bench.peers, options.against)
        self.methods = (*bench.methods, *chosen)
        self._errors: dict[tuple[str, int], float | None] = {}
        self.result = new_result(
            bench.name,
            f"One step, {self.task.title}, cross-entropy, batch {options.batch}, {options.precision}",
            self.methods[0].name,
            self._notes(),
            options,
            command,
            dict.fromkeys(method.package for method in chosen if method.package),
        )

    def _notes(self) -> Iterator[str]:
        width, batch = self.task.reference_size
        yield (
            f"median of {self.options.rounds} turns ({SLOW_ROUNDS} where one takes over {self.options.patience:g} s), "
            "methods taking turns in shuffled order; 'every 10': the mean over 10 steps, one of which refreshes"
        )
        yield STEP_SETTINGS
        if self.options.memory:
            subject = "a process of its own" if self.options.device == "cpu" else "the method alone"
            yield f"MiB: peak of {subject} above what torch takes; weights, gradients, states, activations"
        yield (
            "off by: the first update, |ours - float64| / |float64|, of the layer where it is largest "
            f"(at most at width {width}, batch {batch})"
        )
        if self.missing:
            yield f"not installed, not measured: {', '.join(self.missing)} (pip install 'mukron[peers]')"

    def rows(self, track: ProgressTracker[MethodTiming], rounds: ProgressTracker[int]) -> Iterator[list[MethodResult]]:
        """Measures one width after the other, so that an interrupted run keeps the widths that are done.

        Args:
            track: Shows progress over the methods.
            rounds: Shows progress over the rounds.

        Yields:
            The measurements at one width.
        """
        with product_precision(self.options.precision):
            pool = self.task.pool(self.options.batch, self.options.device)
            for width in self.options.widths:
                yield self._measure_width(width, pool, track, rounds)

    def _measure_width(
        self, width: int, pool: Batches, track: ProgressTracker[MethodTiming], rounds: ProgressTracker[int]
    ) -> list[MethodResult]:
        timings = [MethodTiming(method) for method in self.methods]
        differs = {}
        device = self.options.device
        for timing in track(timings, f"width {width}: each alone"):
            with timing.may_fail():
                differs[timing.method.name] = self._first_update_error(timing.method, width, pool)
                timing.memory = self._memory(timing.method, width, pool)
        for timing in track([timing for timing in timings if not timing.failed], f"width {width}: warm-up"):
            with timing.may_fail():
                warm_up(timing, self.task.build(width, device), pool, self.options)
        take_turns(timings, rounds(range(self.options.rounds), f"width {width}: in turns"), device)
        measurements = [self._row(timing, width, differs.get(timing.method.name), pool) for timing in timings]
        for timing in timings:
            timing.trainer = None
        release_memory(device)
        return measurements

    def _row(self, timing: MethodTiming, width: int, differs: float | None, pool: Batches) -> MethodResult:
        parts = None
        if self.options.profile and timing.trainer is not None and isinstance(timing.trainer.optimizer, SecondOrder):
            parts = profile_step(timing, pool, self.options.device)
        method = timing.method
        times = () if timing.failed else tuple(timing.times)
        return MethodResult(method.name, width, times, timing.memory, differs, method.note, timing.failed, parts)

    def _memory(self, method: BenchMethod, width: int, pool: Batches) -> float | None:
        """Returns the peak memory of a method's steps in MiB, above what was in use before."""
        if not self.options.memory:
            return None
        if self.options.device == "cpu":
            return memory.peak_in_subprocess(self.bench.name, method.name, width, self.options.batch)
        return peak_memory(self.task, method, width, pool, self.options.device)

    def _first_update_error(self, method: BenchMethod, width: int, pool: Batches) -> float | None:
        """Returns the relative difference of the method's first update from the reference in float64."""
        width = min(width, self.task.reference_size[0])
        if method.reference_update is None:
            return None
        key = (method.name, width)
        if key not in self._errors:
            x, y = (part[: self.task.reference_size[1]] for part in pool[0])
            expected = method.reference_update(self._reference(width, x, y))
            model = self.task.build(width, self.options.device)
            trainer = method.make(model, COMPARISON_LR)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            trainer(x, y)
            after = {name: parameter.detach() for name, parameter in model.named_parameters()}
            self._errors[key] = relative_difference(before, after, COMPARISON_LR, expected)
        return self._errors[key]

    def _reference(self, width: int, x: torch.Tensor, y: torch.Tensor) -> Reference:
        return Reference(self.task.build(width, self.options.device), x, y)


def peak_memory(task: Task, method: BenchMethod, width: int, pool: Batches, device: str) -> float:
    """Measures the peak memory of a method's steps up to its second refresh, with no other method on the device.

    Args:
        task: The network and its data.
        method: The method.
        width: The network's width.
        pool: Batches to train on.
        device: "cpu" or "cuda".

    Returns:
        MiB above what was in use before.
    """
    tiny = [(x[:TINY_BATCH], y[:TINY_BATCH]) for x, y in pool]
    _steps(task, method, 1, tiny, device)  # lazily loaded parts of libraries do not count
    release_memory(device)
    before = memory.reset_peak(device)
    _steps(task, method, width, pool, device)
    used = memory.peak(device) - before
    release_memory(device)
    return used


def _steps(task: Task, method: BenchMethod, width: int, pool: Batches, device: str) -> None:
    trainer = method.make(task.build(width, device), TIMING_LR)
    for x, y in islice(cycle(pool), method.period + 1):
        trainer(x, y)
