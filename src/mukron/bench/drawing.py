"""The figure of a benchmark, drawn from its stored result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from mukron.bench.result import BenchResult, MethodResult
from mukron.exponents import fit_exponent
from mukron.figures import COLOURS, line, panels, save, sizes_axis, styled, widths_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_SCALE_RATIO = 10  # the axis is logarithmic if the longest bar exceeds the median one by more than this
FITTED_WIDTHS = 3  # a slope is fitted to this many of the widest networks


def draw_result(result: BenchResult, path: Path, endings: Sequence[str] = (".svg", ".png")) -> list[Path]:
    """Draws time against width, or bars relative to the base method if there is one width.

    Args:
        result: The result to draw.
        path: Where to write, without the ending.
        endings: The file types to write.

    Returns:
        The files written; none if the result has no times.
    """
    if not any(row.milliseconds for row in result.rows):
        return []
    return save(_figure(result), path, endings)


@styled
def _figure(result: BenchResult) -> Figure:
    several = len(result.widths) > 1
    methods = list(dict.fromkeys(row.method for row in result.rows if row.milliseconds))
    figure, axes = panels(1, 1, size=(6.8, 4.2) if several else (6.8, 0.9 + 0.3 * len(methods)))
    axis = axes[0, 0]
    by_method = {name: [row for row in result.rows if row.method == name and row.milliseconds] for name in methods}
    if several:
        _lines(axis, by_method, result.widths)
    else:
        _bars(axis, result, [rows[0] for rows in by_method.values()])
    axis.set_title(result.title, fontsize=8)
    return figure


def _lines(axis: Axes, by_method: dict[str, list[MethodResult]], widths: list[int]) -> None:
    for number, (name, unsorted) in enumerate(by_method.items()):
        rows = sorted(unsorted, key=lambda row: row.width)
        method_widths, medians = [row.width for row in rows], [row.median for row in rows]
        label = name
        if len(method_widths) > 1:
            slope = fit_exponent(method_widths[-FITTED_WIDTHS:], medians[-FITTED_WIDTHS:]).slope
            label += f", width^{slope:.1f}"
        low, high = ([abs(row.quartiles[side] - row.median) for row in rows] for side in (0, 1))
        axis.errorbar(method_widths, medians, yerr=[low, high], label=label, capsize=2, **line(number))
    widths_axis(axis, widths)
    sizes_axis(axis)
    axis.set_ylabel("milliseconds")
    axis.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), title=f"slope of the upper {min(FITTED_WIDTHS, len(widths))}"
    )


def _bars(axis: Axes, result: BenchResult, rows: list[MethodResult]) -> None:
    base = result.base_at(result.widths[0])
    unit = 1.0 if base is None else base.median
    lengths = [row.median / unit for row in rows]
    places = range(len(rows))
    axis.barh(places, lengths, color=COLOURS[0], height=0.6)
    axis.set_yticks(places, [row.method for row in rows])
    axis.invert_yaxis()
    labels = [f"{length:.0f}" if length >= 1000 else f"{length:.3g}" for length in lengths]
    axis.bar_label(axis.containers[0], labels, padding=3, fontsize=8)  # type: ignore[arg-type]
    if max(lengths) > LOG_SCALE_RATIO * median(lengths):  # else the others would be invisible
        axis.set_xscale("log")
        axis.set_xlim(0.7 * min(lengths), 2 * max(lengths))
    else:
        axis.set_xlim(0, 1.12 * max(lengths))
    axis.set_xlabel("milliseconds" if base is None else f"x {result.base} ({base.median:.3g} ms)")
