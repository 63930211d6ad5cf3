"""The progress display of commands, on stderr: a bar on a terminal, lines elsewhere. Results go to stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 10.0  # without a terminal
BAR, COUNT, TIME_LEFT = "bar", "count", "time left"  # columns that are not text


class Bar:
    """A progress bar.

    Attributes:
        console: Where to print lines above the bar.
        live: Whether it is shown: only on a terminal.
    """

    def __init__(self, progress: Progress, description: str, **fields: Any) -> None:
        self._progress, self.console, self.live = progress, progress.console, not progress.disable
        self._task = progress.add_task(description, total=None, **fields)

    def update(self, done: float, total: float, **fields: Any) -> None:
        """Set the progress to ``done`` of ``total``; ``fields`` are values for the text columns."""
        self._progress.update(self._task, completed=done, total=total, **fields)


@contextmanager
def shown_bar(*columns: str, description: str = "", **fields: Any) -> Iterator[Bar]:
    """Show a bar until the block ends.

    Args:
        columns: BAR, COUNT, TIME_LEFT, or a text with Rich's fields, as in "{task.description}".
        description: The text to start with.
        fields: What the texts show until the first update.

    Yields:
        The bar, to be updated.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    kinds: dict[str, Any] = {BAR: BarColumn, COUNT: MofNCompleteColumn, TIME_LEFT: TimeRemainingColumn}
    shown = [kinds[column]() if column in kinds else TextColumn(column) for column in columns]
    console = Console(stderr=True)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, description, **fields)


def clock(seconds: float) -> str:
    """Format a duration: 3725 -> "1:02:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
