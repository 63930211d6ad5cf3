"""The parts that the figures of a study share: panels, the axis of the metric, markers and legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mukron.figures import numbers_axis, panels, shade
from mukron.study.errors import StudyError
from mukron.study.numbers import metric_label, subject
from mukron.study.points import lowest_is_best
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAR: dict[str, Any] = {"marker": "*", "markersize": 9, "markeredgecolor": "black", "markeredgewidth": 0.6, "zorder": 5}
CROSS: dict[str, Any] = {"marker": "x", "markersize": 4, "markeredgewidth": 1.2, "linestyle": "none"}
Crosses = list[tuple[float, int, str]]  # the position, the row of the strip, and the colour


def inches(columns: int) -> float:
    """Return the width of a panel in inches, smaller for three or more, so that a row fits a page."""
    return 4.2 if columns < 3 else 3.2


def scheme_panels(record: StudyRecord, size: tuple[float, float] | None = None) -> tuple[Figure, Any]:
    """Make one panel per scheme, three in a row, all with the same axes."""
    if not record.results:
        raise StudyError(f"{record.name}: no run has ended, so there is nothing to draw")
    count = len(record.schemes)
    columns = min(3, count)
    size = size or (inches(columns), 3.2)
    figure, axes = panels(-(-count // columns), columns, size=size, sharey=True, sharex=True)
    for number, panel in enumerate(axes.flat):
        panel.set_visible(number < count)
        panel.tick_params(labelbottom=True)
    return figure, axes


def metric_axis(axes: Any, record: StudyRecord, values: Iterable[float], cut: bool = True) -> None:
    """Scale the y axis: logarithmic for losses, linear for other metrics.

    cut: limit the range by quartiles. Runs that almost diverged are cut off then, so that they do not compress the
    others.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    for row in axes:
        row[0].set_ylabel(metric_label(record.metric))
    if not finite:
        return
    low, high = finite[0], finite[-1]
    if lowest_is_best(record.metric):
        upper_quartile = finite[3 * len(finite) // 4]
        numbers_axis(axes[0, 0], low, min(high, 10 * upper_quartile) if cut and upper_quartile > 0 else high)
    else:
        lower_quartile = finite[len(finite) // 4]
        low = max(low, high - 2 * (high - lower_quartile) or low) if cut else low
        margin = 0.05 * ((high - low) or 1.0)
        axes[0, 0].set_ylim(low - margin, high + margin)


def strip(axes: Any, record: StudyRecord, crosses: Sequence[Crosses]) -> None:
    """Draw a strip at the worse edge of the panels, with a cross for every diverged run and a row for every line."""
    from matplotlib.patches import Rectangle

    rows = sorted({row for marks in crosses for _, row, _ in marks})
    if not rows:
        return
    top, step = lowest_is_best(record.metric), 0.04
    share = step * (len(rows) + 1)
    low, high = axes[0, 0].get_ylim()
    _make_room(axes[0, 0], share, top)
    if not top:
        axes[0, 0].set_yticks([tick for tick in axes[0, 0].get_yticks() if low <= tick <= high])
    for panel, marks in zip(axes.flat, crosses, strict=False):
        corner = (0, 1 - share if top else 0)
        panel.add_patch(Rectangle(corner, 1, share, transform=panel.transAxes, facecolor="#F2F2F2", zorder=0.5))
        for x, row, colour in marks:
            y = step * (rows.index(row) + 1)
            # x in data coordinates, y from 0 to 1
            panel.plot([x], [1 - y if top else y], transform=panel.get_xaxis_transform(), color=colour, **CROSS)


def _make_room(panel: Any, share: float, top: bool) -> None:
    """Extend the y axis so that this share of it is free, at the top or at the bottom."""
    transform = panel.yaxis.get_transform()
    low, high = transform.transform(panel.get_ylim())
    more = (high - low) * share / (1 - share)
    panel.set_ylim(transform.inverted().transform((low, high + more) if top else (low - more, high)))


def width_handles(record: StudyRecord) -> list[Any]:
    """Return the legend's entries for the widths."""
    from matplotlib.lines import Line2D

    colours = [shade(number, len(record.widths)) for number in range(len(record.widths))]
    return [
        Line2D([], [], color=colour, label=f"width {width:g}")
        for colour, width in zip(colours, record.widths, strict=True)
    ]


def mark_handles(star: bool, cross: bool) -> list[Any]:
    """Return the legend's entries for the markers of the best setting and of diverged runs."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color="white", linestyle="none", label="best", **STAR)] if star else []
    return handles + ([Line2D([], [], color="#555555", label="diverged", **CROSS)] if cross else [])


def finish(figure: Figure, record: StudyRecord, handles: list[Any], note: str = "") -> None:
    """Add the legend below all panels and the title above them, wrapped to the width of the figure."""
    width = figure.get_size_inches()[0]
    if handles:
        rows = -(-len(handles) // int(width / 1.15))
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // rows))
    text = fill(subject(record) + note, int(14 * width))
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, parse_math=False)  # a study's name may contain a $
