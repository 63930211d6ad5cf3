"""Calls of trackers during a run: a tracker that fails or hangs is dropped with one warning, and the run goes on.

Each tracker works on a thread of its own, and the run waits for it, up to a limit. So no tracker runs beside training:
it can neither slow a step down nor draw from the random streams of the run, which are put back after every call.

``trackers.json`` in the run's folder keeps for each tracker the name that it has given the run, and the last step that
it has taken. A run that is continued sends what is missing, and nothing twice.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from mukron.params.storage import read_json, write_json
from mukron.train.config import RunConfig
from mukron.train.randomness import own_random_numbers
from mukron.train.records import TRACKED_FILE, Run
from mukron.train.rows import EpochRow
from mukron.train.trackers import TrackedRun, Tracker, TrackerFactory, Trackers

FAILED_RUN = "failed"  # the status that trackers see after an error
START_LIMIT, LOG_LIMIT, FINISH_LIMIT = 120.0, 60.0, 60.0  # seconds; below what other processes wait for this one
STOP_LIMIT = 10.0  # after a second Ctrl-C


@contextmanager
def tracked(
    trackers: Trackers,
    config: RunConfig,
    folder: Path | None = None,
    rows: Sequence[EpochRow] = (),
    device: torch.device | None = None,
) -> Iterator[Tracking]:
    """Start the trackers of a run and, however it ends, finish them.

    Args:
        trackers: The trackers.
        config: The run.
        folder: Its folder.
        rows: The epochs that were trained before; trackers get those that they do not have yet.
        device: Where the run draws random numbers.

    Yields:
        The run's tracking, whose ``log`` takes rows and whose ``end`` takes the run.
    """
    tracking = Tracking(trackers, config, folder, device or torch.device("cpu"))
    try:
        tracking.start(rows)
        yield tracking
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        status = getattr(error, "status", "interrupted" if stopped else FAILED_RUN)
        reason = str(error) if hasattr(error, "status") else f"{type(error).__name__}: {error}"
        tracking.finish({"status": status, "reason": reason}, STOP_LIMIT if stopped else None)
        raise
    finally:
        tracking.close()


class Tracking:
    """The trackers of one run. Nothing that it does raises an error of a tracker.

    Args:
        trackers: The trackers.
        config: The run.
        folder: Its folder.
        device: Where the run draws random numbers.
    """

    def __init__(self, trackers: Trackers, config: RunConfig, folder: Path | None, device: torch.device) -> None:
        self.config, self.lost, self.device = config, trackers.lost, device
        folder = trackers.folder or folder
        name = trackers.name or (folder.resolve().name if folder is not None else _name(config))
        self.run = TrackedRun(name, trackers.group, folder)
        self.notes = _Notes(None if folder is None else folder / TRACKED_FILE)
        self.guarded = {
            name: _Guarded(name, factory) for name, factory in trackers.factories.items() if name not in self.lost
        }

    def start(self, rows: Sequence[EpochRow] = ()) -> None:
        """Start the trackers, and send the rows of before that they do not have."""
        content = self.config.to_dict()
        config = {name: value for name, value in content.items() if name not in ("format", "version")}

        def act(guarded: _Guarded) -> None:
            guarded.start(self.run, config, self.notes)
            for row in rows:
                guarded.log(row, self.notes)

        self._each(act, START_LIMIT)

    def log(self, row: EpochRow) -> None:
        """Send an epoch's numbers."""
        self._each(lambda guarded: guarded.log(row, self.notes), LOG_LIMIT)

    def end(self, run: Run) -> None:
        """Finish the trackers of a run that has ended or was interrupted."""
        content = run.result()
        self.finish({name: content[name] for name in ("status", "reason", "seconds", "best")})

    def finish(self, summary: Mapping[str, Any], limit: float | None = None) -> None:
        """Finish the trackers, once."""
        self._each(lambda guarded: guarded.finish(summary), FINISH_LIMIT if limit is None else limit)
        self.close()

    def close(self) -> None:
        """End the threads."""
        for guarded in self.guarded.values():
            guarded.close()
        self.guarded = {}

    def _each(self, act: Callable[[_Guarded], None], limit: float) -> None:
        """Let every tracker act; one that fails or does not answer is dropped."""
        if not self.guarded:
            return
        with own_random_numbers(self.device):
            for name, guarded in list(self.guarded.items()):
                error = guarded.call(partial(act, guarded), limit)
                if error is None:
                    continue
                self.guarded.pop(name).close()
                self.lost.add(name)
                message = " ".join(str(error).split())[:300]
                warnings.warn(
                    f"tracker {name!r} failed and is not used any more: {type(error).__name__}: {message}. The run "
                    "goes on; its folder, if it has one, has all numbers",
                    UserWarning,
                    stacklevel=3,
                )


class _Guarded:
    """One tracker and its thread."""

    def __init__(self, name: str, factory: TrackerFactory) -> None:
        self.name, self.factory = name, factory
        self.tracker: Tracker | None = None
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            task()

    def close(self) -> None:
        """Let the thread end after what it does now."""
        self.tasks.put(None)

    def call(self, act: Callable[[], None], limit: float) -> BaseException | None:
        """Act on the thread; return the error, if there is one."""
        done, errors = threading.Event(), list[BaseException]()

        def task() -> None:
            try:
                act()
            except BaseException as error:  # SystemExit too: it would end the thread without a word
                errors.append(error)
            done.set()

        self.tasks.put(task)
        if not done.wait(limit):
            return TimeoutError(f"no answer in {limit:g} seconds")
        return errors[0] if errors else None

    def start(self, run: TrackedRun, config: Mapping[str, Any], notes: _Notes) -> None:
        id = notes.id(self.name)
        self.tracker = self.factory(TrackedRun(run.name, run.group, run.folder, id))
        notes.note(self.name, id=self.tracker.start(config))

    def log(self, row: EpochRow, notes: _Notes) -> None:
        assert self.tracker is not None
        step = row["step"]
        if step <= notes.step(self.name):
            return
        metrics = {name: value for name, value in row.items() if name != "step" and value is not None}
        self.tracker.log(step, metrics)
        notes.note(self.name, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.finish(summary)


class _Notes:
    """What trackers are to remember of a run, kept in a file if there is a folder."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.content = path, dict[str, dict[str, Any]]()
        if path is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):  # a damaged file: trackers begin anew
                self.content = {
                    str(name): {"id": note.get("id"), "step": int(note.get("step") or 0)}
                    for name, note in dict(read_json(path)).items()  # type: ignore[call-overload]
                }

    def id(self, name: str) -> str | None:
        """The tracker's name of the run."""
        return self.content.get(name, {}).get("id")

    def step(self, name: str) -> int:
        """The last step that the tracker has."""
        return int(self.content.get(name, {}).get("step", 0))

    def note(self, name: str, **changes: Any) -> None:
        """Remember, and write it down."""
        self.content.setdefault(name, {"id": None, "step": 0}).update(changes)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, json.loads(json.dumps(self.content)))


def _name(config: RunConfig) -> str:
    """The name of a run without a folder."""
    return re.sub(r"[^\w.-]+", "_", f"{config.model}-w{config.width:g}-{config.method}-{config.scheme}")
