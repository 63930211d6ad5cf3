"""Those who train: a worker takes one point after another, or many narrow ones at once; a foreman starts workers and
looks after them."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mukron.data import Dataset
from mukron.study.design import Design
from mukron.study.errors import StudyError
from mukron.study.points import DIVERGED, PRUNED, Point
from mukron.study.search import pruner
from mukron.study.store import ENDED, INTERRUPTED, RUNNING, Claim, Entry, Store
from mukron.train import Progress, Run, StackProgress, dataset_of, stack_size, train, train_stack
from mukron.train.records import EpochRow

IDLE = 0.5  # seconds between two looks at the storage
FEW = 3  # trials that do not tell how long the others take
QUICK = 1.0  # seconds; epochs that follow faster are not reported to Optuna one by one


@dataclass(frozen=True)
class StudyProgress:
    """Where a study stands."""

    done: int
    total: int
    running: int
    diverged: int
    seconds_left: float | None  # None: nothing to tell it from yet


@dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    design: Design
    url: str
    name: str
    since: int  # trials before this number are another command's
    data_dir: str | None = None  # where data sets are kept
    runs: str | None = None  # keep every run's records and checkpoints in this folder
    one_by_one: bool = False  # train no stacks
    workers: int = 1  # that share the points, as far as is known
    beat: int | None = None
    grace: int | None = None

    def store(self) -> Store:
        rhythm = {name: value for name in ("beat", "grace") if (value := getattr(self, name)) is not None}
        return Store(self.url, self.name, self.design.config, self.design.metric, **rhythm)


class _FellBehindError(Exception):
    """A run that is not worth going on with."""


# A worker.


def work(
    job: Job,
    store: Store,
    dataset: Dataset | None,
    stopped: Callable[[], bool],
    tell: Callable[[], None],
    wait: bool = True,
) -> bool:
    """Train points until none is left: True; or until ``stopped`` or Ctrl-C: False.

    wait: for points that run elsewhere, whose workers may die; without it those are left to them.
    """
    design = job.design
    if design.search is not None:
        store.study.pruner = pruner(design.search.pruner, design.config.epochs)
    seen: Sequence[Entry] = store.entries()
    if dataset is None and design.next(seen, job.since) is not None:
        dataset = dataset_of(design.config, None, job.data_dir)  # once for all points, and before one is claimed

    def choose(entries: Sequence[Entry]) -> Sequence[Point]:
        nonlocal seen
        seen = entries
        return _at_once(job, design.stack(entries, job.since), dataset)

    while not stopped():
        claims = store.claim_many(choose)
        if claims:
            if _train(job, store, claims, dataset, stopped, tell) == INTERRUPTED:
                return False
        elif wait and design.standing(seen)[RUNNING]:
            time.sleep(IDLE)
        else:
            return True
        tell()
    return False


def _at_once(job: Job, points: Sequence[Point], dataset: Dataset | None) -> Sequence[Point]:
    """Of points of one width, those to be trained now: a stack where that is quicker, or the first alone.

    Workers get an equal share each, so that none takes all while others wait.
    """
    if not points or dataset is None or job.one_by_one or job.runs is not None:
        return points[:1]
    one_of_each = {point.scheme: point.config(job.design.config) for point in points}
    sizes = {scheme: stack_size(config, dataset, job.workers) for scheme, config in one_of_each.items()}
    alike = [point for point in points if sizes[point.scheme] > 1]
    share = math.ceil(len(alike) / job.workers)
    return alike[: min(share, sizes[points[0].scheme])] if points[0] in alike else points[:1]


def _train(
    job: Job,
    store: Store,
    claims: Sequence[Claim],
    dataset: Dataset | None,
    stopped: Callable[[], bool],
    tell: Callable[[], None],
) -> str:
    """Train the points that were claimed and write down what became of them; INTERRUPTED if they were stopped."""
    if len(claims) == 1:
        return _train_one(job, store, claims[0], dataset, stopped, tell)
    heard = False

    def on_progress(at: StackProgress) -> None:
        nonlocal heard
        if stopped() and not heard:  # before the stack itself listened
            raise KeyboardInterrupt
        heard = True
        tell()

    configs = [claim.point.config(job.design.config) for claim in claims]
    with store.alive(*claims), _given_up_on_error(store, *claims):
        try:
            runs = train_stack(configs, dataset=dataset, data_dir=job.data_dir, progress=on_progress)
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            raise StudyError(
                f"width={configs[0].width:g}: no memory for {len(configs)} runs at once ({said}); train them one by "
                "one (--one-by-one)"
            ) from error
        for claim, run in zip(claims, runs, strict=True):
            _write_down(store, claim, run)
    return INTERRUPTED if any(run.status == INTERRUPTED for run in runs) else ENDED


def _write_down(store: Store, claim: Claim, run: Run) -> None:
    if run.status == INTERRUPTED:
        store.give_up(claim, INTERRUPTED)
    else:
        store.end(claim, run.status, run.epochs, run.reason, run.seconds)


def _train_one(
    job: Job,
    store: Store,
    claim: Claim,
    dataset: Dataset | None,
    stopped: Callable[[], bool],
    tell: Callable[[], None],
) -> str:
    config = claim.point.config(job.design.config)
    prune = job.design.search is not None and job.design.search.pruner != "none"
    rows: list[EpochRow] = []
    began = told = time.monotonic()
    heard = False

    def on_progress(at: Progress) -> None:
        nonlocal told, heard
        if stopped() and not heard:  # before the run itself listened
            raise KeyboardInterrupt
        heard = True
        tell()
        if at.row is None:
            return
        rows.append(at.row)
        value, now = at.row.get(store.metric), time.monotonic()
        if value is None or not (prune or now - told > QUICK):
            return
        told = now
        store.report(claim, value, at.row["epoch"])
        if prune and store.fell_behind(claim):
            raise _FellBehindError

    folder = None if job.runs is None else Path(job.runs) / config.key()
    with store.alive(claim), _given_up_on_error(store, claim):
        try:
            run = train(config, folder, dataset=dataset, data_dir=job.data_dir, progress=on_progress)
        except _FellBehindError:
            reason = f"fell behind the others by epoch {rows[-1]['epoch']}"
            run = Run(config, PRUNED, rows, reason, time.monotonic() - began)
        _write_down(store, claim, run)
    return run.status


@contextmanager
def _given_up_on_error(store: Store, *claims: Claim) -> Iterator[None]:
    """What has ended by then stays as it ended."""
    try:
        yield
    except BaseException as error:
        reason = INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        for claim in claims:
            with suppress(Exception):
                store.give_up(claim, reason)
        raise


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether it was pressed; what is under way is brought to an end first. Pressed again, it acts as ever.

    Being told to end (SIGTERM) is the same.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def press(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    terminate = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, terminate)


# A foreman.


def employ(
    job: Job, store: Store, workers: int, log: Path, stopped: Callable[[], bool], tell: Callable[[], None]
) -> bool:
    """Have the job done by so many processes; True when it is, False when it was ``stopped``.

    A worker that was killed gives its point back at once and is replaced. An error of one ends all.
    """
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(job, Path(folder) / "job.json", workers, log)
        try:
            for _ in range(workers):
                crew.hire()
            while crew.processes and not stopped():
                for process in crew.ended():
                    crew.look_into(process, store)
                tell()
                time.sleep(0.1)
            return not stopped()
        finally:
            crew.dismiss(store)


class Crew:
    """Processes of this machine that work on a job."""

    def __init__(self, job: Job, file: Path, workers: int, log: Path) -> None:
        content = {**vars(job), "workers": workers, "design": job.design.to_dict()}
        content |= {"path": sys.path, "parent": os.getpid()}
        content["threads"] = max(1, cores() // workers)
        file.write_text(json.dumps(content))
        self.file, self.log, self.idle_deaths = file, log, 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.said_before = log.stat().st_size if log.exists() else 0

    def hire(self) -> None:
        command = [sys.executable, "-m", "mukron.study", str(self.file)]
        with self.log.open("ab") as log:  # a session of its own: Ctrl-C reaches the foreman alone
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)

    def ended(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is not None]

    def look_into(self, process: subprocess.Popen[bytes], store: Store) -> None:
        """Why a worker is no longer there."""
        self.processes.remove(process)
        if process.returncode == 0:
            return
        if process.returncode in (2, 3):
            text = self.log.read_bytes()[self.said_before :].decode(errors="replace").strip()
            if process.returncode == 2:
                raise StudyError(text.rpartition("\nerror: ")[2].removeprefix("error: "))
            raise RuntimeError(f"a worker of the study broke; {self.log} has all it said:\n{text[-2000:]}")
        had_a_point = store.give_up_of(process.pid)
        self.idle_deaths += not had_a_point
        if self.idle_deaths > len(self.processes) + 2:
            raise RuntimeError(f"workers die before they begin (exit code {process.returncode}); see {self.log}")
        self.hire()

    def dismiss(self, store: Store) -> None:
        """As Ctrl-C would: each brings its step to an end and gives its point back."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            store.give_up_of(process.pid, INTERRUPTED)


def main(file: str) -> int:
    """A worker process of a study."""
    content = json.loads(Path(file).read_text())
    path, parent, threads = (content.pop(name) for name in ("path", "parent", "threads"))

    def do(stopped: Callable[[], bool], tell: Callable[[], None]) -> bool:
        job = Job(**{**content, "design": Design.from_dict(content["design"])})
        return work(job, job.store(), None, stopped, tell)

    return as_worker(do, path, parent, threads)


def as_worker(
    do: Callable[[Callable[[], bool], Callable[[], None]], bool], path: Sequence[str], parent: int, threads: int
) -> int:
    """Work for a foreman, importing from where he does: 0 when all is done, 130 when told to stop, 2 or 3 on an error.

    do: is given whether it was told to stop, and what to call now and then: it raises when the foreman is gone.
    """
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    torch.set_num_threads(threads)

    def orphaned() -> None:
        if os.getppid() != parent:
            raise KeyboardInterrupt

    try:
        with ctrl_c() as stopped:
            return 0 if do(stopped, orphaned) else 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 3


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# How far it is.


def progress_of(design: Design, entries: Sequence[Entry], workers: int) -> StudyProgress:
    standing = design.standing(entries)
    ended, running = standing[ENDED], len(standing[RUNNING])
    diverged = sum(entry.result is not None and entry.result.status == DIVERGED for entry in ended)
    left = _seconds_left(design, ended, standing[RUNNING])
    side_by_side = max(1.0, sum(1 / entry.together for entry in standing[RUNNING]), workers)
    total = max(design.total, len(ended) + running)  # a search may find more there than it asks for
    return StudyProgress(len(ended), total, running, diverged, None if left is None else left / side_by_side)


def _seconds_left(design: Design, ended: Sequence[Entry], running: Sequence[Entry]) -> float | None:
    """By what runs of each width took; one not seen yet costs more than the nearest by what the others show of it."""
    took: dict[float, list[float]] = {}
    for entry in ended:
        took.setdefault(entry.point.width, []).append(entry.seconds)
    if len(ended) < FEW:
        return None
    prices = {width: statistics.median(seconds) for width, seconds in took.items()}
    low, high = min(took), max(took)
    power = math.log(prices[high] / prices[low]) / math.log(high / low) if low < high and prices[low] else 1.0
    power = min(max(power, 0.0), 2.0)
    each = design.total / len(design.widths)
    left = 0.0
    for width in design.widths:
        nearest = min(took, key=lambda known: (abs(known - width), known))
        price = prices[nearest] * (width / nearest) ** power
        half_done = sum(entry.point.width == width for entry in running) / 2
        left += price * max(0.0, each - len(took.get(width, ())) - half_done)
    return left
