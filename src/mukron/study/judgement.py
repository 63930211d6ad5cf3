"""The judgement of one scheme on one axis: its optima, the regret of the narrowest width's optimum, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mukron.exponents import student_quantile
from mukron.study.curves import AXES, Curve, Measure, read_curves
from mukron.study.optimum import CONFIDENCE, Interval, Optimum, drift, locate
from mukron.study.points import PRUNED, Result
from mukron.typed import MaybeInfinite

TRANSFERS, MOVES, CANNOT_TELL = "transfers", "does not transfer", "cannot tell"
REMEDY = {"lr": "lower learning rates", "damping": "higher damping"}

MATTERS = 1 / 8  # drift per doubling; over a 256-fold width it moves the best setting by a factor of 2, one grid step
RULED_OUT = 0.25  # a drift to exclude: half of 1/2, the smallest error of a wrong exponent
NOISES = 3.0  # a regret above this multiple of the seed noise is significant
RELEVANT = 0.05  # a regret is relevant above this share of the loss, or of the error rate of an accuracy
LEAST_ERROR_RATE = 0.1  # a smaller error rate counts as this one, so that a regret below 0.005 is not relevant


@dataclass(frozen=True)
class Regret:
    """How much worse a width is at the narrowest width's best setting than at its own best setting."""

    width: float
    setting: float  # the narrowest width's best setting that was run
    own: float  # this width's best setting that was run
    loss: MaybeInfinite  # difference of the metric's means, positive is worse; infinite if training diverges
    noise: MaybeInfinite | None  # standard deviation over seeds
    units: MaybeInfinite | None  # loss / noise
    used: float | None = None  # the setting that was run nearest to ``setting``, where that was not run itself
    large: bool = False  # significant and relevant


@dataclass(frozen=True)
class Wider:
    """The metric by width at the narrowest width's best setting, at one epoch."""

    when: str  # "early" or "late"
    epoch: int
    values: tuple[
        tuple[float, MaybeInfinite, MaybeInfinite | None], ...
    ]  # width, mean (infinite: diverged), standard error (or None)
    better: bool  # the widest is better than the narrowest, and no width is worse than one before it
    worse_at: tuple[float, ...]  # widths that are worse than the best narrower one by more than noise

    @property
    def answer(self) -> str:
        return "yes" if self.better else "no" if self.worse_at else "unclear"


@dataclass(frozen=True)
class Judgement:
    """Whether one scheme transfers on one axis, and why."""

    scheme: str
    axis: str  # "lr" or "damping"
    optima: tuple[Optimum, ...]
    drift: Interval | None  # slope of log2 of the best setting in log2 of the width
    regret: tuple[Regret, ...]
    wider: tuple[Wider, ...]
    verdict: str  # "transfers", "does not transfer" or "cannot tell"
    reasons: tuple[str, ...]  # the verdict in words, with the numbers


def judge(scheme: str, results: Sequence[Result], axis: str, measure: Measure) -> Judgement:
    """Judge one scheme on one axis, by all its results."""
    curves = read_curves(results, axis, measure)
    alive = {width: curve for width, curve in curves.items() if not curve.diverged.all()}
    optima = tuple(locate(curve, width, axis) for width, curve in alive.items())
    regret = tuple(_regrets(alive, optima))
    wider = tuple(_wider(curves, optima[0], results, measure)) if optima else ()
    moved = drift(optima)
    lost = {width: _carried(curve, width, optima) for width, curve in curves.items() if width not in alive}
    verdict = _verdict(optima, moved, regret, lost)
    reasons = tuple(_reasons(axis, optima, moved, regret, wider, lost))
    return Judgement(scheme, axis, optima, moved, regret, wider, verdict, reasons)


def _carried(curve: Curve, width: float, optima: Sequence[Optimum]) -> bool:
    """Whether the narrowest width's best setting was run at this width, which is wider."""
    return bool(optima) and width > optima[0].width and curve.nearest(optima[0].measured) is not None


def _verdict(
    optima: Sequence[Optimum], moved: Interval | None, regret: Sequence[Regret], lost: Mapping[float, bool]
) -> str:
    if any(lost.values()) or any(of_width.large for of_width in regret):
        return MOVES
    if moved is None:
        return CANNOT_TELL
    if (moved.low > 0 or moved.high < 0) and abs(moved.value) > MATTERS:
        return MOVES
    return CANNOT_TELL if lost or uncertain(moved) or any(optimum.open for optimum in optima) else TRANSFERS


def uncertain(moved: Interval) -> bool:
    """Whether the interval of the drift includes that of a wrong exponent."""
    return moved.low <= -RULED_OUT or moved.high >= RULED_OUT


def _regrets(curves: Mapping[float, Curve], optima: Sequence[Optimum]) -> Iterator[Regret]:
    for optimum in optima[1:]:
        curve, setting = curves[optimum.width], optima[0].measured
        there = curve.nearest(setting)
        if there is None:
            continue
        used = float(curve.settings[there])
        sign = 1.0 if curve.measure.lowest else -1.0
        loss = math.inf if curve.diverged[there] else sign * (float(curve.values[there].mean()) - optimum.value) + 0.0
        units = None
        if optimum.noise is not None:
            units = loss / optimum.noise if optimum.noise else math.inf if loss > 0 else 0.0
        yield Regret(
            width=optimum.width,
            setting=setting,
            own=optimum.measured,
            loss=loss,
            noise=optimum.noise,
            units=units,
            used=None if math.isclose(used, setting, rel_tol=1e-6) else used,
            large=_large(curve, there, loss, units),
        )


def _large(curve: Curve, there: int, loss: float, units: float | None) -> bool:
    if math.isinf(loss):
        return True
    best = float(curve.values[curve.best].mean())
    scale = abs(best) if curve.measure.lowest else max(1.0 - best, LEAST_ERROR_RATE)
    if units is None or units <= NOISES or loss <= RELEVANT * scale:
        return False
    # Two or three seeds may agree by chance: the paired difference must also be significant by Student's t-test.
    costs = curve.measure.cost(curve.values)
    pairs = costs[there] - costs[curve.best]
    error = float(pairs.std(ddof=1)) / math.sqrt(curve.seeds)
    return float(pairs.mean()) > student_quantile((1 + CONFIDENCE) / 2, curve.seeds - 1) * error


def _wider(
    curves: Mapping[float, Curve], narrow: Optimum, results: Sequence[Result], measure: Measure
) -> Iterator[Wider]:
    """Compare widths early (after a quarter of the epochs) and late (after the last one that all runs have)."""
    point = curves[narrow.width].runs[curves[narrow.width].best][0].point
    runs: dict[float, Sequence[Result]] = {}
    for width, curve in curves.items():
        there = curve.nearest(narrow.measured)
        same = [run for run in results if replace(run.point, seed=point.seed) == replace(point, width=width)]
        same = [] if any(run.status == PRUNED for run in same) else same
        if width >= narrow.width and (same or there is not None):
            runs[width] = same or curve.runs[there or 0]
    trained = {width: of_width for width, of_width in runs.items() if not math.isnan(measure.mean(of_width))}
    common = [
        {row["epoch"] for row in run.rows if row.get(measure.name) is not None}
        for of_width in trained.values()
        for run in of_width
    ]
    epochs = sorted(set.intersection(*common))
    if len(runs) < 2 or not epochs:
        return
    early = next(epoch for epoch in epochs if epoch >= epochs[-1] / 4)
    for when, epoch in (("early", early), ("late", epochs[-1])):
        values = [(width, *_mean(of_width, measure, epoch, width in trained)) for width, of_width in runs.items()]
        worse, best = [], values[0]
        for value in values[1:]:
            if _is_worse(best, value, measure):
                worse.append(value[0])
            best = value if (value[1] < best[1]) == measure.lowest else best
        better = not worse and _is_worse(values[-1], values[0], measure)
        yield Wider(when, epoch, tuple(values), better, tuple(worse))


def _mean(runs: Sequence[Result], measure: Measure, epoch: int, trained: bool) -> tuple[float, float | None]:
    """The metric's mean over runs after an epoch, and its standard error; infinitely bad where runs diverged."""
    if not trained:
        return (math.inf if measure.lowest else -math.inf), None
    values = [run.value(measure.name, epoch) for run in runs]
    numbers = np.array([value for value in values if value is not None])
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return float(numbers.mean()), error


def _is_worse(
    one: tuple[float, float, float | None], other: tuple[float, float, float | None], measure: Measure
) -> bool:
    """Whether ``other`` is worse than ``one`` by more than two standard errors; with one seed, by any amount."""
    (_, mean, error), (_, other_mean, other_error) = one, other
    if math.isinf(other_mean):
        return not math.isinf(mean)
    allowed = 0.0 if error is None or other_error is None else 2 * math.hypot(error, other_error)
    return (other_mean - mean if measure.lowest else mean - other_mean) > allowed


# The reasons as text.


def _reasons(
    axis: str,
    optima: Sequence[Optimum],
    moved: Interval | None,
    regret: Sequence[Regret],
    wider: Sequence[Wider],
    lost: Mapping[float, bool],
) -> Iterator[str]:
    name = AXES[axis]
    yield _drift_in_words(name, optima, moved)
    for of_width in regret:
        if of_width is regret[-1] or (of_width.large and not regret[-1].large):
            yield _regret_in_words(name, optima[0].width, of_width)
    for width, carried in lost.items():
        also = f", width {optima[0].width:g}'s best {name} too" if carried else ""
        yield f"at width {width:g} every run diverged{also}: add {REMEDY[axis]}"
    if wider:
        yield _wider_in_words(wider)
    notes: dict[str, list[float]] = {}
    for optimum in optima:
        for note in optimum.notes:
            notes.setdefault(note, []).append(optimum.width)
    for note, widths in notes.items():
        yield f"{_at_widths(widths, len(optima))}: {note}"


def _drift_in_words(name: str, optima: Sequence[Optimum], moved: Interval | None) -> str:
    if not optima:
        return f"every run diverged, so there is no best {name}"
    if moved is None:
        return f"only width {optima[0].width:g} has a best {name}, and a drift takes two widths"
    first, last = optima[0].width, optima[-1].width
    text = f"the best {name} moves by {moved} in log2 per doubling of the width"
    doublings = math.log2(last / first)
    if math.isinf(moved.low) and math.isinf(moved.high):
        few = "" if any(optimum.open for optimum in optima) else ", one seed takes 3 widths"
        return f"{text}: nothing bounds it{few}"
    if math.isinf(moved.low) or math.isinf(moved.high):
        return f"{text}: the settings that were run bound it on one side only"
    if moved.low > 0 or moved.high < 0:
        way = ("up" if moved.value > 0 else "down") + (", which is little" if abs(moved.value) <= MATTERS else "")
        return f"{text}: over {first:g} to {last:g} by a factor of {2 ** abs(moved.value * doublings):.2g} {way}"
    if uncertain(moved):
        most = max(-moved.low, moved.high)
        return (
            f"{text}: it may be as large as {most:.2g}, and up to {RULED_OUT:g} would count as staying; "
            "add widths, settings between these, or seeds"
        )
    factor = 2 ** (max(-moved.low, moved.high) * doublings)
    return f"{text}: over {first:g} to {last:g} it stays within a factor of {factor:.2g}"


def _regret_in_words(name: str, narrow: float, regret: Regret) -> str:
    text = f"at width {regret.width:g}, width {narrow:g}'s best {name} {setting_text(regret.setting)}"
    if regret.used is not None:
        text += f" (the nearest that was run is {setting_text(regret.used)})"
    if math.isinf(regret.loss):
        return f"{text} diverges"
    if (regret.used or regret.setting) == regret.own:
        return f"{text} is the best too"
    if regret.units is None:
        return f"{text} costs {regret.loss:.2g}; one seed: there is no noise to compare it with"
    return f"{text} costs {regret.loss:.2g}, {regret.units:.1f} times the seed noise"


def _wider_in_words(wider: Sequence[Wider]) -> str:
    if all(at.better for at in wider):
        return "wider is better early and late"
    worse = [f"{at.when} (worse at {_widths(at.worse_at)})" for at in wider if at.worse_at]
    unclear = [at.when for at in wider if at.answer == "unclear"]
    better = [at.when for at in wider if at.better]
    if len(unclear) == len(wider):
        return f"no difference beyond noise, {' or '.join(unclear)}"
    text = f"wider is not better {' nor '.join(worse)}" if worse else f"wider is better {' and '.join(better)}"
    text += f", but {better[0]} it is" if worse and better else ""
    return f"{text}; {unclear[0]} there is no difference beyond noise" if unclear else text


def _at_widths(widths: Sequence[float], count: int) -> str:
    return "at all widths" if len(widths) == count > 1 else f"at {_widths(widths)}"


def _widths(widths: Sequence[float]) -> str:
    return f"width{'s' if len(widths) > 1 else ''} {', '.join(f'{width:g}' for width in widths)}"


def setting_text(setting: float) -> str:
    """Format a setting, with powers of two as powers: 0.015625 -> "2^-6"."""
    power = math.log2(setting)
    if power and math.isclose(power, round(power), abs_tol=1e-6):
        return f"2^{round(power)}"
    return f"{setting:.3g}"
