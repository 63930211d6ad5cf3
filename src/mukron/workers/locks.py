"""A lock on a file or folder that all processes of a machine share."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SAID_AFTER, GIVEN_UP_AFTER = 5.0, 300.0  # seconds of waiting for a lock
LONGEST_PAUSE = 0.1  # seconds between two attempts
LONGEST_COUNTED = 1.0  # seconds of waiting between two attempts: a process that was paused itself did not wait


class HeldLockError(Exception):
    """Another process holds a lock, and has not let it go for long."""


def wait_for(taken: Callable[[], bool], lock: str) -> None:
    """Try to take a lock until it is taken; say so if that lasts, and give up in the end.

    Args:
        taken: Tries, and returns whether the lock is taken now.
        lock: Its name, for messages.

    Raises:
        HeldLockError: It was held by others for ``GIVEN_UP_AFTER`` seconds.

    Example:
        >>> attempts = iter([False, True])
        >>> wait_for(lambda: next(attempts), "study.db.lock")
    """
    waited, last, pause, said = 0.0, time.monotonic(), 0.001, False
    while not taken():
        now = time.monotonic()
        waited, last = waited + min(now - last, LONGEST_COUNTED), now
        if waited > GIVEN_UP_AFTER:
            raise HeldLockError(
                f"{lock}: another process has held this lock for {waited:.0f} s; is one stopped or stuck? End it, and "
                "run the command again"
            )
        if waited > SAID_AFTER and not said:
            warnings.warn(f"{lock}: waiting for another process, which holds this lock", RuntimeWarning, stacklevel=3)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock on a path. It goes with its process, however that ends.

    Where the system has no such locks (it is not a Unix), nothing is locked, and one process must do.

    Args:
        path: A folder, or a file, which is created if it does not exist.
        wait: Whether to wait for a process that holds the lock, as ``wait_for`` does.
        shared: Whether others may hold the lock too, if they share it as well.

    Yields:
        Whether the lock is held: False if another process has it and ``wait`` is False.

    Example:
        >>> with locked(Path("lock")) as held:
        ...     print(held)
        True
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:

        def taken() -> bool:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        held = taken()
        if not held and wait:
            wait_for(taken, str(path))
            held = True
        yield held
    finally:
        os.close(handle)
