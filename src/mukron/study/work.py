"""The workers of a study: a worker trains one point after another, or many narrow ones at once."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mukron.data import Dataset
from mukron.study.design import Design
from mukron.study.errors import StudyError
from mukron.study.points import PRUNED, Point
from mukron.study.search import pruner
from mukron.study.store import ENDED, RUNNING, ClaimedPoint, Entry, Store
from mukron.train import Progress, Run, StackProgress, dataset_of, stack_size, train, train_stack
from mukron.train.records import INTERRUPTED
from mukron.train.rows import EpochRow
from mukron.train.trackers import Trackers, read_trackers
from mukron.train.tracking import tracked
from mukron.workers.foreman import Foreman
from mukron.workers.interrupts import Stopped
from mukron.workers.machine import gpus
from mukron.workers.worker import Tick, WorkerTask, serve

POLL_INTERVAL = 0.5  # seconds between two reads of the storage
ONE_A_GPU = "auto"  # workers: one on each GPU
QUICK = 1.0  # seconds; shorter epochs are not all reported to Optuna


@dataclass(frozen=True)
class Job:
    """The task of a worker of a study."""

    design: Design
    url: str
    name: str
    since: int  # trials before this number belong to earlier commands
    data_dir: str | None = None  # where data sets are kept
    tracker: tuple[str, ...] = ()  # names of trackers
    tracked: str | None = None  # what they write is kept in this folder
    runs: str | None = None  # keep every run's records and checkpoints in this folder
    one_by_one: bool = False  # whether to train points one by one, not as stacks
    workers: int = 1  # the number of workers of this command, which share the points
    beat: int | None = None
    grace: int | None = None

    def store(self) -> Store:
        """Open the study's storage."""
        rhythm = {name: value for name in ("beat", "grace") if (value := getattr(self, name)) is not None}
        return Store(self.url, self.name, self.design.config, self.design.metric, **rhythm)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "design": self.design.to_dict()}

    @classmethod
    def from_dict(cls, data: WorkerTask) -> Job:
        return cls(**{**data, "design": Design.from_dict(data["design"], trust=True)})  # the foreman has checked it


class _FellBehindError(Exception):
    """The pruner stops the run."""

    status = PRUNED  # for trackers


# A worker.


def work(
    job: Job,
    store: Store,
    dataset: Dataset | None,
    stopped: Stopped,
    tick: Tick,
    wait: bool = True,
) -> bool:
    """Train points until none is left.

    Args:
        job: The study.
        store: Its storage.
        dataset: Its data; None loads it.
        stopped: Whether to stop; called between two points, and while one is trained.
        tick: Called after every step and every point.
        wait: Wait for points that other workers train, since those may die. False leaves such points to them.

    Returns:
        True when no point is left, False if the work was stopped.
    """
    design = job.design
    if design.search is not None:
        store.study.pruner = pruner(design.search.pruner, design.config.epochs)
    seen: Sequence[Entry] = store.entries()
    if dataset is None and design.next(seen, job.since) is not None:
        dataset = dataset_of(design.config, None, job.data_dir)  # once for all points, before one is claimed

    def choose(entries: Sequence[Entry]) -> Sequence[Point]:
        nonlocal seen
        seen = entries
        return _at_once(job, design.stack(entries, job.since), dataset)

    trackers = read_trackers(job.tracker)
    while not stopped():
        claims = store.claim_many(choose)
        if claims:
            with warnings.catch_warnings():  # a study tries small dampings on purpose, and has a batch of its own
                warnings.filterwarnings("ignore", message="layer .* its damping is so small", category=RuntimeWarning)
                warnings.filterwarnings("ignore", message="batch=.* to train on", category=UserWarning)
                status = _train(job, store, claims, dataset, stopped, tick, trackers)
            if status == INTERRUPTED:
                return False
        elif wait and design.by_state(seen)[RUNNING]:
            time.sleep(POLL_INTERVAL)
        else:
            return True
        tick()
    return False


def _at_once(job: Job, points: Sequence[Point], dataset: Dataset | None) -> Sequence[Point]:
    """Choose from points of one width those to train now: a stack where that is faster, otherwise only the first.

    Workers get equal shares, so that none claims all points while others wait.
    """
    if not points or dataset is None or job.one_by_one or job.runs is not None:
        return points[:1]
    configs = {point.scheme: point.config(job.design.config) for point in points}  # one point of every scheme
    sizes = {scheme: stack_size(config, dataset, job.workers) for scheme, config in configs.items()}
    stackable = [point for point in points if sizes[point.scheme] > 1]
    share = math.ceil(len(stackable) / job.workers)
    return stackable[: min(share, sizes[points[0].scheme])] if points[0] in stackable else points[:1]


def _train(
    job: Job,
    store: Store,
    claims: Sequence[ClaimedPoint],
    dataset: Dataset | None,
    stopped: Stopped,
    tick: Tick,
    trackers: Trackers,
) -> str:
    """Train the points that were claimed and store their results; return INTERRUPTED if they were stopped."""
    if len(claims) == 1:
        return _train_one(job, store, claims[0], dataset, stopped, tick, trackers)
    listening = False  # whether the stack handles Ctrl-C already

    def on_progress(at: StackProgress) -> None:
        nonlocal listening
        if stopped() and not listening:
            raise KeyboardInterrupt
        listening = True
        tick()

    configs = [claim.point.config(job.design.config) for claim in claims]
    with store.alive(*claims), _given_up_on_error(store, *claims):
        try:
            runs = train_stack(configs, dataset=dataset, data_dir=job.data_dir, progress=on_progress)
        except torch.OutOfMemoryError as error:
            message = str(error).partition(". ")[0]
            raise StudyError(
                f"width={configs[0].width:g}: no memory for {len(configs)} runs at once ({message}); train them one by "
                "one (--one-by-one)"
            ) from error
        for claim, run in zip(claims, runs, strict=True):
            _store_result(store, claim, run)
        for claim, run in zip(claims, runs, strict=True):
            if run.status != INTERRUPTED:  # those are trained again
                with tracked(_of_point(trackers, job, claim.point), run.config, rows=run.epochs) as tracking:
                    tracking.end(run)
    return INTERRUPTED if any(run.status == INTERRUPTED for run in runs) else ENDED


def _store_result(store: Store, claim: ClaimedPoint, run: Run) -> None:
    if run.status == INTERRUPTED:
        store.give_up(claim, INTERRUPTED)
    else:
        store.end(claim, run.status, run.epochs, run.reason, run.seconds)


def _train_one(
    job: Job,
    store: Store,
    claim: ClaimedPoint,
    dataset: Dataset | None,
    stopped: Stopped,
    tick: Tick,
    trackers: Trackers,
) -> str:
    config = claim.point.config(job.design.config)
    prune = job.design.search is not None and job.design.search.pruner != "none"
    rows: list[EpochRow] = []
    began = reported = time.monotonic()
    listening = False  # whether the run handles Ctrl-C already

    def on_progress(at: Progress) -> None:
        nonlocal reported, listening
        if stopped() and not listening:
            raise KeyboardInterrupt
        listening = True
        tick()
        if at.row is None:
            return
        rows.append(at.row)
        value, now = at.row.get(store.metric), time.monotonic()
        if value is None or not (prune or now - reported > QUICK):
            return
        reported = now
        store.report(claim, value, at.row["epoch"])
        if prune and store.fell_behind(claim):
            raise _FellBehindError(f"fell behind the others by epoch {at.row['epoch']}")

    folder = None if job.runs is None else Path(job.runs) / config.key()
    with store.alive(claim), _given_up_on_error(store, claim):
        try:
            options: Any = {
                "dataset": dataset,
                "data_dir": job.data_dir,
                "tracker": _of_point(trackers, job, claim.point),
            }
            run = train(config, folder, **options, progress=on_progress, sample=False)
        except _FellBehindError as error:
            run = Run(config, PRUNED, rows, str(error), time.monotonic() - began)
        _store_result(store, claim, run)
    return run.status


def _of_point(trackers: Trackers, job: Job, point: Point) -> Trackers:
    """The trackers of a point, which keep what they write and remember in a folder of its own."""
    if not trackers.factories or job.tracked is None:
        return trackers
    tracked_runs = Path(job.tracked)
    folder = tracked_runs / point.config(job.design.config).key()
    return replace(trackers, name=point.text(), group=tracked_runs.parent.name, folder=folder)


@contextmanager
def _given_up_on_error(store: Store, *claims: ClaimedPoint) -> Iterator[None]:
    """Give up the claimed points if an error is raised; results that are already stored are kept."""
    try:
        yield
    except BaseException as error:
        reason = INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        for claim in claims:
            with suppress(Exception):
                store.give_up(claim, reason)
        raise


# Several workers.


def workers_for(workers: int | str, device: str) -> int:
    """Return the number of worker processes of a study.

    Args:
        workers: The number; "auto" for one on each GPU if the device is "cuda", and one otherwise.
        device: The device of the study's runs.

    Raises:
        StudyError: It is neither a number from 1 nor "auto".
    """
    if workers == ONE_A_GPU:
        return max(1, len(_gpus_for(device)))
    if isinstance(workers, bool) or not str(workers).isdecimal() or int(workers) < 1:
        raise StudyError(
            f"workers={workers!r}: expected a number of processes, at least 1, or {ONE_A_GPU!r}, one a GPU"
        )
    return int(workers)


def _gpus_for(device: str) -> list[str]:
    """The GPUs to spread workers over: none if the device is a certain GPU, or no GPU."""
    return gpus() if device == "cuda" else []


class StudyForeman(Foreman):
    """Runs a job in several processes.

    The points of a worker that was killed are given up at once, and the worker is replaced. This ends, since a point
    that kills its workers is no longer tried after a few of them (``Design.next``).
    """

    worker = "a worker of the study"
    patience = 30.0

    def __init__(self, job: Job, store: Store, workers: int, log: Path) -> None:
        super().__init__("mukron.study", replace(job, workers=workers).to_dict(), workers, log)
        self.gpus = _gpus_for(job.design.config.device)
        self.store, self.idle_deaths = store, 0

    def environment(self, place: int) -> Mapping[str, str]:
        """The worker's GPU, which it sees as its only one; more workers than GPUs share them in turn."""
        return {"CUDA_VISIBLE_DEVICES": self.gpus[place % len(self.gpus)]} if self.gpus else {}

    def replaces(self, process_id: int, code: int) -> bool:
        had_points = self.store.give_up_of(process_id)
        self.idle_deaths += not had_points
        if self.idle_deaths > len(self.processes) + 2:
            raise RuntimeError(f"workers die before they begin (exit code {code}); see {self.log}")
        return True

    def dismissed(self, process_id: int) -> None:
        self.store.give_up_of(process_id, INTERRUPTED)

    def refusal(self, text: str) -> StudyError:
        return StudyError(text)


def main() -> int:
    """Run a worker process of a study and return its exit code."""
    return serve(sys.stdin, _work_on_task)


def _work_on_task(task: WorkerTask, stopped: Stopped, tick: Tick) -> bool:
    job = Job.from_dict(task)
    return work(job, job.store(), None, stopped, tick)
