"""The figure: bytes that arrive on a rank, over the batch, for each width and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mukron.bench.communication.ranks import ALL_REDUCED, AS_IT_IS, EMPIRICAL, SGD
from mukron.bench.communication.result import CommunicationResult
from mukron.figures import line, panels, save, sizes_axis, styled, widths_axis
from mukron.optim.communication import BY_TIME, WAYS
from mukron.optim.ranked_run import DDP, PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = (  # label, optimizer, who averages gradients, how curvature travels
    (SGD, SGD, DDP, ""),
    (ALL_REDUCED, ALL_REDUCED, DDP, ""),
    *((f"K-FAC, {way}", AS_IT_IS, PLAIN, way) for way in (*WAYS, BY_TIME)),
    (f"K-FAC, empirical, {BY_TIME}", EMPIRICAL, PLAIN, BY_TIME),
)


def draw_communication(result: CommunicationResult, path: Path, endings: Sequence[str] = (".svg",)) -> list[Path]:
    """Draw bytes over the batch: K-FAC that averages gradients itself, by default and empirical, beside SGD.

    Args:
        result: What was counted.
        path: Where to write, without the ending.
        endings: The file types to write.

    Returns:
        The files.
    """
    return save(_figure(result), path, endings)


@styled
def _figure(result: CommunicationResult) -> Figure:
    widths, ranks = sorted({step.width for step in result.steps}), sorted({step.ranks for step in result.steps})
    figure, axes = panels(len(ranks), len(widths), size=(3.4, 2.5), sharey="col")
    for row, k in enumerate(ranks):
        for column, width in enumerate(widths):
            _panel(axes[row, column], result, k, width)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _panel(axis: Axes, result: CommunicationResult, ranks: int, width: int) -> None:
    here = [step for step in result.steps if (step.ranks, step.width) == (ranks, width)]
    for number, (label, *kind) in enumerate(LINES):
        points = {
            step.batch: step.bytes / 2**20
            for step in here
            if [step.optimizer, step.averaged, step.communication] == kind
        }
        style = line(number) | ({"color": "black", "linestyle": "--"} if label == SGD else {})
        axis.plot(list(points), list(points.values()), label=label, **style)
    widths_axis(axis, sorted({step.batch for step in here}))
    axis.set_xlabel("batch")
    sizes_axis(axis)
    axis.set_title(f"width {width}, {ranks} ranks")
    axis.set_ylabel("MiB on a rank in a step")
