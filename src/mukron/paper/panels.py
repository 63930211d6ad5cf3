"""What the figures of recipes share: rows of panels, lines with bands and crosses, a legend of widths."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from mukron import figures
from mukron.figures import shade, sizes_axis
from mukron.paper.errors import ReproductionError
from mukron.study.numbers import metric_label
from mukron.study.panels import STAR, metric_axis, strip
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
GREY = "#666666"
PANEL_INCHES = {1: 4.2, 2: 4.2, 3: 3.2, 4: 3.0}  # width of a panel by the number of columns
NARROW_PANEL_INCHES = 2.6  # width of a panel if there are more columns
TITLE_LETTERS_PER_INCH = 10.5
X_AXIS_INCHES = 0.42  # height of an x axis below its panel
LEVEL: dict[str, Any] = {"color": "#D55E00", "linestyle": "-.", "linewidth": 1.2}  # a horizontal line


@dataclass(frozen=True)
class Line:
    """A line of a panel, with the band of its seeds.

    Attributes:
        x: The positions.
        values: The seeds' values at each position; empty if not all of them finished.
        style: Matplotlib's options of the line.
        number: The row of its crosses.
        unfinished: The positions at which seeds diverged or no run finished.
        star: The position and value of the best setting.
        name: Its width, mentioned if there is nothing to draw.
    """

    x: Sequence[float]
    values: Sequence[Sequence[float]]
    style: Mapping[str, Any]
    number: int = 0
    unfinished: Sequence[float] = ()
    star: tuple[float, float] | None = None
    name: str = ""

    def plot(self, ax: Axes) -> None:
        """Draws the line, its band and its star."""
        colour = self.style["color"]
        means = [fmean(seeds) if seeds else math.nan for seeds in self.values]
        lows, highs = ([end(seeds, default=math.nan) for seeds in self.values] for end in (min, max))
        ax.fill_between(self.x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ax.plot(self.x, means, **self.style)
        if self.star is not None:
            ax.plot(self.star[:1], self.star[1:], color=colour, **STAR)

    @property
    def empty(self) -> bool:
        """Whether there is no value to draw."""
        return not any(self.values)


def panel_axes(rows: Sequence[Sequence[object]], share: bool, height: float = 2.7) -> tuple[Figure, Any]:
    """Returns a figure and the axes of rows of panels, which may differ in length; ``share`` gives a row one y axis."""
    columns = max(map(len, rows))
    options = {"sharey": "row"} if share else {}
    figure, axes = figures.panels(
        len(rows), columns, size=(PANEL_INCHES.get(columns, NARROW_PANEL_INCHES), height), **options
    )
    for row, axes_row in zip(rows, axes, strict=True):
        for ax in axes_row[len(row) :]:
            ax.set_visible(False)
    return figure, axes


def set_title(ax: Axes, title: str, xlabel: str) -> None:
    """Sets title and x label of a panel; the title is wrapped to the panel's width."""
    spec = ax.get_subplotspec()
    assert spec is not None
    columns = spec.get_geometry()[1]
    ax.set_title(textwrap.fill(title, int(TITLE_LETTERS_PER_INCH * PANEL_INCHES.get(columns, NARROW_PANEL_INCHES))))
    ax.set_xlabel(xlabel)


def panel_rows(panels: Sequence[T]) -> list[Sequence[T]]:
    """Arranges panels in rows of three, or four of them as two by two."""
    columns = 2 if len(panels) == 4 else 3
    return [panels[start : start + columns] for start in range(0, len(panels), columns)]


def axis_groups(share: bool, count: int) -> list[slice]:
    """Returns the groups of a row's panels that have one y axis: all of them, or each on its own."""
    return [slice(count)] if share else [slice(number, number + 1) for number in range(count)]


def fill_metric(
    axes_row: Any,
    records: Sequence[StudyRecord],
    content: Sequence[Sequence[Line]],
    cut: bool = False,
    levels: Sequence[float] = (),
) -> None:
    """Draws lines into panels with one y axis, that of the metric, and crosses for diverged runs at its worst end.

    With ``cut``, runs that almost diverged are beyond the axis, and arrows say where. ``levels`` are drawn across all
    panels.
    """
    record = _shared_metric(records)
    _plot(axes_row, content)
    values = [value for lines in content for line in lines for seeds in line.values for value in seeds]
    metric_axis(axes_row[None], record, [*values, *levels], cut)
    for ax, lines in zip(axes_row, content, strict=True):
        for level in levels:
            ax.axhline(level, **LEVEL)
        if cut:
            _mark_beyond(ax, lines)
    if not values:
        axes_row[0].set_yticks([])
    crosses = [[(x, line.number, line.style["color"]) for line in lines for x in line.unfinished] for lines in content]
    strip(axes_row[None], record, crosses)
    if record.metric.endswith("accuracy"):
        from matplotlib.ticker import PercentFormatter

        axes_row[0].yaxis.set_major_formatter(PercentFormatter(1.0))


def _mark_beyond(ax: Axes, lines: Sequence[Line]) -> None:
    """Draws an arrow at the edge of the panel for every mean that lies beyond it."""
    low, high = ax.get_ylim()
    for line in lines:
        for x, seeds in zip(line.x, line.values, strict=True):
            if seeds and not low <= fmean(seeds) <= high:
                edge, marker = (low, "v") if fmean(seeds) < low else (high, "^")
                ax.plot([x], [edge], marker=marker, color=line.style["color"], markersize=5, clip_on=False, zorder=4)


def fill_sizes(axes_row: Any, content: Sequence[Sequence[Line]], label: str) -> None:
    """Draws lines into panels with one logarithmic y axis."""
    _plot(axes_row, content)
    for ax in axes_row:
        sizes_axis(ax)
    axes_row[0].set_ylabel(label)
    if all(line.empty for lines in content for line in lines):
        axes_row[0].set_yticks([])


def _plot(axes_row: Any, content: Sequence[Sequence[Line]]) -> None:
    for ax, lines in zip(axes_row, content, strict=True):
        for line in lines:
            line.plot(ax)
        crossed = any(line.unfinished for line in lines)
        if all(line.empty for line in lines):
            _write_text(ax, 0.5, "nothing finished" if crossed else "nothing to show")
            if not crossed:
                ax.set_xticks([])
        elif absent := [line.name for line in lines if line.name and line.empty]:
            _write_text(ax, 0.05, f"nothing to show at width {', '.join(absent)}")


def _write_text(ax: Axes, height: float, text: str) -> None:
    ax.text(0.5, height, text, transform=ax.transAxes, ha="center", color=GREY, fontsize=8)


def _shared_metric(records: Sequence[StudyRecord]) -> StudyRecord:
    """Returns one of the records, after checking that all have the same metric."""
    if len(metrics := {record.metric for record in records}) > 1:
        names = ", ".join(sorted(map(metric_label, metrics)))
        raise ReproductionError(f"panels with one y axis show one metric, these show {names}; put them in two rows")
    return records[0]


def whole_number_axis(ax: Axes, lines: Sequence[Line]) -> None:
    """Sets whole numbers as ticks of the x axis."""
    from matplotlib.ticker import MaxNLocator

    positions = {x for line in lines for x in line.x}
    if len(positions) == 1:
        ax.set_xticks(list(positions))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


# Colours and legends.


def colours_of(records: Iterable[StudyRecord]) -> dict[float, str]:
    """Returns a colour by width, light for the narrowest and dark for the widest."""
    widths = sorted({width for record in records for width in record.widths})
    return {width: shade(number, len(widths)) for number, width in enumerate(widths)}


def legend_handle(label: str, **style: Any) -> Any:
    """Returns an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": GREY, **style})


def width_legends(
    figure: Figure,
    axes: Any,
    rows: Sequence[Sequence[object]],
    colours: Sequence[Mapping[float, str]],
    marks: Sequence[Any] = (),
) -> None:
    """Adds the legend of widths, one per row if rows differ in them, and below the figure that of other marks."""
    if all(shade_of_width == colours[0] for shade_of_width in colours):
        marks = [*(legend_handle(f"width {width:g}", color=colour) for width, colour in colours[0].items()), *marks]
    else:
        for row, axes_row, colour in zip(rows, axes, colours, strict=True):
            handles = [legend_handle(f"{width:g}", color=shade_of_width) for width, shade_of_width in colour.items()]
            where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            legend = axes_row[len(row) - 1].legend(handles=handles, title="width", **where)
            legend.set_in_layout(len(row) == len(axes_row))  # otherwise hidden panels leave room
    legend_below(figure, marks)


def legend_beneath(ax: Axes, columns: int, handles: Sequence[Any], title: str = "") -> None:
    """Adds a legend below one panel."""
    from matplotlib.transforms import ScaledTranslation

    corner = ax.transAxes + ScaledTranslation(-0.3, -X_AXIS_INCHES, ax.figure.dpi_scale_trans)
    where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": corner}
    look: dict[str, Any] = {"columnspacing": 1.0, "borderpad": 0, "alignment": "left", "title_fontsize": 8}
    ax.legend(handles=list(handles), ncols=columns, title=title or None, **where, **look)


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """Adds a legend below all panels, in as many lines as it needs."""
    if not handles:
        return
    inches = 0.55 + 0.07 * max(len(entry.get_label()) for entry in handles)
    rows = -(-len(handles) // max(1, int(figure.get_size_inches()[0] / inches)))
    figure.legend(handles=list(handles), loc="outside lower center", ncols=-(-len(handles) // rows))
