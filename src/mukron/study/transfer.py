"""A transfer study: train narrow and wide, and see whether what is best for one is best for all."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from numbers import Real
from pathlib import Path

import torch

from mukron import __version__
from mukron.data import Dataset
from mukron.study.certificate import Certificate, certify
from mukron.study.design import Design, Search, usual_schemes
from mukron.study.errors import StudyError
from mukron.study.points import FINISHED, Result
from mukron.study.record import StudyRecord
from mukron.study.store import ANYWHERE, ENDED, OWN, Store, sqlite_at, stored_at
from mukron.study.work import IDLE, Job, StudyProgress, cores, ctrl_c, employ, progress_of, work
from mukron.train import RunConfig

OWN_NAME = "study"  # in a storage of its own, which may be moved and copied
DATABASE, RECORD, LOG, RUNS = "study.db", "study.json", "workers.log", "runs"


class TransferStudy:
    """Widths x learning rates (x dampings) x seeds x schemes, each trained once, whatever happens meanwhile.

    config: what is trained; width, learning rate, damping, scheme and seed are the study's.
    schemes: each a parametrization with a damping rule, "mup" or "sp/heuristic:1e-3"; what people do today against muP
        if not given.
    lr: the learning rates to try. damping: likewise, as multiples of each scheme's own number; (1,) leaves it alone.
    seeds: how many, or which.
    search: settings found by a sampler at each width, between the lowest and highest of ``lr`` and ``damping``.
    folder: keeps the study: its trials (study.db, Optuna's), its record (study.json). The same study continues there,
        with more widths, learning rates or seeds if asked for; another is refused.
    storage: postgresql://..., for workers on several machines; the same study joins. Its ``name`` there is made of the
        folder's and of what is trained.
    keep_runs: keep every run's records and checkpoints too, so that a trial which is stopped continues in its middle.
    one_by_one: do not train many narrow networks at once (``mukron.train.stack_size`` says when that is done).
    dataset: the config's data, if it is loaded already; for one worker.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        widths: Sequence[float],
        lr: Sequence[float],
        damping: Sequence[float] = (1.0,),
        schemes: Sequence[str] | None = None,
        seeds: int | Sequence[int] = 3,
        search: Search | None = None,
        metric: str = "train_loss",
        folder: str | os.PathLike[str] = "study",
        storage: str | None = None,
        name: str | None = None,
        keep_runs: bool = False,
        one_by_one: bool = False,
        dataset: Dataset | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        beat: int | None = None,
        grace: int | None = None,
    ) -> None:
        config = RunConfig() if config is None else config
        schemes = usual_schemes(config.method) if schemes is None else schemes
        chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        names = (schemes,) if isinstance(schemes, str) else tuple(schemes)
        axes = (_several(widths), names, _several(lr), _several(damping))
        self.design = Design(config, *axes, chosen, search, metric)
        self.folder = Path(folder)
        self.name = name or (OWN_NAME if storage is None else self._shared_name())
        self.dataset, self.data_dir = dataset, None if data_dir is None else str(data_dir)
        self._is_own = storage is None
        self.url = storage or sqlite_at((self.folder / DATABASE).resolve())
        self.runs = str((self.folder / RUNS).resolve()) if keep_runs else None
        self.one_by_one, self.beat, self.grace = one_by_one, beat, grace
        self._store: Store | None = None

    def _shared_name(self) -> str:
        """In a storage that others use too: by the folder and by what is trained."""
        return f"{self.folder.resolve().name}-{self.design.config.key(without=(*OWN, *ANYWHERE))}"

    @property
    def store(self) -> Store:
        if self._store is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StudyError(f"{self.folder}: a study cannot be kept there: {error.strerror}") from error
            self._store = self._job(0).store()
        return self._store

    def _job(self, since: int) -> Job:
        own = (self.data_dir, self.runs, self.one_by_one)
        return Job(self.design, self.url, self.name, since, *own, beat=self.beat, grace=self.grace)

    def job(self) -> Job:
        """For a worker that begins now."""
        return self._job(since=len(self.store.entries()))

    def run(
        self, workers: int = 1, progress: Callable[[StudyProgress], None] | None = None, command: str = ""
    ) -> StudyRecord:
        """Train what is not trained yet. Ctrl-C stops it (KeyboardInterrupt); what has ended stays.

        workers: processes on this machine; one is this process itself. A computer's cores are shared among them.
        """
        if workers < 1:
            raise StudyError(f"workers: at least 1, got {workers}")
        if workers > 1 and self.dataset is not None:
            raise StudyError("workers: other processes do not have this data set; give it as data='module:function'")
        self._check_metric()
        job = self.job()
        tell = self._teller(workers, progress)
        tell(True)
        with ctrl_c() as stopped, suppress(KeyboardInterrupt):
            done = False
            if workers == 1:
                done = work(job, self.store, self.dataset, stopped, tell)
            else:
                done = employ(job, self.store, workers, self.folder / LOG, stopped, tell)
        tell(True)
        record = self.record(command)
        if not done:
            raise KeyboardInterrupt
        if deadly := self.design.deadly(self.store.entries(), job.since):
            first = f"the first is {deadly[0]}"
            raise StudyError(
                f"{len(deadly)} points are missing: their workers died every time (out of memory?); {first}"
            )
        return record

    def _check_metric(self) -> None:
        """Said before anything is trained."""
        metric, there = self.design.metric, self.store.metric
        if self.design.search is not None and metric != there:
            raise StudyError(
                f"metric: this search goes by {there}, and cannot go on by {metric}; choose another folder"
            )
        rows = [result.rows[-1] for result in self.results() if result.status == FINISHED]
        if rows and metric not in rows[0]:
            raise StudyError(f"metric {metric!r}: the runs here do not have it; they have {', '.join(rows[0])}")

    def _teller(self, workers: int, progress: Callable[[StudyProgress], None] | None) -> Callable[..., None]:
        last = 0.0

        def tell(now: bool = False) -> None:
            nonlocal last
            if progress is not None and (now or time.monotonic() - last > IDLE):
                progress(progress_of(self.design, self.store.entries(), workers))
                last = time.monotonic()

        return tell

    # What it found.

    def results(self) -> list[Result]:
        """Of every point that has ended, those of commands before too, if they belong to this question."""
        ended = [entry for entry in self.store.entries() if entry.state == ENDED and self.design.asked(entry.point)]
        return [entry.result for entry in ended if entry.result is not None]

    def certificate(self) -> Certificate | None:
        """None while there are fewer than two widths."""
        results = self.results()
        if len({result.point.width for result in results}) < 2:
            return None
        return certify(results, self.design.over or ("lr",), self.design.metric)

    def record(self, command: str = "") -> StudyRecord:
        """All of it as plain data, also kept as study.json in the folder."""
        made = {
            "command": command,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "storage": DATABASE if self._is_own else stored_at(self.url),
            **machine(self.design.config.device),
        }
        record = StudyRecord(
            self.folder.resolve().name,
            self.design.config,
            self.design.over or ("lr",),
            self.design.metric,
            tuple(self.results()),
            self.certificate(),
            made,
        )
        record.save(self.folder / RECORD)
        return record


def _several(values: float | Sequence[float]) -> tuple[float, ...]:
    return (values,) if isinstance(values, Real) else tuple(values)  # type: ignore[arg-type, return-value]


def machine(device: str) -> dict[str, str]:
    """What it was run on, in words."""
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    versions = f"mukron {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return {"machine": f"{platform.machine()}, {cores()} cores" + (f", {gpu}" if gpu else ""), "versions": versions}
