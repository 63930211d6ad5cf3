"""The figure of a run: losses and accuracies over the epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mukron.figures import line, numbers_axis, panels, styled
from mukron.train.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {"loss": ("train_loss", "test_loss"), "accuracy": ("train_accuracy", "test_accuracy")}


@styled
def draw_run(epochs: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw a panel for losses, and one for accuracies where there are any.

    Args:
        epochs: The numbers of every epoch.
        title: The line above.

    Raises:
        RunError: No epoch has ended.
    """
    points = {
        name: [(row["epoch"], row[name]) for row in epochs if row.get(name) is not None]
        for names in CURVES.values()
        for name in names
    }
    kinds = [kind for kind, names in CURVES.items() if any(points[name] for name in names)]
    if not kinds:
        raise RunError("this run has no epoch with a loss, so there is nothing to draw")
    figure, axes = panels(1, len(kinds))
    for axis, kind in zip(axes.flat, kinds, strict=True):
        for number, name in enumerate(CURVES[kind]):
            if points[name]:
                axis.plot(*zip(*points[name], strict=True), label=name.partition("_")[0], **line(number))
        if kind == "loss":
            losses = [value for name in CURVES[kind] for _, value in points[name]]
            numbers_axis(axis, min(losses), max(losses))
        axis.set(title=kind, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure
