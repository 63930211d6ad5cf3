"""Functions called in several processes at once, for work that has no state on disk of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

import torch

from mukron.workers.machine import cores

T = TypeVar("T")


class WorkerPool:
    """Calls functions in so many processes; with one worker, in this process.

    Ctrl-C ends the workers at once: what they were at is lost, and what has come back is not.

    Args:
        workers: The number of processes. Each has its part of the cores.

    Example:
        >>> with WorkerPool(workers=1) as pool:
        ...     found = []
        ...     pool.for_each([2, 3], lambda base: found.append(pool.call(pow, base, 2)))
        >>> found
        [4, 9]
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        if self.workers > 1:
            threads = max(1, cores() // self.workers)
            self._processes = ProcessPoolExecutor(self.workers, get_context("spawn"), _begin, (threads,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)
            self._processes = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a module in a worker, and wait for what it returns.

        Args:
            function: The function.
            arguments: Its arguments.

        Returns:
            What it returned.
        """
        if self._processes is None:
            return function(*arguments)
        return self._processes.submit(function, *arguments).result()

    def for_each(self, items: Iterable[T], work: Callable[[T], None]) -> None:
        """Do something for every item: as many items at once as there are workers. The first error ends it.

        Args:
            items: The items.
            work: Is called with an item, here; it is to leave what takes long to ``call``.
        """
        if self._processes is None:
            for item in items:
                work(item)
            return
        threads = ThreadPoolExecutor(self.workers)
        try:
            for done in as_completed([threads.submit(work, item) for item in items]):
                done.result()
        except BaseException:
            for process in [*self._processes._processes.values()]:
                process.terminate()
            raise
        finally:
            threads.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process ends the others
    torch.set_num_threads(threads)
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once its parent was killed, whose queue would be waited on for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
