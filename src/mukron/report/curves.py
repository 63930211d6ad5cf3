"""Training curves by width at the setting that a user would carry over, and whether wider is better there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mukron.figures import line, panels, shade, styled, widths_axis
from mukron.report.frame import Crosses, finish, inches, mark_handles, metric_axis, strip, width_handles
from mukron.report.numbers import AXES, Setting, best, judgement, names, select, settings
from mukron.study.errors import StudyError
from mukron.study.points import DIVERGED, Result
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Epoch:
    """One epoch of all seeds at one width."""

    number: int
    values: tuple[float, ...]  # of the seeds that got there


def carried(record: StudyRecord, scheme: str) -> Setting | None:
    """The narrowest width's best setting."""
    return best(settings(record, scheme, record.widths[0]), record.metric)


def epochs(record: StudyRecord, chosen: Setting, width: float) -> list[Epoch]:
    """The metric over the epochs at this setting and width."""
    found: dict[int, list[float]] = {}
    for run in _runs(record, chosen, width):
        for row in run.rows:
            if row.get(record.metric) is not None:
                found.setdefault(row["epoch"], []).append(row[record.metric])
    return [Epoch(number, tuple(values)) for number, values in sorted(found.items())]


def _lost(record: StudyRecord, chosen: Setting, width: float) -> list[int]:
    """The epochs in which seeds diverged."""
    lost = [run for run in _runs(record, chosen, width) if run.status == DIVERGED]
    return sorted({run.rows[-1]["epoch"] + 1 if run.rows else 1 for run in lost})


def _runs(record: StudyRecord, chosen: Setting, width: float) -> list[Result]:
    here = (chosen.lr, chosen.damping)
    return [run for run in select(record, chosen.scheme, width) if (run.point.lr, run.point.damping) == here]


@styled
def draw_curves(record: StudyRecord) -> Figure:
    """Training curves by width at the narrowest width's best setting; below them, the metric against the width."""
    if not record.results:
        raise StudyError(f"{record.name}: no run has ended, so there is nothing to draw")
    shown, wide = names(record), record.certificate is not None
    figure, axes = panels(1 + wide, len(shown), size=(inches(len(shown)), 2.8), sharey="row", sharex="row")
    values: list[float] = []
    crosses: list[Crosses] = []
    for panel, (scheme, name) in zip(axes[0], shown.items(), strict=True):
        chosen = carried(record, scheme)
        panel.set(title=f"{name}: {_at(record, chosen)}", xlabel="epoch")
        crosses.append([])
        for number, width in enumerate(record.widths):
            if chosen is None:
                break
            found, lost = epochs(record, chosen, width), _lost(record, chosen, width)
            colour = shade(number, len(record.widths))
            _curve(panel, found, colour)
            crosses[-1] += [(epoch, number, colour) for epoch in lost]
            values += [value for epoch in found for value in epoch.values if not lost]
    metric_axis(axes[:1], record, values)
    strip(axes[:1], record, crosses)
    handles = width_handles(record)
    if wide:
        handles += _wider(axes[1:], record)
    finish(figure, record, handles + mark_handles(star=False, cross=any(crosses)))
    return figure


def _at(record: StudyRecord, chosen: Setting | None) -> str:
    if chosen is None:
        return "nothing finished"
    return ", ".join(f"{AXES[axis]} {chosen.at(axis):.3g}" for axis in record.over)


def _curve(panel: Axes, found: Sequence[Epoch], colour: str) -> None:
    """Means over the seeds, and a band from the lowest to the highest."""
    from matplotlib.ticker import MaxNLocator

    x, means = [epoch.number for epoch in found], [fmean(epoch.values) for epoch in found]
    lows, highs = [min(epoch.values) for epoch in found], [max(epoch.values) for epoch in found]
    panel.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, means, color=colour, marker="" if len(x) > 2 else "o")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _wider(axes: Any, record: StudyRecord) -> list[Any]:
    """The metric against the width, early and late, as the certificate has it. Returns handles for the legend."""
    from matplotlib.lines import Line2D

    values: list[float] = []
    crosses: list[Crosses] = []
    labels: dict[str, int] = {}
    for panel, scheme in zip(axes[0], record.schemes, strict=True):
        crosses.append([])
        judged = judgement(record, scheme)
        for number, each in enumerate(judged.wider if judged else ()):
            labels.setdefault(f"{each.when} (epoch {each.epoch})", number)
            style = line(number)
            there = [(width, mean, error or 0.0) for width, mean, error in each.values if math.isfinite(mean)]
            if there:
                x, y, errors = zip(*there, strict=True)
                panel.errorbar(x, y, errors, capsize=2, **style)
                values += [end for mean, error in zip(y, errors, strict=True) for end in (mean - error, mean + error)]
            lost = [width for width, mean, _ in each.values if not math.isfinite(mean)]
            crosses[-1] += [(width, number, style["color"]) for width in lost]
        widths_axis(panel, record.widths)
    metric_axis(axes, record, values)
    strip(axes, record, crosses)
    return [Line2D([], [], label=text, **line(number)) for text, number in labels.items()]
