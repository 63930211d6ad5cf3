"""The best setting at every width and how it moves with the width, with confidence intervals from few seeds.

Throughout, x is log2 of the setting, and the cost is computed from the metric by ``Measure``: low is best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mukron.exponents import student_quantile
from mukron.study.curves import AXES, Array, Curve, Mask, lowest
from mukron.typed import MaybeInfinite

CONFIDENCE = 0.95
DRAWS = 400  # of the bootstrap: its standard error is then known to 4%
NEAR = 1.0  # in log2: the parabola is fitted to settings within a factor of 2, and at least to the two neighbours
CELL = 0.35  # error, in grid steps, of an optimum known to one step: above 12^-1/2, as errors of widths correlate
SHAPE = 0.27  # the same for a parabola fitted to the most asymmetric curves without a wall, as measured in the tests
WALL = 5.0  # a side this many times steeper than the other is a wall; a parabola then gives only the nearest step
EPSILON = 1e-9  # differences up to this size are rounding errors


@dataclass(frozen=True)
class Interval:
    """A number and its confidence interval; low or high is infinite where the data do not bound it."""

    value: MaybeInfinite
    low: MaybeInfinite
    high: MaybeInfinite

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Optimum:
    """The best setting at one width."""

    width: float
    best: Interval  # log2 of the setting, from a local parabola, with its bootstrap interval over seeds
    measured: float  # the best setting that was run (not its logarithm)
    value: MaybeInfinite  # the metric's mean over seeds at ``measured``
    noise: MaybeInfinite | None  # the metric's standard deviation over seeds at ``measured``; None: one seed
    notes: tuple[str, ...] = ()  # remarks: at the edge of the grid, next to runs that diverged, flat, ...
    seeds: int = 1
    error: MaybeInfinite = 0.0  # standard error of best.value over seeds
    grid: MaybeInfinite = 0.0  # standard error of best.value from the coarseness of the grid

    @property
    def open(self) -> bool:
        """Whether the optimum may lie beyond the settings that were run."""
        return math.isinf(self.best.low) or math.isinf(self.best.high)


def locate(curve: Curve, width: float, axis: str) -> Optimum:
    """The optimum from a local parabola around the best measured mean, with its interval."""
    best, seeds, best_values = curve.best, curve.seeds, curve.values[curve.best]
    value = float(place(curve.costs[None], curve.x)[0])
    error = _bootstrap(curve) if seeds > 1 else 0.0
    worse = _worse(curve)
    equal = curve.x[~worse if _flat(curve, worse) else curve.costs <= curve.costs[best]]
    grid = max(_grid_error(curve.costs, curve.x, best), CELL * float(equal[-1] - equal[0]))
    interval = Interval(value, *_range(curve, value, error, grid, worse))
    return Optimum(
        width=width,
        best=interval,
        measured=float(curve.settings[best]),
        value=float(best_values.mean()),
        noise=float(best_values.std(ddof=1)) if seeds > 1 else None,
        notes=tuple(_notes(curve, interval, worse, AXES[axis])),
        seeds=seeds,
        error=error,
        grid=grid,
    )


def place(costs: Array, x: Array) -> Array:
    """The minimum of every row of costs, by a parabola around its lowest cost; at the first or last setting, that one.

    Settings that diverged (NaN) are never the lowest. Next to the lowest they count as the worst measured cost.
    """
    best, diverged = lowest(costs), np.isnan(costs[0])
    places = x[best]
    costs = _filled(costs)
    for number in np.unique(best):
        if not 0 < number < len(x) - 1:
            continue
        inside, rows = _window(x, diverged, number), best == number
        near = x[inside] - x[number]
        # cost ~ a + b t + c t^2, lowest at t = -b / 2c
        _, b, c = np.linalg.pinv(np.vander(near, 3, increasing=True)) @ costs[rows][:, inside].T
        bent = c > EPSILON * np.abs(costs[rows]).max(1)
        places[rows] += np.clip(np.where(bent, -b / (2 * np.where(bent, c, 1.0)), 0.0), near[0], near[-1])
    return places


def _filled(costs: Array) -> Array:
    return np.where(np.isnan(costs), np.nanmax(costs, -1, keepdims=True), costs)


def _window(x: Array, diverged: Mask, number: int) -> slice:
    """The settings to fit to: both neighbours, and all within ``NEAR``, up to the first that diverged."""
    first, last = max(number - 1, 0), min(number + 1, len(x) - 1)
    while first > 0 and not diverged[first] and x[number] - x[first - 1] <= NEAR + EPSILON:
        first -= 1
    while last < len(x) - 1 and not diverged[last] and x[last + 1] - x[number] <= NEAR + EPSILON:
        last += 1
    return slice(first, last + 1)


def _bootstrap(curve: Curve) -> float:
    """The standard error of the optimum by a bootstrap over seeds, whose variance is (n - 1) / n of the true one."""
    seeds = curve.seeds
    drawn = np.random.default_rng(0).integers(seeds, size=(DRAWS, seeds))
    places = place(curve.measure.cost(curve.values[:, drawn].mean(2)).T, curve.x)
    return float(places.std() * math.sqrt(seeds / (seeds - 1)))


def _grid_error(costs: Array, x: Array, best: int) -> float:
    """The error of the optimum from the coarseness of the grid, as a standard error.

    If a curve is steeper on one side, the minimum of a parabola through three points is off by a fraction of a step,
    which depends on the position of the grid. The second differences of a true parabola are equal at all points: the
    more they differ next to the best setting, the larger that error.
    """
    inside = _window(x, np.isnan(costs), best)
    gap = float(np.diff(x[inside]).mean()) if len(x) > 1 else NEAR
    if not 0 < best < len(x) - 1 or np.isnan(costs[best - 1 : best + 2]).any() or _wall(costs, best):
        return CELL * gap
    inner = [index for index in (best, best - 1, best + 1) if 0 < index < len(x) - 1]
    bend, *beside = (_bend(_filled(costs), x, index) for index in inner)
    unlike = [abs(bend - other) / max(abs(bend) + abs(other), 1e-300) for other in beside] or [1.0]
    return SHAPE * gap * sum(unlike) / len(unlike)


def _wall(costs: Array, best: int) -> bool:
    """Whether the curve rises steeply on one side, as it does next to runs that diverged."""
    rises = _filled(costs) - costs[best]
    left, right = rises[max(best - 2, 0) : best], rises[best + 1 : best + 3]
    return bool(right[0] > WALL * left[0] or left[-1] > WALL * right[-1])


def _bend(costs: Array, x: Array, number: int) -> float:
    slopes = np.diff(costs[number - 1 : number + 2]) / np.diff(x[number - 1 : number + 2])
    return float((slopes[1] - slopes[0]) / (x[number + 1] - x[number - 1]))


def _worse(curve: Curve) -> Mask:
    """The settings that are worse than the best one by more than noise, including those that diverged."""
    worse, alive = curve.diverged, ~curve.diverged
    costs = curve.measure.cost(curve.values[alive])
    excess = costs.mean(1) - curve.measure.cost(curve.values[curve.best]).mean()
    settings, seeds = costs.shape
    error = np.zeros(settings)  # with one seed the noise is unknown
    if seeds > 1 and settings > 1:
        rest = costs - costs.mean(1, keepdims=True)
        rest -= np.median(rest, 0)  # an effect of the seed on all settings is not noise between them
        variances = (rest**2).sum(1) / (seeds - 1) * settings / (settings - 1)
        usual = variances[excess <= np.median(excess)].mean()  # settings near divergence are much noisier
        error = np.sqrt((usual + np.maximum(usual, variances)) / seeds)
        # Any setting may be the best by chance: the level is corrected for all pairs.
        chance = (1 - CONFIDENCE) / (settings * (settings - 1))
        error *= student_quantile(1 - chance, (settings - 1) * (seeds - 1))
    worse[alive] = excess > error + EPSILON
    return worse


def _flat(curve: Curve, worse: Mask) -> bool:
    return int((~curve.diverged).sum()) > 1 and not worse[~curve.diverged].any()


def _range(curve: Curve, value: float, error: float, grid: float, worse: Mask) -> tuple[float, float]:
    """The interval of the optimum; infinite where it may lie beyond the settings that were run."""
    x, best, seeds = curve.x, curve.best, curve.seeds
    # If the curve has a single minimum, the optimum lies between the nearest settings that are worse.
    low = x[worse & (x < x[best])].max(initial=-np.inf)
    high = x[worse & (x > x[best])].min(initial=np.inf)
    if _flat(curve, worse):
        low, high = max(low, x[0]), min(high, x[-1])
    elif seeds == 1:
        inside = x[_window(x, curve.diverged, best)]
        low, high = min(low, inside[0]), max(high, inside[-1])
    else:
        reach = math.hypot(student_quantile((1 + CONFIDENCE) / 2, seeds - 1) * error, 2 * grid)
        low, high = max(low, value - reach), min(high, value + reach)
    low = -math.inf if value <= x[0] + EPSILON and not curve.diverged[0] else min(low, value)
    high = math.inf if value >= x[-1] - EPSILON and not curve.diverged[-1] else max(high, value)
    return float(low), float(high)


def _notes(curve: Curve, interval: Interval, worse: Mask, name: str) -> Iterator[str]:
    best, diverged = curve.best, curve.diverged
    if len(diverged) == 1:
        yield f"only one {name} was run: run more"
    elif math.isinf(interval.low):
        yield f"at the lowest {name} that was run: the best may be lower still, add lower ones"
    elif math.isinf(interval.high):
        yield f"at the highest {name} that was run: the best may be higher still, add higher ones"
    if diverged[max(best - 1, 0) : best + 2].any():
        yield "next to runs that diverged"
    if _flat(curve, worse):
        which = f"{name} that did not diverge" if curve.diverged.any() else name
        yield f"flat: no {which} is worse than the best beyond doubt, so the best cannot be located; add seeds"
    if curve.seeds == 1:
        yield "one seed: known to a step of the grid"
    if curve.missing:
        yield f"{_runs(curve.missing)} missing, filled in from the others"
    if curve.left_out:
        yield f"{_runs(curve.left_out)} left out: most settings were not run with that seed"


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def drift(optima: Sequence[Optimum]) -> Interval | None:
    """The slope of log2 of the best setting in log2 of the width, by least squares; None with fewer than two widths.

    Its error has two parts. Noise: the variance of the optima over seeds and their residuals from the line, pooled by
    their degrees of freedom, with Student's quantile. One width has too few seeds for an estimate, so those of all
    widths are pooled; with one seed only the residuals are left, which takes three widths. Grid: the error of a coarse
    grid does not shrink with more seeds, and does not show as residuals if it is the same at all widths.
    """
    if len(optima) < 2:
        return None
    widths = np.log2([optimum.width for optimum in optima])
    weights = (widths - widths.mean()) / ((widths - widths.mean()) ** 2).sum()
    values = np.array([optimum.best.value for optimum in optima])
    slope = float(weights @ values)
    off = values - values.mean() - slope * (widths - widths.mean())
    freedom = sum(optimum.seeds - 1 for optimum in optima) + len(optima) - 2
    low = high = math.inf
    if freedom:
        over_seeds = sum((optimum.seeds - 1) * optimum.error**2 for optimum in optima)
        variance = (over_seeds + float(off @ off)) / freedom
        noise = student_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance * float(weights @ weights))
        grid = 2 * math.hypot(*(weight * optimum.grid for weight, optimum in zip(weights, optima, strict=True)))
        low = high = math.hypot(noise, grid)
    for weight, optimum in zip(weights, optima, strict=True):  # an optimum beyond the grid is bounded on one side only
        if abs(weight) > EPSILON:
            low = math.inf if math.isinf(optimum.best.low if weight > 0 else optimum.best.high) else low
            high = math.inf if math.isinf(optimum.best.high if weight > 0 else optimum.best.low) else high
    return Interval(slope, slope - low, slope + high)
