"""Reports of progress, not more often than a reader can follow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Throttle:
    """Tells when the next report is due.

    Args:
        seconds: The least time between two reports.
        at_once: Whether the first report is due at once, or after ``seconds``.

    Example:
        >>> throttle = Throttle(seconds=60)
        >>> throttle.due(), throttle.due()
        (True, False)
    """

    def __init__(self, seconds: float, *, at_once: bool = True) -> None:
        self.seconds = seconds
        self._last = -math.inf if at_once else time.monotonic()

    def due(self, now: bool = False) -> bool:
        """Return whether a report is due, and count it as given if it is.

        Args:
            now: Makes it due.
        """
        time_now = time.monotonic()
        if not now and time_now - self._last < self.seconds:
            return False
        self._last = time_now
        return True


class Reporter(Generic[T]):
    """Passes on where the work stands. Called often, by work that need not know whether anybody listens.

    Args:
        progress: Receives the reports; None if nobody listens.
        standing: Says where the work stands. It may read a storage, so it is called for due reports alone.
        seconds: The least time between two reports.

    Example:
        >>> report = Reporter(print, lambda: "half done", seconds=60)
        >>> report()
        half done
        >>> report()
    """

    def __init__(self, progress: Callable[[T], None] | None, standing: Callable[[], T], seconds: float) -> None:
        self.progress, self.standing, self.throttle = progress, standing, Throttle(seconds)

    def __call__(self, now: bool = False) -> None:
        """Report if it is time to; at once if ``now``."""
        if self.progress is not None and self.throttle.due(now):
            self.progress(self.standing())
            self.throttle.due(now=True)  # the time that the report itself took does not count
