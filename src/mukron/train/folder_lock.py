"""The lock on a run's folder: one process trains there, or one group of processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mukron.train.errors import RunError, writing
from mukron.workers.launch import restarted
from mukron.workers.locks import locked

WAIT_FOR_KILLED = 30.0  # seconds
POLL_LOCK = 0.1  # seconds between two attempts


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Create a folder and lock it for this process; the lock ends with the process, however that ends.

    Processes that torchrun has started again wait a while for the end of those before them.

    Args:
        path: The folder.

    Raises:
        RunError: Another process holds the lock, or the folder cannot be created.
    """
    with writing(path):
        created = not path.exists()
        if path.is_file():
            raise RunError(f"{path}: is a file; a run needs a folder")
        path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        _lock(path, stack)
        try:
            yield
        finally:
            if created:
                with suppress(OSError):
                    path.rmdir()  # a run that could not begin leaves no empty folder


def _lock(path: Path, stack: ExitStack) -> None:
    end = time.monotonic() + (WAIT_FOR_KILLED if restarted() else 0)
    while not _locked_now(path, stack):
        if time.monotonic() >= end:
            raise RunError(f"{path}: another process is training there; wait for it or choose a folder")
        time.sleep(POLL_LOCK)


def _locked_now(path: Path, stack: ExitStack) -> bool:
    try:
        return stack.enter_context(locked(path, wait=False))
    except OSError:  # a file system without locks
        return True
