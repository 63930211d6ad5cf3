"""Progress bars of functions: on a terminal and in notebooks, nothing elsewhere. They need no other package.

A function takes ``progress``: None shows a bar, False shows nothing, and a function of the caller's is called instead.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

INTERVAL = 0.1  # seconds between two drawings
CELLS = 24  # of a bar on a terminal


@contextmanager
def progress_of_function(
    progress: Callable[..., None] | bool | None, title: str, standing: Callable[..., tuple[float, float, str]]
) -> Iterator[Callable[..., None] | None]:
    """Yield the function to call with progress, and remove the bar when the block ends.

    Of several processes, the one of rank 0 shows a bar.

    Args:
        progress: The caller's own function; False for no bar; None or True for a bar where one can be seen.
        title: What the function does.
        standing: Turns what the function reports into the work done, the whole work, and a text.

    Yields:
        The function to call; None if nobody listens.

    Example:
        >>> with progress_of_function(False, "count", lambda done: (done, 3, "")) as report:
        ...     print(report)
        None
        >>> with progress_of_function(print, "count", lambda done: (done, 3, "")) as report:
        ...     report(1)
        1
    """
    if callable(progress):
        yield progress
        return
    draw = None if progress is False or os.environ.get("RANK", "0") != "0" else _drawing()
    if draw is None:
        yield None
        return
    last = -INTERVAL

    def report(*state: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= INTERVAL:
            last = now
            draw(title, *standing(*state))

    try:
        yield report
    finally:
        draw("", 0, 0, "")


def _drawing() -> Callable[[str, float, float, str], None] | None:
    """How a bar is drawn here; None where nobody can see one. A bar without a title is removed."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        return _in_notebook()
    return _on_terminal if sys.stderr is not None and sys.stderr.isatty() else None


def _on_terminal(title: str, done: float, total: float, text: str) -> None:
    line = ""
    if title:
        full = round(CELLS * min(done / total, 1)) if total else 0
        line = f"{title} [{'#' * full}{'.' * (CELLS - full)}] {done:g}/{total:g} {text}"
    columns = shutil.get_terminal_size().columns
    sys.stderr.write(f"\r\x1b[K{line[: columns - 1]}")
    sys.stderr.flush()


def _in_notebook() -> Callable[[str, float, float, str], None]:
    """The bar is an output of the cell, which is drawn anew."""
    display, shown = sys.modules["IPython"].display, None

    def draw(title: str, done: float, total: float, text: str) -> None:
        nonlocal shown
        bar = f'<progress value="{done:g}" max="{total:g}"></progress> {done:g}/{total:g} {escape(text)}'
        page = display.HTML(f"<div>{escape(title)} {bar}</div>" if title else "")
        if shown is not None:
            shown.update(page)
        elif title:
            shown = display.display(page, display_id=True)

    return draw
