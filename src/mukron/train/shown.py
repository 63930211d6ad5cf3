"""How a run shows itself: its last epochs as a table, its losses as a figure, and all in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mukron.notebook import Shown
from mukron.table import Table
from mukron.train.config import RunConfig
from mukron.train.drawing import draw_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ShownRun(Shown):
    """What a run has beside its record."""

    config: RunConfig
    status: str
    epochs: Sequence[Mapping[str, Any]]
    reason: str
    seconds: float

    def table(self, most: int = 10) -> Table:
        """Returns a table of the last epochs.

        Args:
            most: The number of epochs.
        """
        rows = self.epochs[-most:]
        columns = tuple(dict.fromkeys(name for row in rows for name in row)) or ("epoch",)
        cells = tuple(tuple(_cell(row.get(name)) for name in columns) for row in rows)
        left = len(self.epochs) - len(rows)
        return Table(self._title, columns, cells, (f"{left} epochs before these.",) if left else ())

    def plot(self) -> Figure:
        """Draws losses and accuracies over the epochs; it needs matplotlib.

        Returns:
            The figure.

        Raises:
            RunError: If no epoch has ended.
            ValueError: If matplotlib is not installed.
        """
        return draw_run(self.epochs, self._title)

    @property
    def _title(self) -> str:
        config = self.config
        return f"{config.model} on {config.data}, {config.method}, {config.scheme}, width {config.width:g}"

    def _summary(self) -> list[str]:
        epochs = f"{len(self.epochs)} epoch{'' if len(self.epochs) == 1 else 's'} in {self.seconds:.3g} s"
        reason = f": {self.reason}" if self.reason else ""
        last = {
            name: value
            for name, value in (self.epochs[-1] if self.epochs else {}).items()
            if name not in ("epoch", "seconds")
        }
        numbers = ", ".join(f"{name} {_cell(value)}" for name, value in last.items())
        return [self._title, f"{self.status}, {epochs}{reason}", *([f"last epoch: {numbers}"] if numbers else [])]

    def _tables(self) -> list[Table]:
        return [self.table()] if self.epochs else []


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
