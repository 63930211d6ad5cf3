"""The benchmark of a grid of short runs of a narrow network: trained one at a time, and as stacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from mukron.bench.measure import Options, ProgressTracker, product_precision, release_memory, synchronize
from mukron.bench.result import MethodResult, new_result
from mukron.data import Dataset, load
from mukron.train import Run, RunConfig, stack_size, train, train_stack

LR_COUNT, SEED_COUNT, RUN_EPOCHS, TRAIN_SAMPLES = 8, 8, 2, 1024
ONE_AT_A_TIME, AS_STACKS = "one at a time", "stacked"
SEPARATE_EVERY = 8  # every eighth run is trained on its own too


def sweep_configs(width: int, options: Options) -> list[RunConfig]:
    """Returns the grid of runs: learning rates times seeds of an MLP with K-FAC on digits.

    Args:
        width: The network's width.
        options: The benchmark's options.

    Returns:
        The configurations.

    Example:
        >>> len(sweep_configs(128, Options((128,), batch=64)))
        64
    """
    base = RunConfig(
        width=width,
        base_width=width,
        samples=TRAIN_SAMPLES,
        loss="mse",
        method="kfac",
        epochs=RUN_EPOCHS,
        batch=options.batch,
        momentum=0.9,
        device=options.device,
        dtype="tf32" if options.precision == "tf32" else "float32",
    )
    return [base.replace(lr=2.0**-z, seed=seed) for z in range(5, 5 + LR_COUNT) for seed in range(SEED_COUNT)]


class SweepRun:
    """A run of the benchmark of sweeps.

    Args:
        options: The options.
        command: The command that runs it again.
    """

    def __init__(self, options: Options, command: str) -> None:
        self.options, self.data = options, load("digits")
        title = (
            f"A run of {RUN_EPOCHS} epochs with K-FAC of an MLP on {TRAIN_SAMPLES} digits, batch {options.batch}, "
            f"{options.precision}: of {LR_COUNT * SEED_COUNT} that differ in learning rate and seed"
        )
        notes = (
            "K-FAC with its defaults: bounded steps, averaged factors",
            f"median of {options.rounds} rounds, each of all {LR_COUNT * SEED_COUNT} runs as stacks, and of every "
            f"{SEPARATE_EVERY}th alone; evaluation and building the networks are part of a run",
            "off by: the test loss in the end, of the same runs in float64, |stacked - alone| / |alone| at its largest",
        )
        self.result = new_result("sweep", title, ONE_AT_A_TIME, notes, options, command)

    def rows(self, track: ProgressTracker[RunConfig], rounds: ProgressTracker[int]) -> Iterator[list[MethodResult]]:
        """Measures one width after the other.

        Args:
            track: Not used; the other benchmarks show progress over their methods by it.
            rounds: Shows progress over the rounds.

        Yields:
            The measurements at one width.
        """
        with product_precision(self.options.precision):
            for width in self.options.widths:
                yield self._measure_width(width, rounds)

    def _measure_width(self, width: int, rounds: ProgressTracker[int]) -> list[MethodResult]:
        configs = sweep_configs(width, self.options)
        size = max(1, stack_size(configs[0], self.data))
        subset = configs[:: SEPARATE_EVERY + 1]  # covers all learning rates and all seeds
        _stacks(configs[:size], size, self.data)  # warm-up of both
        _one_by_one(subset[:1], self.data)
        times: dict[str, list[float]] = {ONE_AT_A_TIME: [], AS_STACKS: []}
        for _ in rounds(range(self.options.rounds), f"width {width}: in turns"):
            times[AS_STACKS].append(1e3 * self._timed(lambda: _stacks(configs, size, self.data)) / len(configs))
            times[ONE_AT_A_TIME].append(1e3 * self._timed(lambda: _one_by_one(subset, self.data)) / len(subset))
        precise = [config.replace(dtype="float64") for config in subset]
        pairs = zip(_stacks(precise, size, self.data), _one_by_one(precise, self.data), strict=True)
        differs = max(_difference(stacked, single) for stacked, single in pairs)
        release_memory(self.options.device)
        return [
            MethodResult(ONE_AT_A_TIME, width, tuple(times[ONE_AT_A_TIME])),
            MethodResult(AS_STACKS, width, tuple(times[AS_STACKS]), differs=differs, note=f"{size} runs a stack"),
        ]

    def _timed(self, work: Callable[[], list[Run]]) -> float:
        synchronize(self.options.device)
        start = time.perf_counter()
        work()
        synchronize(self.options.device)
        return time.perf_counter() - start


def _one_by_one(configs: Sequence[RunConfig], data: Dataset) -> list[Run]:
    return [train(config, dataset=data, progress=False) for config in configs]


def _stacks(configs: Sequence[RunConfig], size: int, data: Dataset) -> list[Run]:
    parts = [configs[start : start + size] for start in range(0, len(configs), size)]
    return [run for part in parts for run in train_stack(part, dataset=data)]


def _difference(stacked: Run, single: Run) -> float:
    """Returns the relative difference of the final test losses; infinite if only one of the runs finished."""
    if stacked.status != single.status:
        return float("inf")
    if stacked.status != "finished":
        return 0.0
    a, b = stacked.final["test_loss"], single.final["test_loss"]
    return float(abs(a - b) / abs(b))
