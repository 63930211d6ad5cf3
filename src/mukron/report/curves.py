"""Training curves by width at the narrowest width's best setting, and whether wider is better there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mukron.figures import line, panels, shade, styled, widths_axis
from mukron.study.curves import AXES
from mukron.study.errors import StudyError
from mukron.study.numbers import SettingSummary, best, judgement, scheme_labels, select, settings
from mukron.study.panels import Crosses, finish, inches, mark_handles, metric_axis, strip, width_handles
from mukron.study.points import Result
from mukron.study.record import StudyRecord
from mukron.train.records import DIVERGED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Epoch:
    """One epoch of all seeds at one setting and width."""

    number: int
    values: tuple[float, ...]  # the metric of the seeds that completed this epoch


def narrowest_best(record: StudyRecord, scheme: str) -> SettingSummary | None:
    """Return the narrowest width's best setting."""
    return best(settings(record, scheme, record.widths[0]), record.metric)


def epochs(record: StudyRecord, setting: SettingSummary, width: float) -> list[Epoch]:
    """Return the metric over the epochs at a setting and a width."""
    by_epoch: dict[int, list[float]] = {}
    for run in _runs(record, setting, width):
        for row in run.rows:
            if row.get(record.metric) is not None:
                by_epoch.setdefault(row["epoch"], []).append(row[record.metric])
    return [Epoch(number, tuple(values)) for number, values in sorted(by_epoch.items())]


def _diverged_epochs(record: StudyRecord, setting: SettingSummary, width: float) -> list[int]:
    """Return the epochs in which seeds diverged."""
    diverged = [run for run in _runs(record, setting, width) if run.status == DIVERGED]
    return sorted({run.rows[-1]["epoch"] + 1 if run.rows else 1 for run in diverged})


def _runs(record: StudyRecord, setting: SettingSummary, width: float) -> list[Result]:
    numbers = (setting.lr, setting.damping)
    return [run for run in select(record, setting.scheme, width) if (run.point.lr, run.point.damping) == numbers]


@styled
def draw_curves(record: StudyRecord) -> Figure:
    """Draw the training curves of every width at the narrowest width's best setting.

    There is one panel per scheme. If the study has a certificate, a second row shows the metric against the width.

    Args:
        record: The record of the study.

    Returns:
        The figure.

    Raises:
        StudyError: No run has ended.

    Example:
        >>> from mukron.report import draw_curves
        >>> from mukron.study import Point, Result, StudyRecord
        >>> from mukron.train import RunConfig
        >>> points = [Point("mup", width, lr, None, seed=0) for width in (64, 128) for lr in (0.1, 0.2, 0.4)]
        >>> epochs = {point: [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}] for point in points}
        >>> results = [Result(point, "finished", epochs[point]) for point in points]
        >>> record = StudyRecord("example", RunConfig(method="sgd"), ("lr",), "test_loss", results)
        >>> draw_curves(record).axes[0].get_title("left")
        'muP: learning rate 0.2'
    """
    if not record.results:
        raise StudyError(f"{record.name}: no run has ended, so there is nothing to draw")
    labels, certified = scheme_labels(record), record.certificate is not None
    figure, axes = panels(1 + certified, len(labels), size=(inches(len(labels)), 2.8), sharey="row", sharex="row")
    values: list[float] = []
    crosses: list[Crosses] = []
    for panel, (scheme, text) in zip(axes[0], labels.items(), strict=True):
        setting = narrowest_best(record, scheme)
        panel.set(title=f"{text}: {_setting_text(record, setting)}", xlabel="epoch")
        crosses.append([])
        for number, width in enumerate(record.widths):
            if setting is None:
                break
            curve, diverged = epochs(record, setting, width), _diverged_epochs(record, setting, width)
            colour = shade(number, len(record.widths))
            _curve(panel, curve, colour)
            crosses[-1] += [(epoch, number, colour) for epoch in diverged]
            values += [value for epoch in curve for value in epoch.values if not diverged]
    metric_axis(axes[:1], record, values)
    strip(axes[:1], record, crosses)
    handles = width_handles(record)
    if certified:
        handles += _metric_against_width(axes[1:], record)
    finish(figure, record, handles + mark_handles(star=False, cross=any(crosses)))
    return figure


def _setting_text(record: StudyRecord, setting: SettingSummary | None) -> str:
    if setting is None:
        return "nothing finished"
    return ", ".join(f"{AXES[axis]} {setting.at(axis):.3g}" for axis in record.over)


def _curve(panel: Axes, curve: Sequence[Epoch], colour: str) -> None:
    """Draw means over the seeds, and a band from the lowest to the highest."""
    from matplotlib.ticker import MaxNLocator

    x, means = [epoch.number for epoch in curve], [fmean(epoch.values) for epoch in curve]
    lows, highs = [min(epoch.values) for epoch in curve], [max(epoch.values) for epoch in curve]
    panel.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, means, color=colour, marker="" if len(x) > 2 else "o")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _metric_against_width(axes: Any, record: StudyRecord) -> list[Any]:
    """Draw the metric against the width, early and late in training, and return the legend's entries."""
    from matplotlib.lines import Line2D

    values: list[float] = []
    crosses: list[Crosses] = []
    labels: dict[str, int] = {}
    for panel, scheme in zip(axes[0], record.schemes, strict=True):
        crosses.append([])
        judged = judgement(record, scheme)
        for number, wider in enumerate(judged.wider if judged else ()):
            labels.setdefault(f"{wider.when} (epoch {wider.epoch})", number)
            style = line(number)
            finite = [(width, mean, error or 0.0) for width, mean, error in wider.values if math.isfinite(mean)]
            if finite:
                x, y, errors = zip(*finite, strict=True)
                panel.errorbar(x, y, errors, capsize=2, **style)
                values += [end for mean, error in zip(y, errors, strict=True) for end in (mean - error, mean + error)]
            diverged = [width for width, mean, _ in wider.values if not math.isfinite(mean)]
            crosses[-1] += [(width, number, style["color"]) for width in diverged]
        widths_axis(panel, record.widths)
    metric_axis(axes, record, values)
    strip(axes, record, crosses)
    return [Line2D([], [], label=text, **line(number)) for text, number in labels.items()]
