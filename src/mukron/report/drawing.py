"""The figures that settings are read from: the metric against a setting, the best setting against the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mukron.figures import line, panels, powers_axis, shade, styled, widths_axis
from mukron.report.frame import STAR, Crosses, finish, mark_handles, metric_axis, scheme_panels, strip, width_handles
from mukron.report.numbers import AXES, Setting, best, judgement, names, profile, settings
from mukron.study.certificate import Interval, Judgement, Optimum
from mukron.study.errors import StudyError
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OCTAVES = 6  # that the drift is shown on at least: flat lines look flat


@styled
def draw_transfer(record: StudyRecord, axis: str = "lr") -> Figure:
    """The metric against the learning rate or damping: a panel a scheme, a line a width, each width's best a star."""
    figure, axes = scheme_panels(record)
    values: list[float] = []
    crosses: list[Crosses] = []
    for panel, (scheme, name) in zip(axes.flat, names(record).items(), strict=False):
        lines = {width: profile(record, axis, scheme, width) for width in record.widths}
        for number, found in enumerate(lines.values()):
            _line(panel, found, axis, shade(number, len(lines)))
        _stars(panel, record, axis, scheme, lines)
        values += [value for found in lines.values() for each in found for value in each.spread]
        crosses.append(_crosses(lines.values(), axis))
        powers_axis(panel, "x")
        panel.set(title=name, xlabel=AXES[axis])
    metric_axis(axes, record, values)
    strip(axes, record, crosses)
    finish(figure, record, [*width_handles(record), *mark_handles(star=True, cross=any(crosses))])
    return figure


def _line(panel: Axes, found: Sequence[Setting], axis: str, colour: str) -> None:
    """Means over the seeds, and a band from the lowest to the highest; a gap where not every seed finished."""
    x = [each.at(axis) for each in found]
    lows, highs = [each.spread[0] for each in found], [each.spread[1] for each in found]
    panel.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, [each.mean for each in found], color=colour, marker="o", markersize=3)


def _stars(panel: Axes, record: StudyRecord, axis: str, scheme: str, lines: dict[float, list[Setting]]) -> None:
    """At the parabola's best, as high as the best that was measured; without a certificate at that one itself."""
    judged = judgement(record, scheme, axis)
    optima = {each.width: each for each in judged.optima} if judged else {}
    for number, (width, found) in enumerate(lines.items()):
        measured, optimum = best(found, record.metric), optima.get(width)
        if measured is None:
            continue
        colour, x = shade(number, len(lines)), measured.at(axis) if optimum is None else setting_of(optimum)
        if optimum is not None and known(optimum.best):
            low, high = 2**optimum.best.low, 2**optimum.best.high
            panel.hlines(measured.mean, low, high, color=colour, linewidth=1.8, zorder=4)
        filled = optimum is None or known(optimum.best)
        panel.plot([x], [measured.mean], color=colour if filled else "white", **STAR)


def known(interval: Interval) -> bool:
    """Whether the data say where it ends, on both sides."""
    return math.isfinite(interval.low) and math.isfinite(interval.high)


def setting_of(optimum: Optimum) -> float:
    return 2.0**optimum.best.value if math.isfinite(optimum.best.value) else optimum.measured


def _crosses(lines: Iterable[Sequence[Setting]], axis: str) -> Crosses:
    shown = list(lines)
    return [
        (each.at(axis), number, shade(number, len(shown)))
        for number, found in enumerate(shown)
        for each in found
        if each.diverged
    ]


@styled
def draw_drift(record: StudyRecord) -> Figure:
    """The best setting against the width, with its interval: a line a scheme, its slope in the legend."""
    if record.certificate is None:
        raise StudyError(f"{record.name}: a study without a certificate has no drift to draw")
    judged = record.certificate.judgements
    tuned = list(dict.fromkeys(each.axis for each in judged))
    figure, axes = panels(1, len(tuned), size=(5.8, 3.6))
    for panel, axis in zip(axes[0], tuned, strict=True):
        ours = [each for each in judged if each.axis == axis]
        for number, each in enumerate(ours):
            shift = 0.08 * (number - (len(ours) - 1) / 2)  # side by side, so that no bar hides another
            _optima(panel, each, line(number), 2**shift)
            panel.plot([], [], label=f"{names(record).get(each.scheme, each.scheme)}: {slope(each)}", **line(number))
        widths_axis(panel, record.widths)
        powers_axis(panel, "y")
        _show_octaves(panel, [setting_of(each) for judgement in ours for each in judgement.optima])
        panel.set_ylabel(f"best {AXES[axis]}")
        panel.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.18), alignment="left")
    open_ended = any(not known(each.best) for judgement in judged for each in judgement.optima)
    finish(figure, record, [], "; hollow where the best may lie beyond what was tried" if open_ended else "")
    return figure


def slope(judged: Judgement) -> str:
    drift = judged.drift
    if drift is None:
        return "no drift could be fitted"
    return f"{drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}] per doubling"


def _optima(panel: Axes, judged: Judgement, style: dict[str, Any], shift: float) -> None:
    """Points with bars as far as these are known, and the fitted line through their middle."""
    colour = style["color"]
    x, y = [each.width * shift for each in judged.optima], [setting_of(each) for each in judged.optima]
    for a, b, each in zip(x, y, judged.optima, strict=True):
        low, high = (2**end if math.isfinite(end) else b for end in (each.best.low, each.best.high))
        panel.vlines(a, low, high, color=colour, linewidth=1.0)
        face = colour if known(each.best) else "white"
        panel.plot([a], [b], marker=style["marker"], color=colour, markerfacecolor=face, linestyle="none", zorder=4)
    if judged.drift is not None and y:
        at, height = (sum(map(math.log2, part)) / len(y) for part in (x, y))
        fitted = [2 ** (height + judged.drift.value * (math.log2(a) - at)) for a in x]
        panel.plot(x, fitted, **{**style, "marker": ""})


def _show_octaves(panel: Axes, values: Sequence[float]) -> None:
    if values:
        low, high = math.log2(min(values)) - 1, math.log2(max(values)) + 1
        more = max(0.0, OCTAVES - (high - low)) / 2
        panel.set_ylim(2 ** (low - more), 2 ** (high + more))


@styled
def draw_search(record: StudyRecord) -> Figure:
    """A search at one width: the metric against one setting, the other as the colour, the best a star."""
    axis, other = ("lr", "damping") if "lr" in record.over else ("damping", "lr")
    figure, axes = scheme_panels(record, size=(5.2, 3.4))
    found = settings(record)
    colour, scale = _colours([getattr(each, other) for each in found])
    crosses: list[Crosses] = []
    for panel, (scheme, name) in zip(axes.flat, names(record).items(), strict=False):
        ours = [each for each in found if each.scheme == scheme]
        there, top = [each for each in ours if each.whole], best(ours, record.metric)
        dots = [colour(getattr(each, other)) for each in there]
        panel.scatter([each.at(axis) for each in there], [each.mean for each in there], s=24, c=dots)
        if top is not None:
            panel.plot([top.at(axis)], [top.mean], color=colour(getattr(top, other)), **STAR)
        crosses.append([(each.at(axis), 0, colour(getattr(each, other))) for each in ours if each.diverged])
        powers_axis(panel, "x")
        panel.set(title=f"{name}, width {record.widths[0]:g}", xlabel=AXES[axis])
    metric_axis(axes, record, [each.mean for each in found])
    strip(axes, record, crosses)
    if scale is not None:
        figure.colorbar(scale, ax=list(axes.flat), label=AXES[other])
    finish(figure, record, mark_handles(star=True, cross=any(crosses)))
    return figure


def _colours(values: Iterable[float | None]) -> tuple[Callable[[float | None], str], Any]:
    """The colour of a number on a logarithmic scale, and the scale; one colour for all where there is one number."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    numbers = sorted({value for value in values if value})
    if len(numbers) < 2:
        return lambda value: shade(1, 2), None
    low, high = numbers[0], numbers[-1]

    def colour(value: float | None) -> str:
        return shade(round(255 * math.log((value or low) / low) / math.log(high / low)), 256)

    return colour, ScalarMappable(LogNorm(low, high), ListedColormap([shade(number, 256) for number in range(256)]))
