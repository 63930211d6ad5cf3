"""How recipes are drawn: each function here makes one that goes from evidence to a figure.

They draw what is there. Where nothing finished, or with one width, one setting or one seed, there is a figure still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from mukron import figures
from mukron.diagnose.readings import FEATURES, Reading, Verdict, judge
from mukron.diagnose.record import OUTPUT, Record
from mukron.figures import line, powers_axis, shade, sizes_axis, styled, widths_axis
from mukron.paper.panels import (
    GREY,
    Line,
    axis_groups,
    colours_of,
    fill_metric,
    fill_sizes,
    legend_below,
    legend_beneath,
    legend_handle,
    panel_axes,
    panel_rows,
    set_title,
    whole_number_axis,
    width_legends,
)
from mukron.paper.recipe import Evidence
from mukron.report.frame import mark_handles
from mukron.report.numbers import AXES, best, profile, select, words
from mukron.study.errors import StudyError
from mukron.study.points import Result
from mukron.study.record import StudyRecord
from mukron.table import Table
from mukron.train.records import EpochRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawFunction = Callable[[Evidence], "Figure"]
Colours = Mapping[float, str]  # by width
HeatCells = tuple[
    Sequence[str], Sequence[str], Sequence[Sequence[float]]
]  # labels of x and of y; for each y its numbers
MOST_LAYERS = 8  # that a check shows
LETTER, ROW, NOTE = 0.085, 0.24, 0.16  # inches, of a table


@dataclass(frozen=True)
class Panel:
    """One scheme of a part."""

    title: str
    part: str
    scheme: str | None = None  # as the study spells it or as it begins, "sp"; the first one if not given
    quantity: str | None = None  # for what goes over epochs, where panels differ in it


@dataclass(frozen=True)
class ExponentPanel:
    """A part for each exponent of the output layer."""

    title: str
    parts: Mapping[float, str]
    scheme: str | None = None


@dataclass(frozen=True)
class WidthLine:
    """The best of each width; and what the paper printed, by width and in the metric's unit: 0.6496, not 64.96."""

    label: str
    part: str
    scheme: str | None = None
    paper: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WidthPanel:
    """Lines to compare."""

    title: str
    lines: Sequence[WidthLine]


# Studies.


def transfer(panels: Sequence[Sequence[Panel]], axis: str = "lr") -> DrawFunction:
    """The metric against the learning rate or "damping": a line a width, its best a star, what diverged a cross."""

    @styled
    def draw(evidence: Evidence) -> Figure:
        figure, axes = panel_axes(panels, share=True)
        colours = [colours_of(evidence.study(panel.part) for panel in row) for row in panels]
        every: list[Line] = []
        for row, places, colour in zip(panels, axes, colours, strict=True):
            records, content = [evidence.study(panel.part) for panel in row], []
            for panel, place, record in zip(row, places, records, strict=False):
                powers_axis(place, "x")
                set_title(place, panel.title, AXES[axis])
                content.append(_over_settings(record, panel.scheme, axis, colour))
                every += content[-1]
            fill_metric(places[: len(row)], records, content)
        marks = mark_handles(any(each.star for each in every), any(each.lost for each in every))
        width_legends(figure, axes, panels, colours, marks)
        return figure

    return draw


def over_exponent(panels: Sequence[ExponentPanel], second: str | None = None, share: bool = True) -> DrawFunction:
    """The best of each width against the exponent of the output layer; dashed, a ``second`` metric at that setting.

    share: one y axis for all panels of a row.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        rows = panel_rows(panels)
        figure, axes = panel_axes(rows, share)
        records = [[[evidence.study(part) for part in panel.parts.values()] for panel in row] for row in rows]
        flat = [record for row in records for found in row for record in found]
        colours = colours_of(flat)
        every: list[Line] = []
        for row, places, found in zip(rows, axes, records, strict=True):
            content = []
            for panel, place, own in zip(row, places, found, strict=False):
                content.append(_over_exponents(own, panel.scheme, colours, second))
                place.set_xticks(range(len(own)), ["∞" if math.isinf(b) else f"{b:g}" for b in panel.parts])
                place.set_xlim(-0.4, len(own) - 0.6)
                set_title(place, panel.title, "$b_L$, exponent of the output layer")
                every += content[-1]
            for some in axis_groups(share, len(row)):
                fill_metric(places[some], [record for own in found[some] for record in own], content[some])
        marks = mark_handles(star=False, cross=any(each.lost for each in every))
        if second is not None:
            marks = [legend_handle(words(flat[0].metric)), legend_handle(words(second), linestyle="--"), *marks]
        width_legends(figure, axes, rows, [colours] * len(rows), marks)
        return figure

    return draw


def over_epochs(
    panels: Sequence[Sequence[Panel]],
    quantity: str | None = None,
    metric: str | None = None,
    against: str = "epoch",
    label: str = "",
) -> DrawFunction:
    """A column of each width's best setting over its epochs (or each "step"): a line a width.

    metric: a loss or an accuracy; the study's own if neither is given. quantity: what was recorded besides, of one
    layer, "distance/fc1.weight", or the mean of several, "distance/" or "mean/*.A"; its axis is logarithmic and called
    by its label. A panel's own quantity, which may be a metric too, comes first; panels that differ in it have axes of
    their own.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        share = all(len({panel.quantity for panel in row}) == 1 for row in panels)
        figure, axes = panel_axes(panels, share)
        colours = [colours_of(evidence.study(panel.part) for panel in row) for row in panels]
        for row, places, colour in zip(panels, axes, colours, strict=True):
            records, content = [evidence.study(panel.part) for panel in row], []
            columns = [
                panel.quantity or quantity or metric or record.metric
                for panel, record in zip(row, records, strict=True)
            ]
            for panel, place, record, column in zip(row, places, records, columns, strict=False):
                content.append(_over_rows(record, panel.scheme, column, against, colour))
                whole_number_axis(place, content[-1])
                set_title(place, panel.title, against)
            for some in axis_groups(share, len(row)):
                _fill_column(places[some], records[some], content[some], columns[some], label)
        width_legends(figure, axes, panels, colours)
        return figure

    return draw


def layers_over_epochs(panels: Sequence[Sequence[Panel]], against: str = "epoch", label: str = "") -> DrawFunction:
    """Like ``over_epochs``, for the widest network alone and with a line a layer: a quantity such as "mean/*.A"."""

    @styled
    def draw(evidence: Evidence) -> Figure:
        figure, axes = panel_axes(panels, share=False)
        for row, places in zip(panels, axes, strict=True):
            for number, panel in enumerate(row):
                content = _over_layers(evidence.study(panel.part), panel, against)
                whole_number_axis(places[number], content)
                set_title(places[number], panel.title, against)
                fill_sizes(places[number : number + 1], [content], label or words(panel.quantity or "").split("/")[0])
        marks = [legend_handle(text, color=shade(end, 2)) for end, text in enumerate(("first layer", "last layer"))]
        legend_below(figure, marks)
        return figure

    return draw


def best_over_width(panels: Sequence[WidthPanel]) -> DrawFunction:
    """The best of each width against the width, and dotted what the paper printed. Each panel has its own y axis."""

    @styled
    def draw(evidence: Evidence) -> Figure:
        rows = panel_rows(panels)
        figure, axes = panel_axes(rows, share=False)
        places = [place for row, of_row in zip(rows, axes, strict=True) for place in of_row[: len(row), None]]
        lost = False
        for panel, place in zip(panels, places, strict=True):
            records = [evidence.study(each.part) for each in panel.lines]
            content = [
                each
                for number, (wanted, record) in enumerate(zip(panel.lines, records, strict=True))
                for each in _over_widths(record, wanted, number)
            ]
            if widths := [width for each in content for width in each.x]:
                widths_axis(place[0], widths)
            set_title(place[0], panel.title, "width")
            fill_metric(place, records, [content])
            lost = lost or any(each.lost for each in content)
        marks = mark_handles(star=False, cross=lost)
        if any(each.paper for panel in panels for each in panel.lines):
            marks.insert(0, legend_handle("the paper", linestyle=":", marker="o", markerfacecolor="white"))
        names = [[each.label for each in panel.lines] for panel in panels]
        if all(each == names[0] for each in names):
            marks = [*_named(names[0]), *marks]
        else:
            for place, own in zip(places, names, strict=True):
                legend_beneath(place[0], 2, _named(own))
        legend_below(figure, marks)
        return figure

    return draw


def _named(labels: Sequence[str]) -> list[Any]:
    return [legend_handle(label, **_solid(number)) for number, label in enumerate(labels)]


def _solid(number: int) -> dict[str, Any]:
    return {**line(number), "linestyle": "-"}


def _over_settings(record: StudyRecord, wanted: str | None, axis: str, colours: Colours) -> list[Line]:
    scheme = _scheme(record, wanted)
    if scheme is None:
        return []
    lines = []
    for number, (width, colour) in enumerate(colours.items()):
        found = profile(record, axis, scheme, width)
        top = best(found, record.metric)
        lines.append(
            Line(
                [each.at(axis) for each in found],
                [each.values if each.whole else () for each in found],
                {"color": colour, "marker": "o", "markersize": 3},
                number,
                [each.at(axis) for each in found if each.diverged],
                (top.at(axis), top.mean) if top else None,
            )
        )
    return lines


def _over_exponents(
    records: Sequence[StudyRecord], scheme: str | None, colours: Colours, second: str | None
) -> list[Line]:
    """Over the studies, one beside the other; two lines a width where there is a second metric."""
    lines = []
    for number, (width, colour) in enumerate(colours.items()):
        runs = {x: _best_runs(each, scheme, width) for x, each in enumerate(records) if width in each.widths}
        values = [_values(found, records[x].metric) for x, found in runs.items()]
        lost = [x for x, found in runs.items() if not found]
        lines.append(Line(list(runs), values, {"color": colour, "marker": "o"}, number, lost))
        if second is not None:
            style = {"color": colour, "marker": "o", "markerfacecolor": "white", "linestyle": "--"}
            lines.append(Line(list(runs), [_values(found, second) for found in runs.values()], style, number))
    return lines


def _over_rows(record: StudyRecord, scheme: str | None, column: str, against: str, colours: Colours) -> list[Line]:
    lines = []
    for width in record.widths:
        rows = [row for run in _best_runs(record, scheme, width) for row in run.rows]
        lines.append(_line_of(rows, column, against, {"color": colours[width]}, f"{width:g}"))
    return lines


def _fill_column(
    places: Any, records: Sequence[StudyRecord], content: Sequence[Sequence[Line]], columns: Sequence[str], label: str
) -> None:
    """A metric has its axis; what probes recorded, QUANTITY/LAYER, is a size."""
    if all("/" in column and not column.startswith("words/") for column in columns):
        fill_sizes(places, content, label or words(columns[0].strip("/*")))
    else:
        fill_metric(
            places, [replace(record, metric=column) for record, column in zip(records, columns, strict=True)], content
        )


def _over_layers(record: StudyRecord, panel: Panel, against: str) -> list[Line]:
    """Light for the first layer, dark for the last."""
    rows = [row for run in _best_runs(record, panel.scheme, max(record.widths, default=0.0)) for row in run.rows]
    columns = list(dict.fromkeys(name for row in rows for name in row if _fits(name, panel.quantity or "*/*")))
    lines = []
    for number, column in enumerate(columns):
        style = {"color": shade(number, len(columns)), "linewidth": 1.0}
        lines.append(_line_of(rows, column, against, style))
    return lines


def _line_of(rows: Iterable[EpochRow], column: str, against: str, style: dict[str, Any], name: str = "") -> Line:
    """Epoch by epoch, with all seeds."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if (value := _column(row, column)) is not None:
            found.setdefault(row[against], []).append(value)
    x = sorted(found)
    marker = "" if len(x) > 2 else "o"
    return Line(x, [found[each] for each in x], {**style, "marker": marker}, name=name)


def _over_widths(record: StudyRecord, wanted: WidthLine, number: int) -> list[Line]:
    """Ours, and the paper's where there is one."""
    runs = {width: _best_runs(record, wanted.scheme, width) for width in record.widths}
    values = [_values(found, record.metric) for found in runs.values()]
    lost = [width for width, found in runs.items() if not found]
    lines = [Line(list(runs), values, _solid(number), number, lost)]
    if wanted.paper:
        dotted = {**_solid(number), "linestyle": ":", "markerfacecolor": "white"}
        paper = dict(sorted(wanted.paper.items()))
        lines.append(Line(list(paper), [(value,) for value in paper.values()], dotted, number))
    return lines


def _scheme(record: StudyRecord, wanted: str | None) -> str | None:
    """In the study's own spelling; None if no run of it has ended."""
    fits = (each for each in record.schemes if wanted in (None, each) or each.startswith(f"{wanted}/"))
    return next(fits, None)


def _best_runs(record: StudyRecord, wanted: str | None, width: float) -> list[Result]:
    """All seeds of a width's best setting; none if nothing finished."""
    scheme = _scheme(record, wanted)
    if scheme is None:
        return []
    try:
        config = record.best(scheme, width)
    except StudyError:
        return []
    here = (config.lr, getattr(config.damping, "rho", None))
    return [run for run in select(record, scheme, width) if (run.point.lr, run.point.damping or here[1]) == here]


def _values(runs: Sequence[Result], metric: str) -> list[float]:
    return [value for run in runs if (value := run.value(metric)) is not None and math.isfinite(value)]


def _column(row: EpochRow, pattern: str) -> float | None:
    """The mean of all columns that it fits."""
    found = [value for name, value in row.items() if _fits(name, pattern)]
    there = [value for value in found if value is not None and math.isfinite(value)]
    return fmean(there) if there else None


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, f"{pattern}*" if pattern.endswith("/") else pattern)


# Coordinate checks.


def checks(panels: Sequence[Sequence[Panel]], reading: Reading = FEATURES) -> DrawFunction:
    """The size of each layer's change against the width, after the last step; the legend says the fitted exponent."""

    @styled
    def draw(evidence: Evidence) -> Figure:
        records = [[evidence.check(panel.part).record for panel in row] for row in panels]
        found = [[_layers(record, reading) for record in row] for row in records]
        every = [layers for row in found for layers in row]
        columns = 2 if all(len(each.layer) <= 8 for layers in every for each in layers) else 1
        most = max(min(MOST_LAYERS, len(layers)) for layers in every)
        figure, axes = panel_axes(panels, share=True, height=2.85 + 0.15 * -(-most // columns))
        for row, places, of_row, verdicts in zip(panels, axes, records, found, strict=True):
            for panel, place, record, layers in zip(row, places, of_row, verdicts, strict=False):
                shown = _some(layers)
                handles = [_layer(place, record, reading, each, number) for number, each in enumerate(shown)]
                widths_axis(place, record.widths)
                set_title(place, panel.title, "width")
                few = "" if len(shown) == len(layers) else f"{len(shown)} of {len(layers)} layers"
                legend_beneath(place, columns, handles, few)
            places[0].set_ylabel(reading.caption)
            for place in places[: len(row)]:
                sizes_axis(place)
        return figure

    return draw


def _layer(place: Axes, record: Record, reading: Reading, verdict: Verdict, number: int) -> Any:
    """The mean over the seeds, and each seed a dot. Returns the line."""
    rows = [row for row in record.select(reading.quantity, verdict.layer) if 0 < row.value < math.inf]
    widths = sorted({row.width for row in rows})
    means = [fmean(row.value for row in rows if row.width == width) for width in widths]
    slope = verdict.word if verdict.measured is None else f"{round(verdict.measured.slope, 2) + 0.0:+.2f}"  # no -0.00
    style = line(number)
    place.scatter([row.width for row in rows], [row.value for row in rows], s=6, color=style["color"], alpha=0.5)
    return place.plot(widths, means, label=f"{verdict.layer} {slope}", **style)[0]


def _layers(record: Record, reading: Reading) -> list[Verdict]:
    """In the order of the forward pass; the output once, where it is a layer's too."""
    names = record.layers(reading.quantity)
    values = {name: [row.value for row in record.select(reading.quantity, name)] for name in names}
    twice = values.pop(OUTPUT, None) in values.values()
    return [each for each in judge(record, reading) if each.layer != OUTPUT or not twice]


def _some(layers: Sequence[Verdict]) -> list[Verdict]:
    """From the first to the last, no more than can be told apart."""
    few = min(MOST_LAYERS, len(layers))
    return [layers[round(number * (len(layers) - 1) / max(1, few - 1))] for number in range(few)]


# Numbers and words in cells.


def heat(
    make: Callable[[Evidence], HeatCells], x: str, y: str, title: str = "", lowest: bool = False, form: str = ".3g"
) -> DrawFunction:
    """A number in every cell, the best one framed, grey where there is none.

    x, y: what the axes are called. lowest: whether low numbers are the good ones. form: of the numbers, as in ".1%".
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        across, down, rows = make(evidence)
        figure, axes = figures.panels(1, 1, size=(max(2.4, 1.1 + 0.55 * len(across)), 1.0 + 0.36 * len(down)))
        place = axes[0, 0]
        _map(place, rows, lowest, form)
        place.set_xticks([number + 0.5 for number in range(len(across))], across)
        place.set_yticks([number + 0.5 for number in range(len(down))], down)
        place.set(title=title, xlabel=x, ylabel=y)
        return figure

    return draw


def _map(place: Axes, rows: Sequence[Sequence[float]], lowest: bool, form: str) -> None:
    from matplotlib.patches import Rectangle

    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in rows]
    cells = [(value, column, row) for row, values in enumerate(shown) for column, value in enumerate(values)]
    there = [each for each in cells if not math.isnan(each[0])]
    low, high = (end((value for value, *_ in there), default=0.0) for end in (min, max))
    colours = "viridis_r" if lowest else "viridis"
    place.pcolormesh(shown, cmap=colours, vmin=low, vmax=high, edgecolors="white", linewidth=0.5)
    place.invert_yaxis()
    place.set_facecolor("#E6E6E6")
    place.grid(visible=False)
    for value, column, row in cells:
        light = math.isnan(value) or ((value - low) / ((high - low) or 1.0) > 0.5) != lowest
        text = "-" if math.isnan(value) else format(value, form)
        place.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", color="black" if light else "white", size=7.5
        )
    for value, column, row in there:
        if value == (low if lowest else high):
            place.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2, zorder=3))


def table(make: Callable[[Evidence], Table]) -> DrawFunction:
    """A table as a figure."""

    @styled
    def draw(evidence: Evidence) -> Figure:
        from matplotlib.figure import Figure as Blank

        made = make(evidence)
        widths = [LETTER * (2 + max(map(len, cells))) for cells in zip(made.columns, *made.rows, strict=True)]
        wide = max(4.0, sum(widths))
        title = wrap(made.title, int(wide / LETTER))
        notes = [part for note in made.notes for part in wrap(note, int(wide / (0.8 * LETTER)))]
        top = ROW * (len(title) + 0.3)
        bottom = top + ROW * (1 + len(made.rows))
        high = bottom + NOTE * (len(notes) + 0.5)
        figure = Blank(figsize=(wide, high))
        place = figure.add_axes((0, 0, 1, 1))
        place.set(xlim=(0, wide), ylim=(high, 0))  # inches, from the upper left corner
        place.axis("off")

        def write(x: float, y: float, text: str, **style: Any) -> None:
            place.text(x, y, text, va="center", parse_math=False, **style)

        for number, part in enumerate(title):
            write(0, ROW * (number + 0.5), part, fontsize=10)
        for number, cells in enumerate((made.columns, *made.rows)):
            for column, cell in enumerate(cells):
                y = top + ROW * (number + 0.5)
                write(sum(widths[:column]), y, cell, fontweight="normal" if number else "bold")
        for y in (top, top + ROW, bottom):
            place.axhline(y, color=GREY, linewidth=0.8)
        for number, part in enumerate(notes):
            write(0, bottom + NOTE * (number + 1), part, fontsize=8, color=GREY)
        return figure

    return draw
