"""What the figures of recipes have in common: rows of panels, lines with bands and crosses, one legend of widths."""

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
from mukron.report.frame import STAR, metric_axis, strip
from mukron.report.numbers import words
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
GREY = "#666666"
INCHES = {1: 4.2, 2: 4.2, 3: 3.2, 4: 3.0}  # a panel's width, by columns
NARROW = 2.6  # where there are more
LETTERS = 10.5  # of a title, an inch
AXIS = 0.42  # inches that an x axis takes below its panel


@dataclass(frozen=True)
class Line:
    """A line of a panel, and the band of its seeds."""

    x: Sequence[float]
    values: Sequence[Sequence[float]]  # the seeds at each x; none where not every one finished
    style: Mapping[str, Any]
    number: int = 0  # of its row of crosses
    lost: Sequence[float] = ()  # the x at which seeds diverged or nothing finished
    star: tuple[float, float] | None = None
    name: str = ""  # its width, said where there is nothing to draw

    def plot(self, place: Axes) -> None:
        colour = self.style["color"]
        means = [fmean(seeds) if seeds else math.nan for seeds in self.values]
        lows, highs = ([end(seeds, default=math.nan) for seeds in self.values] for end in (min, max))
        place.fill_between(self.x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        place.plot(self.x, means, **self.style)
        if self.star is not None:
            place.plot(self.star[:1], self.star[1:], color=colour, **STAR)

    @property
    def empty(self) -> bool:
        return not any(self.values)


def panel_axes(rows: Sequence[Sequence[object]], share: bool, height: float = 2.7) -> tuple[Figure, Any]:
    """Axes for rows of panels, which may differ in length; each row with one y axis, if they share it."""
    columns = max(map(len, rows))
    options = {"sharey": "row"} if share else {}
    figure, axes = figures.panels(len(rows), columns, size=(INCHES.get(columns, NARROW), height), **options)
    for row, places in zip(rows, axes, strict=True):
        for place in places[len(row) :]:
            place.set_visible(False)
    return figure, axes


def set_title(place: Axes, title: str, xlabel: str) -> None:
    """In as many lines as the panel's width takes."""
    spec = place.get_subplotspec()
    assert spec is not None
    columns = spec.get_geometry()[1]
    place.set_title(textwrap.fill(title, int(LETTERS * INCHES.get(columns, NARROW))))
    place.set_xlabel(xlabel)


def panel_rows(panels: Sequence[T]) -> list[Sequence[T]]:
    """Three in a row; four as two by two."""
    columns = 2 if len(panels) == 4 else 3
    return [panels[start : start + columns] for start in range(0, len(panels), columns)]


def axis_groups(share: bool, count: int) -> list[slice]:
    """Panels that have one y axis: all of a row, or each alone."""
    return [slice(count)] if share else [slice(number, number + 1) for number in range(count)]


def fill_metric(places: Any, records: Sequence[StudyRecord], content: Sequence[Sequence[Line]]) -> None:
    """Panels with one y axis, that of the metric: lines, and what diverged at the bad edge."""
    record = _of_one_metric(records)
    _plot(places, content)
    every = [value for lines in content for each in lines for seeds in each.values for value in seeds]
    metric_axis(places[None], record, every)
    if not every:
        places[0].set_yticks([])
    crosses = [[(x, each.number, each.style["color"]) for each in lines for x in each.lost] for lines in content]
    strip(places[None], record, crosses)
    if record.metric.endswith("accuracy"):
        from matplotlib.ticker import PercentFormatter

        places[0].yaxis.set_major_formatter(PercentFormatter(1.0))


def fill_sizes(places: Any, content: Sequence[Sequence[Line]], label: str) -> None:
    """Panels with one y axis, a logarithmic one: sizes of something."""
    _plot(places, content)
    for place in places:
        sizes_axis(place)
    places[0].set_ylabel(label)
    if all(each.empty for lines in content for each in lines):
        places[0].set_yticks([])


def _plot(places: Any, content: Sequence[Sequence[Line]]) -> None:
    for place, lines in zip(places, content, strict=True):
        for each in lines:
            each.plot(place)
        crossed = any(each.lost for each in lines)
        if all(each.empty for each in lines):
            _say(place, 0.5, "nothing finished" if crossed else "nothing to show")
            if not crossed:
                place.set_xticks([])
        elif absent := [each.name for each in lines if each.name and each.empty]:
            _say(place, 0.05, f"nothing to show at width {', '.join(absent)}")


def _say(place: Axes, height: float, text: str) -> None:
    place.text(0.5, height, text, transform=place.transAxes, ha="center", color=GREY, fontsize=8)


def _of_one_metric(records: Sequence[StudyRecord]) -> StudyRecord:
    """One of them, to say what is measured."""
    if len(found := {record.metric for record in records}) > 1:
        named = ", ".join(sorted(map(words, found)))
        raise ReproductionError(f"panels with one y axis show one metric, these show {named}; put them in two rows")
    return records[0]


def whole_number_axis(place: Axes, lines: Sequence[Line]) -> None:
    """On the x axis, as of epochs."""
    from matplotlib.ticker import MaxNLocator

    there = {x for each in lines for x in each.x}
    if len(there) == 1:
        place.set_xticks(list(there))
    else:
        place.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


# Colours and legends.


def colours_of(records: Iterable[StudyRecord]) -> dict[float, str]:
    """By width: light for the narrowest, dark for the widest."""
    widths = sorted({width for record in records for width in record.widths})
    return {width: shade(number, len(widths)) for number, width in enumerate(widths)}


def legend_handle(label: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": GREY, **style})


def width_legends(
    figure: Figure,
    axes: Any,
    rows: Sequence[Sequence[object]],
    colours: Sequence[Mapping[float, str]],
    marks: Sequence[Any] = (),
) -> None:
    """The widths' colours once, or beside each row where rows differ in them; below all, what else is marked."""
    if all(each == colours[0] for each in colours):
        marks = [*(legend_handle(f"width {width:g}", color=colour) for width, colour in colours[0].items()), *marks]
    else:
        for row, places, colour in zip(rows, axes, colours, strict=True):
            handles = [legend_handle(f"{width:g}", color=each) for width, each in colour.items()]
            where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            legend = places[len(row) - 1].legend(handles=handles, title="width", **where)
            legend.set_in_layout(len(row) == len(places))  # else it has room
    legend_below(figure, marks)


def legend_beneath(place: Axes, columns: int, handles: Sequence[Any], title: str = "") -> None:
    """Under one panel."""
    from matplotlib.transforms import ScaledTranslation

    corner = place.transAxes + ScaledTranslation(-0.3, -AXIS, place.figure.dpi_scale_trans)
    where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": corner}
    look: dict[str, Any] = {"columnspacing": 1.0, "borderpad": 0, "alignment": "left", "title_fontsize": 8}
    place.legend(handles=list(handles), ncols=columns, title=title or None, **where, **look)


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """Under all panels, in as many lines as it takes."""
    if not handles:
        return
    each = 0.55 + 0.07 * max(len(legend_handle.get_label()) for legend_handle in handles)  # inches
    rows = -(-len(handles) // max(1, int(figure.get_size_inches()[0] / each)))
    figure.legend(handles=list(handles), loc="outside lower center", ncols=-(-len(handles) // rows))
