"""Figures of recipes: each public function returns a function from the evidence to a figure.

They draw whatever the evidence holds: there is a figure even if no run finished, or with a single width or seed.
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
from mukron.paper.evidence import Evidence
from mukron.paper.panels import (
    GREY,
    LEVEL,
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
from mukron.study.curves import AXES
from mukron.study.errors import StudyError
from mukron.study.numbers import best, metric_label, profile, select
from mukron.study.panels import mark_handles
from mukron.study.points import Result
from mukron.study.record import StudyRecord
from mukron.table import Table
from mukron.train.rows import EpochRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawFunction = Callable[[Evidence], "Figure"]
Colours = Mapping[float, str]  # by width
# Labels of the x axis and of the y axis, and a row of numbers for each y label.
HeatCells = tuple[Sequence[str], Sequence[str], Sequence[Sequence[float]]]
MOST_LAYERS = 8  # layers in a panel of a coordinate check
LETTER_INCHES, ROW_INCHES, NOTE_INCHES = 0.085, 0.24, 0.16  # sizes in a table: a letter's width, heights of lines


@dataclass(frozen=True)
class Panel:
    """A panel that shows one scheme of a part.

    Attributes:
        title: The panel's title.
        part: The part's name.
        scheme: The scheme or its beginning, as in "sp"; None for the first.
        quantity: What is drawn over epochs, if panels differ in it.

    Example:
        >>> Panel("AdamW, muP", "muP").part
        'muP'
    """

    title: str
    part: str
    scheme: str | None = None
    quantity: str | None = None


@dataclass(frozen=True)
class ExponentPanel:
    """A panel over exponents of the output layer.

    Attributes:
        title: The panel's title.
        parts: The part's name by exponent.
        scheme: The scheme or its beginning; None for the first.

    Example:
        >>> ExponentPanel("K-FAC", {0.5: "K-FAC, b_L = 0.5", 1.0: "K-FAC, b_L = 1"}).parts[1.0]
        'K-FAC, b_L = 1'
    """

    title: str
    parts: Mapping[float, str]
    scheme: str | None = None


@dataclass(frozen=True)
class ComparedPanel:
    """A panel that shows several parts, one line each.

    Attributes:
        title: The panel's title.
        parts: The part's name by the line's.

    Example:
        >>> ComparedPanel("K-FAC", {"b_L = 1": "K-FAC, b_L = 1"}).title
        'K-FAC'
    """

    title: str
    parts: Mapping[str, str]


@dataclass(frozen=True)
class WidthLine:
    """A line of the best value of each width.

    Attributes:
        label: The line's name in the legend.
        part: The part's name.
        scheme: The scheme or its beginning; None for the first.
        paper: What the paper prints, by width and in the metric's unit: 0.6496, not 64.96.
    """

    label: str
    part: str
    scheme: str | None = None
    paper: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WidthPanel:
    """A panel of lines over the width.

    Attributes:
        title: The panel's title.
        lines: The lines.

    Example:
        >>> WidthPanel("ResNet-18", [WidthLine("muP", "muP", paper={1.0: 0.67})]).lines[0].label
        'muP'
    """

    title: str
    lines: Sequence[WidthLine]


# Studies.


def transfer(panels: Sequence[Sequence[Panel]], axis: str = "lr") -> DrawFunction:
    """Draws the metric against learning rate or damping: one line per width, a star at its best, crosses at diverged.

    Args:
        panels: Rows of panels.
        axis: "lr" or "damping".

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        figure, axes = panel_axes(panels, share=True)
        colours = [colours_of(evidence.study(panel.part) for panel in row) for row in panels]
        all_lines: list[Line] = []
        for row, axes_row, colour in zip(panels, axes, colours, strict=True):
            records, content = [evidence.study(panel.part) for panel in row], []
            for panel, ax, record in zip(row, axes_row, records, strict=False):
                powers_axis(ax, "x")
                set_title(ax, panel.title, AXES[axis])
                content.append(_over_settings(record, panel.scheme, axis, colour))
                all_lines += content[-1]
            fill_metric(axes_row[: len(row)], records, content, cut=True)
        marks = mark_handles(any(drawn.star for drawn in all_lines), any(drawn.unfinished for drawn in all_lines))
        width_legends(figure, axes, panels, colours, marks)
        return figure

    return draw


def over_exponent(
    panels: Sequence[ExponentPanel], second: str | None = None, share: bool = True, level: str | None = None
) -> DrawFunction:
    """Draws the best of each width against the exponent of the output layer.

    Args:
        panels: The panels.
        second: Another metric at the best setting, drawn dashed.
        share: Whether all panels of a row have one y axis.
        level: A part whose best value is drawn across all panels.

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        rows = panel_rows(panels)
        figure, axes = panel_axes(rows, share)
        records = [[[evidence.study(part) for part in panel.parts.values()] for panel in row] for row in rows]
        flat = [record for row in records for records_of_row in row for record in records_of_row]
        colours = colours_of(flat)
        all_lines: list[Line] = []
        for row, axes_row, records_of_row in zip(rows, axes, records, strict=True):
            content = []
            for panel, ax, panel_records in zip(row, axes_row, records_of_row, strict=False):
                content.append(_over_exponents(panel_records, panel.scheme, colours, second))
                ax.set_xticks(range(len(panel_records)), ["∞" if math.isinf(b) else f"{b:g}" for b in panel.parts])
                ax.set_xlim(-0.4, len(panel_records) - 0.6)
                set_title(ax, panel.title, "$b_L$, exponent of the output layer")
                all_lines += content[-1]
            for group in axis_groups(share, len(row)):
                fill_metric(
                    axes_row[group],
                    [record for panel_records in records_of_row[group] for record in panel_records],
                    content[group],
                    levels=_levels(evidence, level),
                )
        marks = mark_handles(star=False, cross=any(drawn.unfinished for drawn in all_lines))
        if second is not None:
            marks = [
                legend_handle(metric_label(flat[0].metric)),
                legend_handle(metric_label(second), linestyle="--"),
                *marks,
            ]
        marks += [legend_handle(level, **LEVEL)] if level is not None else []
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
    """Draws a quantity of each width's best setting over the epochs: one line per width.

    Args:
        panels: Rows of panels. A panel's ``quantity``, which may be a metric, has priority over the arguments; panels
            of a row that differ in it have y axes of their own.
        quantity: A recorded quantity of one layer, as "distance/fc1.weight", or the mean of several, as "distance/"
            or "mean/*.A"; its axis is logarithmic.
        metric: A loss or an accuracy; the study's metric if neither is given.
        against: The x axis, "epoch" or "step".
        label: The y label of a quantity.

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        share = all(len({panel.quantity for panel in row}) == 1 for row in panels)
        figure, axes = panel_axes(panels, share)
        colours = [colours_of(evidence.study(panel.part) for panel in row) for row in panels]
        for row, axes_row, colour in zip(panels, axes, colours, strict=True):
            records, content = [evidence.study(panel.part) for panel in row], []
            columns = [
                panel.quantity or quantity or metric or record.metric
                for panel, record in zip(row, records, strict=True)
            ]
            for panel, ax, record, column in zip(row, axes_row, records, columns, strict=False):
                content.append(_over_rows(record, panel.scheme, column, against, colour))
                whole_number_axis(ax, content[-1])
                set_title(ax, panel.title, against)
            for group in axis_groups(share, len(row)):
                _fill_column(axes_row[group], records[group], content[group], columns[group], label)
        width_legends(figure, axes, panels, colours)
        return figure

    return draw


def compared_over_epochs(panels: Sequence[ComparedPanel], level: str | None = None) -> DrawFunction:
    """Draws the metric of several parts over the epochs in one panel, each at the best setting of its widest network.

    Args:
        panels: The panels.
        level: A part whose best value is drawn across all panels.

    Returns:
        A function from the evidence to the figure.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.parts))
    colours = {name: line(number)["color"] for number, name in enumerate(names)}

    @styled
    def draw(evidence: Evidence) -> Figure:
        figure, axes = panel_axes([panels], share=True)
        records: list[StudyRecord] = []
        content: list[list[Line]] = []
        for panel, ax in zip(panels, axes[0], strict=True):
            content.append([])
            for name, part in panel.parts.items():
                record = evidence.study(part)
                rows = [row for run in _best_runs(record, None, max(record.widths)) for row in run.rows]
                content[-1].append(_line_of(rows, record.metric, "epoch", {"color": colours[name]}, name))
                records.append(record)
            whole_number_axis(ax, content[-1])
            set_title(ax, panel.title, "epoch")
        fill_metric(axes[0], records, content, levels=_levels(evidence, level))
        marks = [legend_handle(name, color=colour) for name, colour in colours.items()]
        legend_below(figure, [*marks, *([legend_handle(level, **LEVEL)] if level is not None else [])])
        return figure

    return draw


def _levels(evidence: Evidence, part: str | None) -> list[float]:
    """Returns the best value of a part, if there is one."""
    if part is None:
        return []
    record = evidence.study(part)
    values = _values(record.results, record.metric)
    return [fmean(values)] if values else []


def layers_over_epochs(panels: Sequence[Sequence[Panel]], against: str = "epoch", label: str = "") -> DrawFunction:
    """Draws the panels' quantities over the epochs for the widest network: one line per layer.

    Args:
        panels: Rows of panels with a quantity, as "mean/*.A".
        against: The x axis, "epoch" or "step".
        label: The y label.

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        figure, axes = panel_axes(panels, share=False)
        for row, axes_row in zip(panels, axes, strict=True):
            for number, panel in enumerate(row):
                content = _over_layers(evidence.study(panel.part), panel, against)
                whole_number_axis(axes_row[number], content)
                set_title(axes_row[number], panel.title, against)
                fill_sizes(
                    axes_row[number : number + 1], [content], label or metric_label(panel.quantity or "").split("/")[0]
                )
        marks = [legend_handle(text, color=shade(end, 2)) for end, text in enumerate(("first layer", "last layer"))]
        legend_below(figure, marks)
        return figure

    return draw


def best_over_width(panels: Sequence[WidthPanel]) -> DrawFunction:
    """Draws the best of each width against the width, and dotted what the paper prints.

    Args:
        panels: The panels, each with its own y axis.

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        rows = panel_rows(panels)
        figure, axes = panel_axes(rows, share=False)
        axes_row = [ax for row, of_row in zip(rows, axes, strict=True) for ax in of_row[: len(row), None]]
        diverged = False
        for panel, ax in zip(panels, axes_row, strict=True):
            records = [evidence.study(entry.part) for entry in panel.lines]
            content = [
                entry
                for number, (width_line, record) in enumerate(zip(panel.lines, records, strict=True))
                for entry in _over_widths(record, width_line, number)
            ]
            if widths := [width for entry in content for width in entry.x]:
                widths_axis(ax[0], widths)
            set_title(ax[0], panel.title, "width")
            fill_metric(ax, records, [content])
            diverged = diverged or any(entry.unfinished for entry in content)
        marks = mark_handles(star=False, cross=diverged)
        if any(entry.paper for panel in panels for entry in panel.lines):
            marks.insert(0, legend_handle("the paper", linestyle=":", marker="o", markerfacecolor="white"))
        names = [[entry.label for entry in panel.lines] for panel in panels]
        if all(entry == names[0] for entry in names):
            marks = [*_named(names[0]), *marks]
        else:
            for ax, labels in zip(axes_row, names, strict=True):
                legend_beneath(ax[0], 2, _named(labels))
        legend_below(figure, marks)
        return figure

    return draw


def _named(labels: Sequence[str]) -> list[Any]:
    return [legend_handle(label, **_solid(number)) for number, label in enumerate(labels)]


def _solid(number: int) -> dict[str, Any]:
    return {**line(number), "linestyle": "-"}


def _over_settings(record: StudyRecord, scheme_name: str | None, axis: str, colours: Colours) -> list[Line]:
    scheme = _scheme(record, scheme_name)
    if scheme is None:
        return []
    lines = []
    for number, (width, colour) in enumerate(colours.items()):
        profile_settings = profile(record, axis, scheme, width)
        best_setting = best(profile_settings, record.metric)
        lines.append(
            Line(
                [setting.at(axis) for setting in profile_settings],
                [setting.values if setting.whole else () for setting in profile_settings],
                {"color": colour, "marker": "o", "markersize": 3},
                number,
                [setting.at(axis) for setting in profile_settings if setting.diverged],
                (best_setting.at(axis), best_setting.mean) if best_setting else None,
            )
        )
    return lines


def _over_exponents(
    records: Sequence[StudyRecord], scheme: str | None, colours: Colours, second: str | None
) -> list[Line]:
    """Returns one line per width over the studies' positions, and another for a second metric."""
    lines = []
    for number, (width, colour) in enumerate(colours.items()):
        runs = {x: _best_runs(record, scheme, width) for x, record in enumerate(records) if width in record.widths}
        values = [_values(seeds, records[x].metric) for x, seeds in runs.items()]
        unfinished = [x for x, seeds in runs.items() if not seeds]
        lines.append(Line(list(runs), values, {"color": colour, "marker": "o"}, number, unfinished))
        if second is not None:
            style = {"color": colour, "marker": "o", "markerfacecolor": "white", "linestyle": "--"}
            lines.append(Line(list(runs), [_values(seeds, second) for seeds in runs.values()], style, number))
    return lines


def _over_rows(record: StudyRecord, scheme: str | None, column: str, against: str, colours: Colours) -> list[Line]:
    lines = []
    for width in record.widths:
        rows = [row for run in _best_runs(record, scheme, width) for row in run.rows]
        lines.append(_line_of(rows, column, against, {"color": colours[width]}, f"{width:g}"))
    return lines


def _fill_column(
    axes_row: Any, records: Sequence[StudyRecord], content: Sequence[Sequence[Line]], columns: Sequence[str], label: str
) -> None:
    """Draws a metric on its own axis; quantities of probes, QUANTITY/LAYER, go on a logarithmic axis."""
    if all("/" in column and not column.startswith("words/") for column in columns):
        fill_sizes(axes_row, content, label or metric_label(columns[0].strip("/*")))
    else:
        fill_metric(
            axes_row, [replace(record, metric=column) for record, column in zip(records, columns, strict=True)], content
        )


def _over_layers(record: StudyRecord, panel: Panel, against: str) -> list[Line]:
    """Returns one line per layer, light for the first and dark for the last."""
    rows = [row for run in _best_runs(record, panel.scheme, max(record.widths, default=0.0)) for row in run.rows]
    columns = list(dict.fromkeys(name for row in rows for name in row if _fits(name, panel.quantity or "*/*")))
    lines = []
    for number, column in enumerate(columns):
        style = {"color": shade(number, len(columns)), "linewidth": 1.0}
        lines.append(_line_of(rows, column, against, style))
    return lines


def _line_of(rows: Iterable[EpochRow], column: str, against: str, style: dict[str, Any], name: str = "") -> Line:
    """Returns a column's line over the epochs, with all seeds."""
    values_at: dict[float, list[float]] = {}
    for row in rows:
        if (value := _column(row, column)) is not None:
            values_at.setdefault(row[against], []).append(value)
    x = sorted(values_at)
    marker = "" if len(x) > 2 else "o"
    return Line(x, [values_at[position] for position in x], {**style, "marker": marker}, name=name)


def _over_widths(record: StudyRecord, width_line: WidthLine, number: int) -> list[Line]:
    """Returns the measured line, and the paper's if it prints one."""
    runs = {width: _best_runs(record, width_line.scheme, width) for width in record.widths}
    values = [_values(seeds, record.metric) for seeds in runs.values()]
    unfinished = [width for width, seeds in runs.items() if not seeds]
    lines = [Line(list(runs), values, _solid(number), number, unfinished)]
    if width_line.paper:
        dotted = {**_solid(number), "linestyle": ":", "markerfacecolor": "white"}
        paper = dict(sorted(width_line.paper.items()))
        lines.append(Line(list(paper), [(value,) for value in paper.values()], dotted, number))
    return lines


def _scheme(record: StudyRecord, prefix: str | None) -> str | None:
    """Returns the scheme as the study names it, or None if none of its runs has ended."""
    fits = (name for name in record.schemes if prefix in (None, name) or name.startswith(f"{prefix}/"))
    return next(fits, None)


def _best_runs(record: StudyRecord, prefix: str | None, width: float) -> list[Result]:
    """Returns all seeds of a width's best setting; empty if no run finished."""
    scheme = _scheme(record, prefix)
    if scheme is None:
        return []
    try:
        config = record.best(scheme, width)
    except StudyError:
        return []
    best_setting = (config.lr, getattr(config.damping, "rho", None))
    return [
        run
        for run in select(record, scheme, width)
        if (run.point.lr, run.point.damping or best_setting[1]) == best_setting
    ]


def _values(runs: Sequence[Result], metric: str) -> list[float]:
    return [value for run in runs if (value := run.value(metric)) is not None and math.isfinite(value)]


def _column(row: EpochRow, pattern: str) -> float | None:
    """Returns the mean of all columns that match the pattern."""
    matching = [value for name, value in row.items() if _fits(name, pattern)]
    finite = [value for value in matching if value is not None and math.isfinite(value)]
    return fmean(finite) if finite else None


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, f"{pattern}*" if pattern.endswith("/") else pattern)


# Coordinate checks.


def checks(panels: Sequence[Sequence[Panel]], reading: Reading = FEATURES) -> DrawFunction:
    """Draws the size of each layer's change after the last step against the width, with the fitted exponents.

    Args:
        panels: Rows of panels.
        reading: The quantity of the coordinate check.

    Returns:
        A function from the evidence to the figure.
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        records = [[evidence.check(panel.part).record for panel in row] for row in panels]
        judged = [[_layers(record, reading) for record in row] for row in records]
        judged_panels = [layers for row in judged for layers in row]
        columns = 2 if all(len(verdict.layer) <= 8 for layers in judged_panels for verdict in layers) else 1
        most_layers = max(min(MOST_LAYERS, len(layers)) for layers in judged_panels)
        figure, axes = panel_axes(panels, share=True, height=2.85 + 0.15 * -(-most_layers // columns))
        for row, axes_row, of_row, verdicts in zip(panels, axes, records, judged, strict=True):
            for panel, ax, record, layers in zip(row, axes_row, of_row, verdicts, strict=False):
                shown = _evenly_spaced(layers)
                handles = [_layer(ax, record, reading, verdict, number) for number, verdict in enumerate(shown)]
                widths_axis(ax, record.widths)
                set_title(ax, panel.title, "width")
                note = "" if len(shown) == len(layers) else f"{len(shown)} of {len(layers)} layers"
                legend_beneath(ax, columns, handles, note)
            axes_row[0].set_ylabel(reading.caption)
            for ax in axes_row[: len(row)]:
                sizes_axis(ax)
        return figure

    return draw


def _layer(ax: Axes, record: Record, reading: Reading, verdict: Verdict, number: int) -> Any:
    """Draws a layer's mean over the seeds, and each seed as a dot; returns the line."""
    rows = [row for row in record.select(reading.quantity, verdict.layer) if 0 < row.value < math.inf]
    widths = sorted({row.width for row in rows})
    means = [fmean(row.value for row in rows if row.width == width) for width in widths]
    slope = verdict.word if verdict.measured is None else f"{round(verdict.measured.slope, 2) + 0.0:+.2f}"  # no -0.00
    style = line(number)
    ax.scatter([row.width for row in rows], [row.value for row in rows], s=6, color=style["color"], alpha=0.5)
    return ax.plot(widths, means, label=f"{verdict.layer} {slope}", **style)[0]


def _layers(record: Record, reading: Reading) -> list[Verdict]:
    """Returns the layers' verdicts in the order of the forward pass; the output once if it is a layer's too."""
    names = record.layers(reading.quantity)
    values = {name: [row.value for row in record.select(reading.quantity, name)] for name in names}
    twice = values.pop(OUTPUT, None) in values.values()
    return [verdict for verdict in judge(record, reading) if verdict.layer != OUTPUT or not twice]


def _evenly_spaced(layers: Sequence[Verdict]) -> list[Verdict]:
    """Returns at most ``MOST_LAYERS`` layers, evenly spaced from the first to the last."""
    count = min(MOST_LAYERS, len(layers))
    return [layers[round(number * (len(layers) - 1) / max(1, count - 1))] for number in range(count)]


# Heat maps and tables.


def heat(
    make: Callable[[Evidence], HeatCells],
    x: str,
    y: str,
    title: str = "",
    lowest: bool = False,
    form: str = ".3g",
    label: str = "",
) -> DrawFunction:
    """Draws a heat map with a number in every cell: the best is framed, cells without a number are grey.

    Args:
        make: From the evidence to the labels of both axes and the numbers.
        x: The x label.
        y: The y label.
        title: The title.
        lowest: Whether low numbers are the good ones.
        form: The format of the numbers, as in ".1%".
        label: What the colours say.

    Returns:
        A function from the evidence to the figure.

    Example:
        >>> draw = heat(lambda evidence: (["-1", "0"], ["0", "1"], [[0.1, 0.2], [0.3, 0.4]]), "$d_A$", "$d_B$")
        >>> [text.get_text() for text in draw(Evidence()).axes[0].texts]
        ['0.1', '0.2', '0.3', '0.4']
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        across, down, rows = make(evidence)
        figure, axes = figures.panels(1, 1, size=(max(3.2, 1.9 + 0.55 * len(across)), 1.0 + 0.36 * len(down)))
        ax = axes[0, 0]
        _fill_heat_map(ax, rows, lowest, form)
        ax.set_xticks([number + 0.5 for number in range(len(across))], across)
        ax.set_yticks([number + 0.5 for number in range(len(down))], down)
        ax.set(title=title, xlabel=x, ylabel=y)
        scale = figure.colorbar(ax.collections[0], ax=ax, label=label)
        scale.outline.set_visible(False)
        return figure

    return draw


def _fill_heat_map(ax: Axes, rows: Sequence[Sequence[float]], lowest: bool, form: str) -> None:
    from matplotlib.patches import Rectangle

    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in rows]
    cells = [(value, column, row) for row, values in enumerate(shown) for column, value in enumerate(values)]
    finite_cells = [cell for cell in cells if not math.isnan(cell[0])]
    low, high = (end((value for value, *_ in finite_cells), default=0.0) for end in (min, max))
    colours = "viridis_r" if lowest else "viridis"
    ax.pcolormesh(shown, cmap=colours, vmin=low, vmax=high, edgecolors="white", linewidth=0.5)
    ax.invert_yaxis()
    ax.set_facecolor("#E6E6E6")
    ax.grid(visible=False)
    for value, column, row in cells:
        light = math.isnan(value) or ((value - low) / ((high - low) or 1.0) > 0.5) != lowest
        text = "-" if math.isnan(value) else format(value, form)
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", color="black" if light else "white", size=7.5)
    for value, column, row in finite_cells:
        if value == (low if lowest else high):
            ax.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2, zorder=3))


def table(make: Callable[[Evidence], Table]) -> DrawFunction:
    """Draws a table as a figure.

    Args:
        make: From the evidence to the table.

    Returns:
        A function from the evidence to the figure.

    Example:
        >>> draw = table(lambda evidence: Table("muP", ("method", "b"), (("K-FAC", "1/2"),)))
        >>> [text.get_text() for text in draw(Evidence()).axes[0].texts]
        ['muP', 'method', 'b', 'K-FAC', '1/2']
    """

    @styled
    def draw(evidence: Evidence) -> Figure:
        from matplotlib.figure import Figure as Blank

        content = make(evidence)
        widths = [
            LETTER_INCHES * (2 + max(map(len, cells))) for cells in zip(content.columns, *content.rows, strict=True)
        ]
        wide = max(4.0, sum(widths))
        title = wrap(content.title, int(wide / LETTER_INCHES))
        notes = [part for note in content.notes for part in wrap(note, int(wide / (0.8 * LETTER_INCHES)))]
        top = ROW_INCHES * (len(title) + 0.3)
        bottom = top + ROW_INCHES * (1 + len(content.rows))
        high = bottom + NOTE_INCHES * (len(notes) + 0.5)
        figure = Blank(figsize=(wide, high))
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, wide), ylim=(high, 0))  # inches, from the upper left corner
        ax.axis("off")

        def write(x: float, y: float, text: str, **style: Any) -> None:
            ax.text(x, y, text, va="center", parse_math=False, **style)

        for number, part in enumerate(title):
            write(0, ROW_INCHES * (number + 0.5), part, fontsize=10)
        for number, cells in enumerate((content.columns, *content.rows)):
            for column, cell in enumerate(cells):
                y = top + ROW_INCHES * (number + 0.5)
                write(sum(widths[:column]), y, cell, fontweight="normal" if number else "bold")
        for y in (top, top + ROW_INCHES, bottom):
            ax.axhline(y, color=GREY, linewidth=0.8)
        for number, part in enumerate(notes):
            write(0, bottom + NOTE_INCHES * (number + 1), part, fontsize=8, color=GREY)
        return figure

    return draw
