"""A foreman: has a task done by several worker processes of this machine.

    start workers -> look after them: replace who was killed, end all when one fails -> dismiss who is left

A worker is ``python -m MODULE`` without the current folder in front of Python's modules, and reads its task from its
standard input (see ``worker.serve``), so that no file keeps what the task holds. Which part of the task a worker takes
is not the foreman's business: workers claim parts under a lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mukron.workers.exits import BROKEN, DONE, WRONG_REQUEST
from mukron.workers.interrupts import Stopped
from mukron.workers.machine import cores
from mukron.workers.worker import Tick

POLL = 0.1  # seconds between two looks at the processes
LOG_TAIL = 2000  # characters of the log that an error repeats
# The current folder comes last, wherever PYTHONPATH has it: its statistics.py cannot stand in for Python's.
SAFE_PATH = "import os, sys; sys.path.sort(key=('', os.getcwd()).__contains__); "
START = (  # python -m MODULE
    SAFE_PATH + "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
Process = subprocess.Popen[bytes]


class Foreman(ABC):
    """Starts workers and looks after them. What a dead worker means is for a subclass to say.

    Args:
        module: What a worker runs, by ``python -m``. It calls ``worker.serve``.
        task: Plain data for JSON.
        workers: How many processes. They share the machine's cores evenly.
        log: A file to which workers' output is appended.

    Example:
        >>> class Patient(Foreman):
        ...     def replaces(self, process_id, code):
        ...         return True
        >>> Patient("mukron.study", task={}, workers=2, log=Path("log.txt")).workers
        2
    """

    worker = "a worker"  # as errors call one
    patience = 60.0  # seconds that a dismissed worker has to end its step

    def __init__(self, module: str, task: Mapping[str, Any], workers: int, log: Path) -> None:
        self.module, self.task, self.workers, self.log = module, task, workers, log
        self.processes: list[Process] = []
        self._places: dict[int, int] = {}  # of workers, by process
        self._failures: set[int] = set()  # exit codes

    @abstractmethod
    def replaces(self, process_id: int, code: int) -> bool:
        """Return whether to replace a worker that was killed; it is no longer one of ``processes``.

        Args:
            process_id: The worker's process.
            code: Its exit code.
        """

    def dismissed(self, process_id: int) -> None:  # noqa: B027 (may be left as it is)
        """Called for a worker that has ended since it was told to.

        Args:
            process_id: The worker's process.
        """

    def environment(self, place: int) -> Mapping[str, str]:
        """Environment variables of a worker, beside those of the foreman.

        Args:
            place: A number below ``workers``; who replaces a worker takes its place.
        """
        return {}

    def refusal(self, text: str) -> Exception:
        """The error to raise where a worker found that the request is wrong.

        Args:
            text: What the worker said.
        """
        return ValueError(text)

    def run(self, stopped: Stopped, tick: Tick) -> bool:
        """Have the task done.

        Args:
            stopped: Asked between two looks; once it is True all workers are dismissed.
            tick: Called after every look.

        Returns:
            Whether all workers ended by themselves; False if they were stopped.

        Raises:
            RuntimeError: A worker broke. The error has the end of the log.
            Exception: As ``refusal`` makes it of what a worker said.
        """
        log_size = self.log.stat().st_size if self.log.exists() else 0
        order = json.dumps(self._order()).encode()
        try:
            for place in range(self.workers):
                self._hire(order, place)
            while self.processes and not self._failures and not stopped():
                self._look(order)
                tick()
                time.sleep(POLL)
        finally:
            codes = self._dismiss()
        if self._failures:
            raise self._failure(self._failures.union(codes), log_size)
        return not stopped()

    def _order(self) -> dict[str, Any]:
        threads = max(1, cores() // self.workers)
        return {"task": dict(self.task), "path": sys.path, "foreman": os.getpid(), "threads": threads}

    def _hire(self, order: bytes, place: int) -> None:
        command = [sys.executable, "-c", START, self.module]
        with self.log.open("ab") as log:  # a new session, so that the terminal sends Ctrl-C to the foreman alone
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment(place)},
            )
        self.processes.append(process)
        self._places[process.pid] = place
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # it may have died already
            pipe.write(order)

    def _look(self, order: bytes) -> None:
        """Part with workers that have ended, and replace those that were killed."""
        for process in [process for process in self.processes if process.poll() is not None]:
            self.processes.remove(process)
            code, place = process.returncode, self._places.pop(process.pid)
            if code in (WRONG_REQUEST, BROKEN):
                self._failures.add(code)
            elif code != DONE and self.replaces(process.pid, code):
                self._hire(order, place)

    def _dismiss(self) -> list[int]:
        """As Ctrl-C would: a worker ends its step and gives back what it has claimed. Returns their exit codes."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in self.processes:
            try:
                process.wait(timeout=self.patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.dismissed(process.pid)
        return [process.returncode for process in self.processes]

    def _failure(self, codes: set[int], log_size: int) -> Exception:
        text = self.log.read_bytes()[log_size:].decode(errors="replace").strip()
        if BROKEN in codes:
            return RuntimeError(f"{self.worker} broke; {self.log} has all it said:\n{text[-LOG_TAIL:]}")
        return self.refusal(text.rpartition("\nerror: ")[2].removeprefix("error: "))
