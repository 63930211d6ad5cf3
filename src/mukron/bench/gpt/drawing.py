"""The figure of the GPT: a panel for each method, validation loss against the learning rate, a line for each width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mukron.bench.gpt.result import GPTResult, title_of
from mukron.figures import COLOURS, MARKERS, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_gpt(result: GPTResult, path: Path, endings: Sequence[str] = (".svg", ".png")) -> list[Path]:
    """Draw losses against learning rates: small points are seeds, stars the best rates, by a parabola.

    Args:
        result: The result to draw.
        path: Where to write; the ending is replaced.
        endings: The file types to write.

    Returns:
        The files written; none if no method has several widths and learning rates.
    """
    return save(_figure(result), path, endings) if result.transfers() else []


@styled
def _figure(result: GPTResult) -> Figure:
    transfers = result.transfers()
    seeds = {(run.method, run.width, run.lr, run.seed): outcome.validation for run, outcome in result.runs.items()}
    widths = sorted({width for transfer in transfers for width in transfer.curves})
    styles = {width: (COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]) for k, width in enumerate(widths)}
    lines = {}
    figure, axes = panels(1, len(transfers), size=(3.4, 2.8), sharey=True)
    for axis, transfer in zip(axes[0], transfers, strict=True):
        for width, curve in transfer.curves.items():
            colour, marker = styles[width]
            (lines[width],) = axis.plot([*curve], [*curve.values()], f"{marker}-", color=colour, label=f"width {width}")
            for (method, at, lr, _), loss in seeds.items():
                if title_of(method) == transfer.method and at == width:
                    axis.plot([lr], [loss], ".", color=colour, markersize=2)
            axis.plot([transfer.best(width)], [min(curve.values())], "*", color=colour, markersize=11)
        rates = sorted({lr for curve in transfer.curves.values() for lr in curve})
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{lr:g}" for lr in rates])
        axis.set_xticks([], minor=True)
        axis.set_title(transfer.method)
        axis.set_xlabel("learning rate")
    star = axes[0, 0].plot([], [], "*", color="0.4", markersize=11, label="best rate, by a parabola")
    handles = [*(lines[width] for width in widths), *star]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    axes[0, 0].set_ylabel("validation loss, nats per byte")
    return figure
