"""Ctrl-C that waits for the step under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Stopped = Callable[[], bool]  # whether the work was asked to stop


@contextmanager
def interruptible(*, terminate: bool = False, patient: bool = False) -> Iterator[Stopped]:
    """Turn Ctrl-C into a question that the work asks between two steps, so that no step is cut in two.

    A second Ctrl-C acts as it did before. Blocks may be nested: the handler that was there before is called too, so a
    study stops even if the run that was interrupted has just finished its last step. Outside the main thread, where
    Python delivers no signals, the answer is always no.

    Args:
        terminate: Listen to SIGTERM too, and to SIGINT even where it is ignored. A shell without job control starts
            background processes with SIGINT ignored, and their workers inherit that.
        patient: A second signal changes nothing. torchrun and schedulers send the same one twice, and kill in the end.

    Yields:
        A function that returns whether Ctrl-C was pressed.

    Example:
        >>> with interruptible() as stopped:
        ...     print(stopped())
        False
    """
    pressed = False
    before = signal.getsignal(signal.SIGINT)
    ignored = before in (signal.SIG_IGN, None)
    if threading.current_thread() is not threading.main_thread() or (ignored and not terminate):
        yield lambda: False
        return

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        if patient:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler if ignored else before)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    signal.signal(signal.SIGINT, press)
    before_term = signal.getsignal(signal.SIGTERM)
    if terminate:
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before_term is None else before_term)
