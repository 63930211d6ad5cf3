"""A lock on a file or folder that all processes of a machine share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock on a path. It goes with its process, however that ends.

    Where the system has no such locks (it is not a Unix), nothing is locked, and one process must do.

    Args:
        path: A folder, or a file, which is created if it does not exist.
        wait: Whether to wait for a process that holds the lock.
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
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(handle)
