"""The figures of a coordinate check: quantities against the width, and over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mukron.diagnose.readings import DAMPING, UNCLEAR, Reading, Verdict
from mukron.diagnose.record import OUTPUT, Record
from mukron.exponents import Exponent
from mukron.figures import MARKERS, line, panels, shade, sizes_axis, styled, widths_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES, MOST_PANELS, MOST_SLOPES = 10, 6, 30


@styled
def against_width(record: Record, parts: Sequence[tuple[Reading, Sequence[Verdict]]], title: str) -> Figure:
    """Draw one panel per quantity and one line per layer: means over seeds, with a dot for each seed."""
    columns = min(2, len(parts))
    figure, axes = panels(-(-len(parts) // columns), columns, size=(5.4, 3.0))
    for axis in axes.flat[len(parts) :]:
        axis.set_visible(False)
    for axis, (reading, verdicts) in zip(axes.flat, parts, strict=False):
        distinct = _distinct(record, reading, verdicts)
        shown = _shown(distinct)
        for number, verdict in enumerate(shown):
            _line(axis, record, reading, verdict, number)
        widths_axis(axis, record.widths)
        sizes_axis(axis)
        hidden = len(distinct) - len(shown)
        axis.set_title(reading.caption + (f" ({hidden} more in the CSV)" if hidden else ""))
        axis.set_ylabel("ratio" if reading is DAMPING else "root mean square")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    _title(figure, title)
    return figure


def _line(axis: Axes, record: Record, reading: Reading, verdict: Verdict, number: int) -> None:
    rows = [row for row in record.select(reading.quantity, verdict.layer) if row.value > 0]
    style = line(number)
    widths = sorted({row.width for row in rows})
    means = [fmean(row.value for row in rows if row.width == width) for width in widths]
    slope = "" if verdict.measured is None else f" {verdict.measured.slope:+.2f}"
    axis.plot(widths, means, label=f"{verdict.layer}{slope}, {verdict.word}", **style)
    axis.scatter([row.width for row in rows], [row.value for row in rows], s=6, color=style["color"], alpha=0.5)


def _shown(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return all verdicts if they are few, else the worst, in the order of the forward pass."""
    if len(verdicts) <= MOST_LINES:
        return list(verdicts)

    def rank(number: int) -> tuple[bool, bool, float]:
        verdict = verdicts[number]
        slope = abs(verdict.measured.slope) if verdict.measured is not None else 0.0
        return verdict.ok, verdict.word == UNCLEAR, -slope

    chosen = sorted(range(len(verdicts)), key=rank)[:MOST_LINES]
    return [verdicts[number] for number in sorted(chosen)]


def _distinct(record: Record, reading: Reading, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave out the network's output where it equals that of its last layer."""
    values = {
        verdict.layer: [row.value for row in record.select(reading.quantity, verdict.layer)] for verdict in verdicts
    }
    others = [values[verdict.layer] for verdict in verdicts if verdict.layer != OUTPUT]
    return [verdict for verdict in verdicts if verdict.layer != OUTPUT or values[OUTPUT] not in others]


@styled
def over_steps(record: Record, quantities: dict[str, Any], names: dict[str, str], title: str) -> Figure:
    """Draw one panel per layer over the steps: light for the narrowest width, dark for the widest; means over seeds.

    ``quantities`` gives the line style of each quantity, ``names`` its name in the legend.
    """
    from matplotlib.ticker import MaxNLocator

    markers = dict(zip(quantities, MARKERS, strict=False))
    layers = record.layers(next(iter(quantities)))
    shown = layers if len(layers) <= MOST_PANELS else [*layers[: MOST_PANELS - 2], *layers[-2:]]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = panels(rows, columns, size=(3.2, 2.4), sharex=True)
    for axis, layer in zip(axes.flat, shown, strict=False):
        for number, width in enumerate(record.widths):
            for quantity, dashes in quantities.items():
                points = _means_over_seeds(record, quantity, layer, width)
                colour = shade(number, len(record.widths))
                axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    linestyle=dashes,
                    marker=markers[quantity] if len(points) < 3 else "",
                )
        axis.set_title(layer)
        if record.steps > 1:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_xticks([1])
        sizes_axis(axis)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    _legend(figure, record, quantities, names)
    hidden = len(layers) - len(shown)
    _title(figure, title + (f" ({hidden} more in the CSV)" if hidden else ""))
    return figure


@styled
def draw_slopes(exponents: Mapping[str, Exponent], tolerance: float, title: str) -> Figure:
    """Draw one dot per quantity with its interval of 95%, the steepest where they are many."""
    steepest = sorted(exponents, key=lambda name: -abs(exponents[name].slope))[:MOST_SLOPES]
    names = [name for name in exponents if name in steepest]
    figure, axes = panels(1, 1, size=(6.4, 0.9 + 0.2 * len(names)))
    axis, places = axes[0, 0], range(len(names))
    found = [exponents[name] for name in names]
    axis.axvspan(-tolerance, tolerance, color="#009E73", alpha=0.15, label="passes")
    slopes = [exponent.slope for exponent in found]
    axis.hlines(places, *zip(*((exponent.low, exponent.high) for exponent in found), strict=True), color="#888888")
    axis.plot(slopes, places, **{**line(0), "linestyle": ""})
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    reach = 1.5 * max(1.0, *map(abs, slopes))  # intervals of few points may be very wide
    axis.set_xlim(-reach, reach)
    axis.set_xlabel("slope in the depth")
    axis.legend()
    hidden = len(exponents) - len(names)
    _title(figure, title + (f" ({hidden} flatter ones are not drawn)" if hidden else ""))
    return figure


@styled
def draw_branches(depths: Sequence[int], sizes: Mapping[str, Sequence[float]]) -> Figure:
    """Draw one line per container of blocks: the size of what a block adds at each depth, and the law 1/L."""
    figure, axes = panels(1, 1, size=(4.6, 3.0))
    axis = axes[0, 0]
    for number, (container, of_container) in enumerate(sizes.items()):
        axis.plot(depths, of_container, label=container or "the network", **line(number))
        law = [of_container[0] * depths[0] / depth for depth in depths]
        axis.plot(depths, law, color=line(number)["color"], linestyle=":", label="1/L")
    widths_axis(axis, depths)
    sizes_axis(axis)
    axis.set(xlabel="depth", ylabel="root mean square")
    axis.legend()
    _title(figure, "What a residual block adds to the residual stream")
    return figure


def _title(figure: Figure, text: str) -> None:
    """Write the title above all panels, wrapped to the width of the figure."""
    figure.suptitle(fill(text, int(14 * figure.get_size_inches()[0])), x=0.01, ha="left", fontsize=10)


def _means_over_seeds(record: Record, quantity: str, layer: str, width: float) -> list[tuple[int, float]]:
    by_step: dict[int, list[float]] = {}
    for row in record.rows:
        if (row.quantity, row.layer, row.width) == (quantity, layer, width):
            by_step.setdefault(row.step, []).append(row.value)
    return [(step, fmean(values)) for step, values in sorted(by_step.items())] or [(0, float("nan"))]


def _legend(figure: Figure, record: Record, quantities: dict[str, Any], names: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=shade(number, len(record.widths)), label=f"width {width:g}")
        for number, width in enumerate(record.widths)
    ]
    if len(quantities) > 1:
        handles += [
            Line2D([], [], color="#444444", linestyle=dashes, label=names[q]) for q, dashes in quantities.items()
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
