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


class TimeLeft:
    """Says how long work of many parts will still take, from how long the parts so far took.

    Args:
        parts: The number of parts.

    Example:
        >>> left = TimeLeft(parts=4)
        >>> left.part_done(now=left.begin + 60), left.part_done(now=left.begin + 120)
        ('1 of 4, about 3 min left', '2 of 4, about 2 min left')
    """

    def __init__(self, parts: int) -> None:
        self.parts, self.done, self.begin = parts, 0, time.monotonic()

    def part_done(self, now: float | None = None) -> str:
        """Count a part, and return where the work stands.

        Args:
            now: The time, as ``time.monotonic`` has it; None: this moment.
        """
        self.done += 1
        seconds = ((time.monotonic() if now is None else now) - self.begin) * (self.parts - self.done) / self.done
        left = f", about {seconds / 60:.0f} min left" if seconds >= 30 else ""
        return f"{self.done} of {self.parts}{left}"
