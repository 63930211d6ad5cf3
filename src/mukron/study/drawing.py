"""Figures of the metric against the learning rate or the damping, and of the best setting against the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mukron.figures import line, panels, powers_axis, shade, styled, widths_axis
from mukron.study.certificate import Interval, Judgement, Optimum
from mukron.study.curves import AXES
from mukron.study.errors import StudyError
from mukron.study.numbers import SettingSummary, best, judgement, profile, scheme_labels, settings
from mukron.study.panels import STAR, Crosses, finish, mark_handles, metric_axis, scheme_panels, strip, width_handles
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OCTAVES = 6  # the minimum range of the drift figure, in powers of two, so that flat lines look flat


@styled
def draw_transfer(record: StudyRecord, axis: str = "lr") -> Figure:
    """Draw the metric against the learning rate or the damping, with a star at each width's best value.

    There is one panel per scheme and one line per width.

    Args:
        record: The record of the study.
        axis: What to draw against: ``"lr"`` or ``"damping"``.

    Returns:
        The figure.

    Raises:
        StudyError: No run has ended, or the study has no damping to draw against.

    Example:
        >>> from mukron.report import draw_transfer
        >>> from mukron.study import Point, Result, StudyRecord
        >>> from mukron.train import RunConfig
        >>> points = [Point("mup", width, lr, None, seed=0) for width in (64, 128) for lr in (0.1, 0.2, 0.4)]
        >>> epochs = {point: [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}] for point in points}
        >>> results = [Result(point, "finished", epochs[point]) for point in points]
        >>> record = StudyRecord("example", RunConfig(method="sgd"), ("lr",), "test_loss", results)
        >>> draw_transfer(record).axes[0].get_xlabel()
        'learning rate'
    """
    figure, axes = scheme_panels(record)
    values: list[float] = []
    crosses: list[Crosses] = []
    for panel, (scheme, label) in zip(axes.flat, scheme_labels(record).items(), strict=False):
        lines = {width: profile(record, axis, scheme, width) for width in record.widths}
        for number, settings_on_line in enumerate(lines.values()):
            _line(panel, settings_on_line, axis, shade(number, len(lines)))
        _stars(panel, record, axis, scheme, lines)
        values += [value for on_line in lines.values() for setting in on_line for value in setting.spread]
        crosses.append(_crosses(lines.values(), axis))
        powers_axis(panel, "x")
        panel.set(title=label, xlabel=AXES[axis])
    metric_axis(axes, record, values)
    strip(axes, record, crosses)
    finish(figure, record, [*width_handles(record), *mark_handles(star=True, cross=any(crosses))])
    return figure


def _line(panel: Axes, on_line: Sequence[SettingSummary], axis: str, colour: str) -> None:
    """Draw means over the seeds and a band from the lowest to the highest, with gaps where not every seed finished."""
    x = [setting.at(axis) for setting in on_line]
    lows, highs = [setting.spread[0] for setting in on_line], [setting.spread[1] for setting in on_line]
    panel.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, [setting.mean for setting in on_line], color=colour, marker="o", markersize=3)


def _stars(panel: Axes, record: StudyRecord, axis: str, scheme: str, lines: dict[float, list[SettingSummary]]) -> None:
    """Draw a star at the fitted optimum, at the height of the best setting; without a certificate at that setting."""
    judged = judgement(record, scheme, axis)
    optima = {optimum.width: optimum for optimum in judged.optima} if judged else {}
    for number, (width, on_line) in enumerate(lines.items()):
        measured, optimum = best(on_line, record.metric), optima.get(width)
        if measured is None:
            continue
        colour, x = shade(number, len(lines)), measured.at(axis) if optimum is None else setting_of(optimum)
        if optimum is not None and is_bounded(optimum.best):
            low, high = 2**optimum.best.low, 2**optimum.best.high
            panel.hlines(measured.mean, low, high, color=colour, linewidth=1.8, zorder=4)
        filled = optimum is None or is_bounded(optimum.best)
        panel.plot([x], [measured.mean], color=colour if filled else "white", **STAR)


def is_bounded(interval: Interval) -> bool:
    """Return whether both ends of the interval are finite."""
    return math.isfinite(interval.low) and math.isfinite(interval.high)


def setting_of(optimum: Optimum) -> float:
    """Return the fitted best setting, or the best measured one if none could be fitted."""
    return 2.0**optimum.best.value if math.isfinite(optimum.best.value) else optimum.measured


def _crosses(lines: Iterable[Sequence[SettingSummary]], axis: str) -> Crosses:
    all_lines = list(lines)
    return [
        (setting.at(axis), number, shade(number, len(all_lines)))
        for number, on_line in enumerate(all_lines)
        for setting in on_line
        if setting.diverged
    ]


@styled
def draw_drift(record: StudyRecord) -> Figure:
    """Draw the best setting against the width, with its interval, one line per scheme.

    The legend gives the drift: the slope of log2 of the best setting against log2 of the width.

    Args:
        record: The record of the study.

    Returns:
        The figure.

    Raises:
        StudyError: The study has no certificate.

    Example:
        >>> from mukron.report import draw_drift
        >>> from mukron.study import Point, Result, StudyRecord, certify
        >>> from mukron.train import RunConfig
        >>> rates = 0.05, 0.1, 0.2, 0.4, 0.8
        >>> points = [Point("mup", width, lr, None, seed=0) for width in (64, 128, 256) for lr in rates]
        >>> epochs = {point: [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}] for point in points}
        >>> results = [Result(point, "finished", epochs[point]) for point in points]
        >>> certificate = certify(results, metric="test_loss")
        >>> record = StudyRecord("example", RunConfig(method="sgd"), ("lr",), "test_loss", results, certificate)
        >>> draw_drift(record).axes[0].get_ylabel()
        'best learning rate'
    """
    if record.certificate is None:
        raise StudyError(f"{record.name}: a study without a certificate has no drift to draw")
    judgements = record.certificate.judgements
    tuned = list(dict.fromkeys(judged.axis for judged in judgements))
    labels = scheme_labels(record)
    figure, axes = panels(1, len(tuned), size=(5.8, 3.6))
    for panel, axis in zip(axes[0], tuned, strict=True):
        on_axis = [judged for judged in judgements if judged.axis == axis]
        for number, judged in enumerate(on_axis):
            shift = 0.08 * (number - (len(on_axis) - 1) / 2)  # drawn side by side, so that bars do not overlap
            _optima(panel, judged, line(number), 2**shift)
            panel.plot([], [], label=f"{labels.get(judged.scheme, judged.scheme)}: {slope(judged)}", **line(number))
        widths_axis(panel, record.widths)
        powers_axis(panel, "y")
        _show_octaves(panel, [setting_of(optimum) for judged in on_axis for optimum in judged.optima])
        panel.set_ylabel(f"best {AXES[axis]}")
        panel.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.18), alignment="left")
    open_ended = any(not is_bounded(optimum.best) for judged in judgements for optimum in judged.optima)
    finish(figure, record, [], "; hollow where the best may lie beyond what was tried" if open_ended else "")
    return figure


def slope(judged: Judgement) -> str:
    """Return the drift with its interval as text."""
    drift = judged.drift
    if drift is None:
        return "no drift could be fitted"
    return f"{drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}] per doubling"


def _optima(panel: Axes, judged: Judgement, style: dict[str, Any], shift: float) -> None:
    """Draw the optima with the bounded ends of their intervals, and the fitted line through their mean."""
    colour = style["color"]
    x, y = [optimum.width * shift for optimum in judged.optima], [setting_of(optimum) for optimum in judged.optima]
    for a, b, optimum in zip(x, y, judged.optima, strict=True):
        low, high = (2**end if math.isfinite(end) else b for end in (optimum.best.low, optimum.best.high))
        panel.vlines(a, low, high, color=colour, linewidth=1.0)
        face = colour if is_bounded(optimum.best) else "white"
        panel.plot([a], [b], marker=style["marker"], color=colour, markerfacecolor=face, linestyle="none", zorder=4)
    if judged.drift is not None and y:
        centre_x, centre_y = (sum(map(math.log2, values)) / len(y) for values in (x, y))
        fitted = [2 ** (centre_y + judged.drift.value * (math.log2(a) - centre_x)) for a in x]
        panel.plot(x, fitted, **{**style, "marker": ""})


def _show_octaves(panel: Axes, values: Sequence[float]) -> None:
    if values:
        low, high = math.log2(min(values)) - 1, math.log2(max(values)) + 1
        margin = max(0.0, OCTAVES - (high - low)) / 2
        panel.set_ylim(2 ** (low - margin), 2 ** (high + margin))


@styled
def draw_search(record: StudyRecord) -> Figure:
    """Draw a search at one width: the metric against the learning rate, the damping as colour, a star at the best.

    There is one panel per scheme. If only the damping is tuned, the metric is drawn against the damping.

    Args:
        record: The record of the study.

    Returns:
        The figure.

    Raises:
        StudyError: No run has ended.

    Example:
        >>> from mukron.report import draw_search
        >>> from mukron.study import Point, Result, StudyRecord
        >>> from mukron.train import RunConfig
        >>> points = [Point("mup", width, lr, None, seed=0) for width in (64,) for lr in (0.1, 0.2, 0.4)]
        >>> epochs = {point: [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}] for point in points}
        >>> results = [Result(point, "finished", epochs[point]) for point in points]
        >>> record = StudyRecord("example", RunConfig(method="sgd"), ("lr",), "test_loss", results)
        >>> draw_search(record).axes[0].get_title("left")
        'muP, width 64'
    """
    axis, other = ("lr", "damping") if "lr" in record.over else ("damping", "lr")
    figure, axes = scheme_panels(record, size=(5.2, 3.4))
    all_settings = settings(record)
    colour, scale = _colours([getattr(setting, other) for setting in all_settings])
    crosses: list[Crosses] = []
    for panel, (scheme, label) in zip(axes.flat, scheme_labels(record).items(), strict=False):
        of_scheme = [setting for setting in all_settings if setting.scheme == scheme]
        finished, top = [setting for setting in of_scheme if setting.whole], best(of_scheme, record.metric)
        colours = [colour(getattr(setting, other)) for setting in finished]
        x, y = [setting.at(axis) for setting in finished], [setting.mean for setting in finished]
        panel.scatter(x, y, s=24, c=colours)
        if top is not None:
            panel.plot([top.at(axis)], [top.mean], color=colour(getattr(top, other)), **STAR)
        diverged = [setting for setting in of_scheme if setting.diverged]
        crosses.append([(setting.at(axis), 0, colour(getattr(setting, other))) for setting in diverged])
        powers_axis(panel, "x")
        panel.set(title=f"{label}, width {record.widths[0]:g}", xlabel=AXES[axis])
    metric_axis(axes, record, [setting.mean for setting in all_settings])
    strip(axes, record, crosses)
    if scale is not None:
        figure.colorbar(scale, ax=list(axes.flat), label=AXES[other])
    finish(figure, record, mark_handles(star=True, cross=any(crosses)))
    return figure


def _colours(values: Iterable[float | None]) -> tuple[Callable[[float | None], str], Any]:
    """Return the colour of a number on a logarithmic scale, and the scale; one colour if all numbers are equal."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    numbers = sorted({value for value in values if value})
    if len(numbers) < 2:
        return lambda value: shade(1, 2), None
    low, high = numbers[0], numbers[-1]

    def colour(value: float | None) -> str:
        return shade(round(255 * math.log((value or low) / low) / math.log(high / low)), 256)

    return colour, ScalarMappable(LogNorm(low, high), ListedColormap([shade(number, 256) for number in range(256)]))
