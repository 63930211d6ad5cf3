"""The figure of the GPT: a panel for each method, validation loss against what is tuned, a line for each size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mukron.bench.gpt.result import GPTResult
from mukron.bench.gpt.transfer import GPTTransfer
from mukron.figures import COLOURS, MARKERS, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_A_ROW = 4  # panels
HIGHEST_SHOWN = 0.5  # nats above the lowest loss; what lies higher has not learned more than pairs of letters
SMALLEST_WRITTEN = 2e-4  # of the numbers on an axis; smaller ones are written with powers of ten


def draw_gpt(result: GPTResult, path: Path, endings: Sequence[str] = (".svg", ".png")) -> list[Path]:
    """Draw losses against learning rates or dampings: small points are seeds, stars the best ones, by a parabola.

    Methods of which nothing would be seen, since all their losses are too high, are left out.

    Args:
        result: The result to draw.
        path: Where to write; the ending is replaced.
        endings: The file types to write.

    Returns:
        The files written; none if no method has several widths and learning rates.
    """
    transfers = result.transfers()
    return save(_figure(transfers), path, endings) if transfers else []


@styled
def _figure(transfers: Sequence[GPTTransfer]) -> Figure:
    lowest = min(map(_lowest, transfers))
    transfers = [transfer for transfer in transfers if _lowest(transfer) <= lowest + HIGHEST_SHOWN]
    sizes = sorted({(transfer.axis == "depth", size) for transfer in transfers for size in transfer.curves})
    styles = {size: (COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]) for k, size in enumerate(sizes)}
    lines = {}
    columns = min(IN_A_ROW, len(transfers))
    figure, axes = panels(-(-len(transfers) // columns), columns, size=(3.4, 2.8), sharey=True)
    for axis in axes.flat[len(transfers) :]:
        axis.set_visible(False)
    for axis, transfer in zip(axes.flat, transfers, strict=False):
        for size, curve in transfer.curves.items():
            key, label = (transfer.axis == "depth", size), f"{transfer.axis} {size}"
            colour, marker = styles[key]
            (lines[key],) = axis.plot([*curve], [*curve.values()], f"{marker}-", color=colour, label=label)
            of_seeds = [(lr, loss) for at, lr, loss in transfer.seeds if at == size]
            axis.plot(*zip(*of_seeds, strict=True), ".", color=colour, markersize=2)
            axis.plot([transfer.best(size)], [min(curve.values())], "*", color=colour, markersize=11)
        rates = sorted({lr for curve in transfer.curves.values() for lr in curve})
        axis.set_xscale("log")
        axis.set_xticks(
            rates, [f"{lr:g}" if lr >= SMALLEST_WRITTEN else f"{lr:.3g}".replace("e-0", "e-") for lr in rates]
        )
        axis.set_xticks([], minor=True)
        other_steps = any(other.method == transfer.method and other.steps != transfer.steps for other in transfers)
        axis.set_title(f"{transfer.method}, {transfer.steps} steps" if other_steps else transfer.method)
        axis.set_xlabel({"lr": "learning rate"}.get(transfer.setting, transfer.setting))
    star = axes[0, 0].plot([], [], "*", color="0.4", markersize=11, label="best, by a parabola")
    handles = [*(lines[size] for size in sizes), *star]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    axes[0, 0].set_ylim(lowest - 0.02, lowest + HIGHEST_SHOWN)
    for row in axes:
        row[0].set_ylabel("validation loss, nats per byte")
    return figure


def _lowest(transfer: GPTTransfer) -> float:
    return min(loss for curve in transfer.curves.values() for loss in curve.values())
