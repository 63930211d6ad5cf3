"""A grid of short runs of a narrow network: one at a time, and as one stack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from mukron.bench.measure import Options, Track, products, release, synchronize
from mukron.bench.result import Row, begun
from mukron.data import Dataset, load
from mukron.train import Run, RunConfig, stack_size, train, train_stack

RATES, SEEDS, EPOCHS, SAMPLES = 8, 8, 2, 1024
ALONE, STACKED = "one at a time", "stacked"
SAMPLE = 8  # every eighth run is trained alone too


def grid(width: int, options: Options) -> list[RunConfig]:
    """Learning rates times seeds of an MLP with K-FAC, on digits."""
    base = RunConfig(
        width=width,
        base_width=width,
        samples=SAMPLES,
        loss="mse",
        method="kfac",
        epochs=EPOCHS,
        batch=options.batch,
        momentum=0.9,
        device=options.device,
        dtype="tf32" if options.precision == "tf32" else "float32",
    )
    return [base.replace(lr=2.0**-z, seed=seed) for z in range(5, 5 + RATES) for seed in range(SEEDS)]


class SweepRun:
    """One run of the benchmark; ``rows`` come width by width."""

    def __init__(self, options: Options, command: str) -> None:
        self.options, self.data = options, load("digits")
        title = (
            f"A run of {EPOCHS} epochs with K-FAC of an MLP on {SAMPLES} digits, batch {options.batch}, "
            f"{options.precision}: of {RATES * SEEDS} that differ in learning rate and seed"
        )
        notes = (
            f"median of {options.rounds} rounds, each of all {RATES * SEEDS} runs as stacks, and of every {SAMPLE}th "
            "alone; evaluation and building the networks are part of a run",
            "off by: the test loss in the end, of the same runs in float64, |stacked - alone| / |alone| at its largest",
        )
        self.result = begun("sweep", title, ALONE, notes, options, command)

    def rows(self, track: Track[RunConfig], rounds: Track[int]) -> Iterator[list[Row]]:
        with products(self.options.precision):
            for width in self.options.widths:
                yield self._at(width, rounds)

    def _at(self, width: int, rounds: Track[int]) -> list[Row]:
        configs = grid(width, self.options)
        size = max(1, stack_size(configs[0], self.data))
        some = configs[:: SAMPLE + 1]  # all rates and all seeds
        _stacks(configs[:size], size, self.data)  # both are warmed up
        _alone(some[:1], self.data)
        times: dict[str, list[float]] = {ALONE: [], STACKED: []}
        for _ in rounds(range(self.options.rounds), f"width {width}: in turns"):
            times[STACKED].append(1e3 * self._timed(lambda: _stacks(configs, size, self.data)) / len(configs))
            times[ALONE].append(1e3 * self._timed(lambda: _alone(some, self.data)) / len(some))
        precise = [config.replace(dtype="float64") for config in some]
        both = zip(_stacks(precise, size, self.data), _alone(precise, self.data), strict=True)
        differs = max(_difference(ours, theirs) for ours, theirs in both)
        release(self.options.device)
        return [
            Row(ALONE, width, tuple(times[ALONE])),
            Row(STACKED, width, tuple(times[STACKED]), differs=differs, note=f"{size} runs a stack"),
        ]

    def _timed(self, work: Callable[[], list[Run]]) -> float:
        synchronize(self.options.device)
        start = time.perf_counter()
        work()
        synchronize(self.options.device)
        return time.perf_counter() - start


def _alone(configs: Sequence[RunConfig], data: Dataset) -> list[Run]:
    return [train(config, dataset=data) for config in configs]


def _stacks(configs: Sequence[RunConfig], size: int, data: Dataset) -> list[Run]:
    parts = [configs[start : start + size] for start in range(0, len(configs), size)]
    return [run for part in parts for run in train_stack(part, dataset=data)]


def _difference(ours: Run, theirs: Run) -> float:
    if ours.status != theirs.status:
        return float("inf")
    if ours.status != "finished":
        return 0.0
    a, b = ours.final["test_loss"], theirs.final["test_loss"]
    return float(abs(a - b) / abs(b))
