"""A transfer study: train at several widths, and determine whether the best settings are the same at all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from mukron.arguments import check_type
from mukron.bars import progress_of_function
from mukron.data import Dataset
from mukron.imports import path_of
from mukron.study.certificate import Certificate, certify
from mukron.study.database import sqlite_at, without_password
from mukron.study.design import Design
from mukron.study.errors import StudyError
from mukron.study.points import Result
from mukron.study.progress import StudyProgress, progress_of, standing_of_study
from mukron.study.record import StudyRecord
from mukron.study.store import ENDED, NOT_COMPARED, Store
from mukron.study.work import POLL_INTERVAL, Job, StudyForeman, work, workers_for
from mukron.train.records import FINISHED
from mukron.train.trackers import TrackerFactory, read_trackers
from mukron.workers.interrupts import interruptible
from mukron.workers.launch import refuse_torchrun
from mukron.workers.machine import describe_machine
from mukron.workers.progress import Reporter

TrackerName = str | TrackerFactory
STUDY_NAME = "study"  # in the folder's storage: the folder may be renamed, moved and copied
DATABASE, RECORD, LOG, RUNS, TRACKED = "study.db", "study.json", "workers.log", "runs", "tracked"


class TransferStudy:
    """Trains every point of a design once, across interruptions, and judges whether settings transfer.

    The folder holds the study: its trials (study.db, an Optuna storage) and its record (study.json). Running a study
    again in its folder continues it, also with more widths, learning rates, seeds or schemes. A study that trains
    something else is refused.

    Args:
        design: What is trained.
        folder: Where the study is kept.
        storage: postgresql://USER@HOST/DATABASE, to share the trials between machines; password: ~/.pgpass.
        name: The study's name in ``storage``; derived from the folder's name and the config by default.
        keep_runs: Keep every run's records and checkpoints too, so that a stopped trial continues from its checkpoint.
        tracker: "wandb", "mlflow", "tensorboard", a class of your own in a module (or its "MODULE:CLASS"), or several:
            they get every run's numbers, as in ``mukron.train.train``. What they write is kept in the folder's
            ``tracked``.
        one_by_one: Do not train many narrow networks at once (see ``mukron.train.stack_size``).
        dataset: The data, if it is loaded already; for one worker.
        data_dir: Where data sets are kept.
        beat: Seconds between two heartbeats of a trial.
        grace: Seconds without a heartbeat after which a trial counts as lost.

    Example:
        >>> from mukron.study import Design, TransferStudy
        >>> from mukron.train import RunConfig
        >>> config = RunConfig(method="sgd", base_width=16, epochs=1, samples=64)
        >>> design = Design(config, widths=(16, 32), schemes=("mup",), lr=(0.1, 0.2), seeds=1)
        >>> record = TransferStudy(design, folder="first").run()
        >>> len(record.results)
        4
    """

    def __init__(
        self,
        design: Design,
        *,
        folder: str | os.PathLike[str] = "study",
        storage: str | None = None,
        name: str | None = None,
        keep_runs: bool = False,
        tracker: TrackerName | Sequence[TrackerName] = (),
        one_by_one: bool = False,
        dataset: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        beat: int | None = None,
        grace: int | None = None,
    ) -> None:
        check_type("design", design, Design)
        for argument, value in (("storage", storage), ("name", name)):
            check_type(argument, value, (str, type(None)), "a text")
        for argument, seconds in (("beat", beat), ("grace", grace)):
            check_type(argument, seconds, (int, type(None)), "a whole number")
        design.config.trusted(False)
        self.design = design
        self.folder = Path(folder)
        self.name = name or (STUDY_NAME if storage is None else self._shared_name())
        self.dataset, self.data_dir = dataset, None if data_dir is None else str(data_dir)
        self._in_folder = storage is None
        self.url = storage or sqlite_at((self.folder / DATABASE).resolve())
        self.runs = str((self.folder / RUNS).resolve()) if keep_runs else None
        trackers = [tracker] if isinstance(tracker, str) or callable(tracker) else tracker
        self.tracker = tuple(path_of(tracker, "tracker") for tracker in trackers)
        self.one_by_one, self.beat, self.grace = one_by_one, beat, grace
        self._store: Store | None = None

    def _shared_name(self) -> str:
        """The name in a storage that may hold other studies."""
        return f"{self.folder.resolve().name}-{self.design.config.key(without=NOT_COMPARED)}"

    @property
    def store(self) -> Store:
        """The storage, opened when it is first needed."""
        if self._store is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StudyError(f"{self.folder}: a study cannot be kept there: {error.strerror}") from error
            self._store = self._job(0).store()
        return self._store

    def _job(self, since: int) -> Job:
        return Job(
            self.design,
            self.url,
            self.name,
            since,
            data_dir=self.data_dir,
            runs=self.runs,
            tracker=self.tracker,
            tracked=str((self.folder / TRACKED).resolve()),
            one_by_one=self.one_by_one,
            beat=self.beat,
            grace=self.grace,
        )

    def job(self) -> Job:
        """The task of a worker that starts now."""
        return self._job(since=len(self.store.entries()))

    def run(
        self, workers: int | str = 1, progress: Callable[[StudyProgress], None] | bool | None = None, command: str = ""
    ) -> StudyRecord:
        """Train the points that are not trained yet. Ctrl-C stops after the current steps; results so far are kept.

        Args:
            workers: Processes on this machine, which share its cores. One worker is this process. "auto": one on each
                GPU if the run's device is "cuda", which each sees as its only one; otherwise one.
            progress: Called at intervals with the study's progress. None: a bar on a terminal and in notebooks; False:
                none.
            command: The command that ran the study, for its record.

        Returns:
            The record of the whole study. It is also written to study.json.

        Raises:
            StudyError: The request is wrong, or points are missing since their workers died every time.
            RuntimeError: A worker failed with an error.
            KeyboardInterrupt: The study was stopped. Run it again to continue.
        """
        refuse_torchrun("a study", "its workers are started by workers= (--workers)")
        workers = workers_for(workers, self.design.config.device)
        if workers > 1 and self.dataset is not None:
            raise StudyError("workers: other processes do not have this data set; give it as data='module:function'")
        done = False
        try:
            self._check_metric()
            read_trackers(self.tracker).check(self.folder)
            job = self.job()
            with progress_of_function(progress, self.folder.name, standing_of_study) as listener:
                report = self._reporter(workers, listener)
                report(now=True)
                with interruptible(terminate=True) as stopped, suppress(KeyboardInterrupt):
                    if workers == 1:
                        done = work(job, self.store, self.dataset, stopped, report)
                    else:
                        done = StudyForeman(job, self.store, workers, self.folder / LOG).run(stopped, report)
                report(now=True)
        finally:
            self.store.presence.leave()
        record = self.record(command)
        if not done:
            raise KeyboardInterrupt
        if deadly := self.design.deadly(self.store.entries(), job.since):
            raise StudyError(
                f"{len(deadly)} points are missing: their workers died every time (out of memory?); the first is "
                f"{deadly[0]}"
            )
        return record

    def _check_metric(self) -> None:
        """Refuse a metric that the study cannot be judged by, before anything is trained."""
        metric, stored_metric = self.design.metric, self.store.metric
        if self.design.search is not None and metric != stored_metric:
            raise StudyError(
                f"metric: this search goes by {stored_metric}, and cannot go on by {metric}; choose another folder"
            )
        rows = [result.rows[-1] for result in self.results() if result.status == FINISHED]
        if rows and metric not in rows[0]:
            raise StudyError(f"metric {metric!r}: the runs here do not have it; they have {', '.join(rows[0])}")

    def _reporter(self, workers: int, progress: Callable[[StudyProgress], None] | None) -> Reporter[StudyProgress]:
        return Reporter(progress, lambda: progress_of(self.design, self.store.entries(), workers), POLL_INTERVAL)

    # Results.

    def results(self) -> list[Result]:
        """Return the results of all points that have ended and belong to this study, those of earlier commands too."""
        entries = [entry for entry in self.store.entries() if entry.state == ENDED and self.design.asked(entry.point)]
        return [entry.result for entry in entries if entry.result is not None]

    def certificate(self) -> Certificate | None:
        """Return the verdict on the results so far; None while there are fewer than two widths."""
        results = self.results()
        if len({result.point.width for result in results}) < 2:
            return None
        return certify(results, self.design.over or ("lr",), self.design.metric)

    def record(self, command: str = "") -> StudyRecord:
        """Return the study so far as plain data, and write it to study.json in the folder.

        Args:
            command: The command that ran the study.

        Returns:
            The record: what is trained, all results, the certificate, and how it was made.
        """
        provenance = {
            "command": command,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "storage": DATABASE if self._in_folder else without_password(self.url),
            **describe_machine(self.design.config.device),
        }
        record = StudyRecord(
            self.folder.resolve().name,
            self.design.config,
            self.design.over or ("lr",),
            self.design.metric,
            tuple(self.results()),
            self.certificate(),
            provenance,
        )
        record.save(self.folder / RECORD)
        return record
