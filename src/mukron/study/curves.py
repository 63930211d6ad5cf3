"""Results as curves: at every width, the metric over the settings of one axis, seed by seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mukron.study.errors import StudyError
from mukron.study.points import PRUNED, Result, lowest_is_best
from mukron.train.records import FINISHED

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

AXES = {"lr": "learning rate", "damping": "damping"}
NOT_METRICS = {"epoch", "step", "lr", "seconds"}


@dataclass(frozen=True)
class Measure:
    """The metric, and the **cost** that is fitted and compared: low is best.

    The cost of a loss is its logarithm, since the effects of seeds and settings on a loss are multiplicative: the noise
    then has the same size along the curve, and its steep side does not dominate a fit. The cost of an accuracy is its
    negative.
    """

    name: str
    lowest: bool  # whether low is best
    log: bool  # whether the cost is a logarithm

    @classmethod
    def of(cls, results: Sequence[Result], metric: str) -> Measure:
        rows = [row for result in results for row in result.rows]
        if rows and not any(metric in row for row in rows):
            known = ", ".join(sorted({name for row in rows for name in row} - NOT_METRICS))
            raise StudyError(f"metric {metric!r}: no run has it; expected one of {known or '(they have none)'}")
        lowest = lowest_is_best(metric)
        positive = all((row.get(metric) is None) or row[metric] > 0 for row in rows)
        return cls(metric, lowest, lowest and positive)

    def read(self, result: Result) -> float:
        """The metric at the end of the run; NaN if it diverged."""
        value = result.value(self.name) if result.status == FINISHED else None
        return math.nan if value is None or not math.isfinite(value) else float(value)

    def cost(self, values: Array) -> Array:
        return (1.0 if self.lowest else -1.0) * (np.log(values) if self.log else values)

    def mean(self, results: Sequence[Result]) -> float:
        return float(np.mean([self.read(result) for result in results]))


@dataclass(frozen=True)
class Curve:
    """The metric over the settings of one axis, at one width."""

    settings: Array  # ascending
    values: Array  # settings x seeds; a row is NaN if any of its seeds diverged
    measure: Measure
    runs: tuple[tuple[Result, ...], ...] = ()  # by setting
    missing: int = 0  # runs that do not exist, whose values are imputed
    left_out: int = 0  # runs with seeds that most settings do not have

    @property
    def x(self) -> Array:
        return np.log2(self.settings)

    @property
    def diverged(self) -> Mask:
        return np.isnan(self.values[:, 0])

    @property
    def seeds(self) -> int:
        return len(self.values[0])

    @property
    def costs(self) -> Array:
        """The costs of the means over seeds."""
        return self.measure.cost(self.values.mean(1))

    @property
    def best(self) -> int:
        """The index of the best setting by its mean over seeds."""
        return int(lowest(self.costs[None])[0])

    def nearest(self, setting: float) -> int | None:
        """The index of the setting that was run nearest to this one; None if that is more than half a step away."""
        x, wanted = self.x, math.log2(setting)
        number = int(np.abs(x - wanted).argmin())
        gaps = np.diff(x)
        reach = float(np.median(gaps)) / 2 if len(gaps) else 0.5
        inside = x[0] <= wanted <= x[-1]
        return number if inside or abs(x[number] - wanted) <= reach else None


def lowest(costs: Array) -> NDArray[np.intp]:
    """The index of every row's lowest cost; of equal ones (as where all settings reach an accuracy of 1) the middle."""
    equal = costs <= np.nanmin(costs, 1, keepdims=True)
    middle: NDArray[np.intp] = (equal.cumsum(1) >= (equal.sum(1, keepdims=True) + 1) // 2).argmax(1)
    return middle


def read_curves(results: Sequence[Result], axis: str, measure: Measure) -> dict[float, Curve]:
    """The curves of one scheme, by width in ascending order. Runs that were pruned do not count."""
    by_width: dict[float, list[Result]] = defaultdict(list)
    for result in results:
        by_width[result.point.width].append(result)
    curves = {}
    for width, of_width in sorted(by_width.items()):
        settings = dict(_profile(of_width, axis, measure))
        if settings:
            curves[width] = _curve(settings, measure)
    return curves


def _profile(results: Sequence[Result], axis: str, measure: Measure) -> Iterator[tuple[float, tuple[Result, ...]]]:
    """The runs at every value of the axis, ascending; where the other axis is tuned too, those at its best value."""
    groups: dict[tuple[float, float | None], list[Result]] = defaultdict(list)
    for result in results:
        lr, damping = result.point.lr, result.point.damping
        groups[(lr, damping) if axis == "lr" else (_positive(damping), lr)].append(result)
    groups = {key: runs for key, runs in groups.items() if all(run.status != PRUNED for run in runs)}
    values, others = {value for value, _ in groups}, {other for _, other in groups}
    scattered = len(others) > 1 and 2 * len(values) > len(groups)
    alike: dict[float, list[tuple[float, list[Result]]]] = defaultdict(list)
    for (value, _), runs in groups.items():
        # A search on both axes hardly ever tries a value twice: values within a factor of 2 count as one.
        alike[round(math.log2(value)) if scattered else math.log2(value)].append((value, runs))
    for _, candidates in sorted(alike.items()):
        costs = measure.cost(np.array([measure.mean(runs) for _, runs in candidates]))
        number = 0 if np.isnan(costs).all() else int(np.nanargmin(costs))
        yield candidates[number][0], tuple(candidates[number][1])


def _positive(damping: float | None) -> float:
    if damping is None or damping <= 0:
        raise StudyError(f"over damping: a run has damping {damping}; expected positive numbers, or study the lr alone")
    return damping


def _curve(settings: Mapping[float, tuple[Result, ...]], measure: Measure) -> Curve:
    seeds = sorted({run.point.seed for runs in settings.values() for run in runs})
    values = np.full((len(settings), len(seeds)), math.nan)
    lost = np.zeros(len(settings), bool)
    for number, runs in enumerate(settings.values()):
        for run in runs:
            values[number, seeds.index(run.point.seed)] = measure.read(run)
        lost[number] = any(math.isnan(measure.read(run)) for run in runs)
    values, missing, left_out = _complete(values[~lost], measure.log)
    whole = np.full((len(settings), values.shape[1]), math.nan)
    whole[~lost] = values
    return Curve(np.array(list(settings)), whole, measure, tuple(settings.values()), missing, left_out)


def _complete(values: Array, log: bool) -> tuple[Array, int, int]:
    """Keep the seeds that most settings have, and impute missing runs by an additive model, setting + seed.

    Returns:
        The values, the number of runs that were imputed, and the number of runs that were left out.
    """
    there = ~np.isnan(values)
    common = there.sum(0) > len(values) / 2
    if not common.any():  # no two settings share seeds, as after a search; or all diverged
        return np.array([row[~np.isnan(row)].mean() for row in values]).reshape(-1, 1), 0, 0
    scaled = np.log(values) if log else values
    seed = np.zeros((1, values.shape[1]))
    for _ in range(1 if there.all() else 50):
        setting = _means(scaled - seed, 1)
        seed = _means(scaled - setting, 0)
    filled = np.where(there, values, np.exp(setting + seed) if log else setting + seed)
    return filled[:, common], int((~there[:, common]).sum()), int(there[:, ~common].sum())


def _means(values: Array, axis: int) -> Array:
    there = ~np.isnan(values)
    means: Array = np.where(there, values, 0).sum(axis, keepdims=True) / np.maximum(there.sum(axis, keepdims=True), 1)
    return means
