"""The figure of the stability matrix: a row for each row of the matrix, a column for each refresh interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mukron.bench.stability.result import StabilityFinding, StabilityResult
from mukron.bench.stability.rule import times_text
from mukron.figures import panels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HeatMeasure = Callable[[StabilityFinding, int], float]
MOST = 10.0  # times; all above has the same colour
MEASURES: dict[str, HeatMeasure] = {
    "largest / initial loss": lambda finding, every: finding.outcomes[every].growth,
    "final loss / every 1": lambda finding, every: finding.ratio(every),
}


def draw_stability(result: StabilityResult, path: Path, endings: Sequence[str] = (".svg", ".png")) -> list[Path]:
    """Draw a heat map of the matrix: two panels for each kind of settings, one for each measure.

    Args:
        result: The result to draw.
        path: Where to write; the ending is replaced.
        endings: The file types to write.

    Returns:
        The files written; none if the result has no rows.
    """
    return save(_figure(result), path, endings) if result.findings() else []


@styled
def _figure(result: StabilityResult) -> Figure:
    findings = result.findings()
    settings = list(dict.fromkeys(finding.row.settings for finding in findings))
    rows = list(dict.fromkeys(finding.row._replace(settings="") for finding in findings))
    intervals = sorted({every for finding in findings for every in finding.outcomes})
    names = [(setting, measure) for setting in settings for measure in MEASURES]
    labels = 3.0 / len(names)  # inches for the names of rows and the colour bar, shared by all panels
    size = (1.0 + labels + 0.34 * len(intervals), 1.5 + 0.16 * len(rows))
    figure, axes = panels(1, len(names), size=size, sharey=True)
    image: Any = None
    for axis, (setting, measure) in zip(axes[0], names, strict=True):
        found = {f.row._replace(settings=""): f for f in findings if f.row.settings == setting}
        image = _heat_map(axis, [found.get(row) for row in rows], intervals, MEASURES[measure])
        axis.set_title(f"{setting}\n{measure}", fontsize=7)
    axes[0, 0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=6)
    figure.colorbar(image, ax=list(axes[0]), shrink=min(1.0, 20 / len(rows)), label="times", extend="max")
    return figure


def _heat_map(
    axis: Axes, findings: Sequence[StabilityFinding | None], intervals: Sequence[int], measure: HeatMeasure
) -> Any:
    from matplotlib.colors import LogNorm

    values = [
        [measure(f, every) if f is not None and every in f.outcomes else float("nan") for every in intervals]
        for f in findings
    ]
    clipped = [[min(max(value, 1.0), MOST) for value in row] for row in values]
    image = axis.imshow(clipped, norm=LogNorm(1.0, MOST), cmap="YlOrRd", aspect="auto")
    for place, row in enumerate(values):
        for column, value in enumerate(row):
            if value == value:
                text = "inf" if value == inf else times_text(value).rstrip("x").replace("e+", "e")
                colour = "white" if value > 5 else "black"
                axis.text(column, place, text, ha="center", va="center", fontsize=4.5, color=colour)
    axis.set_xticks(range(len(intervals)), [str(every) for every in intervals], fontsize=7)
    axis.set_xlabel("refresh every", fontsize=7)
    axis.grid(visible=False)
    return image
