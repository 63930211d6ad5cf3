"""The execution of a recipe's parts: studies and coordinate checks. A part's folder is named by the key of its runs."""

from __future__ import annotations

import json
import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import cast

from mukron.data import Dataset
from mukron.diagnose.check import Check
from mukron.diagnose.configured import check_run
from mukron.paper.kernel import regress
from mukron.paper.outcome import provenance_here, thinned
from mukron.paper.recipe import Checking, Part, PartResult, Regression
from mukron.params.storage import damaged, read_json, write_json
from mukron.study.design import Design
from mukron.study.record import StudyRecord
from mukron.study.store import ENDED
from mukron.study.transfer import DATABASE, RECORD, TransferStudy
from mukron.study.work import work
from mukron.train import RunConfig, dataset_of
from mukron.typed import read_as
from mukron.workers.interrupts import Stopped
from mukron.workers.locks import locked
from mukron.workers.worker import Tick

CHECK_FILE, COMPLETE_FILE = "check.json", "over.json"


@dataclass(frozen=True)
class Assigned(ABC):
    """A part of a recipe with the folder that it runs in."""

    title: str
    part: Part
    folder: Path
    data_dir: str | None

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of runs."""

    @abstractmethod
    def done(self) -> int:
        """Return the number of runs that have ended."""

    @abstractmethod
    def result(self) -> PartResult:
        """Return the stored result of a complete part."""

    @abstractmethod
    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool: ...

    def run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        """Execute the runs that no other process has claimed.

        Args:
            stopped: Whether the user has asked to stop.
            tick: Called after every step.
            wait: Wait for runs of other processes, since these may die.

        Returns:
            False if it was stopped.
        """
        if self.is_complete():
            return True
        with warnings.catch_warnings():  # recipes show the effects that these warnings are about
            warnings.filterwarnings("ignore", message="output layer", category=UserWarning)
            warnings.filterwarnings("ignore", message="layer .* factorized with", category=RuntimeWarning)
            return self._run(stopped, tick, wait)

    def is_complete(self) -> bool:
        """Return whether all runs have ended and the result is stored."""
        return (self.folder / COMPLETE_FILE).exists()

    def provenance(self) -> dict[str, str]:
        """Return the machine, the versions and the date of a complete part."""
        path = self.folder / COMPLETE_FILE
        with damaged(str(path)):
            return cast("dict[str, str]", read_as(dict[str, str], read_json(path), "provenance"))

    def _mark_complete(self) -> None:
        """Store that the part is complete, with the machine, the versions and the date."""
        write_json(self.folder / COMPLETE_FILE, provenance_here(self.part.config.device))


@dataclass(frozen=True)
class AssignedStudy(Assigned):
    """A study, whose runs several processes share through its storage."""

    part: Design

    @property
    def total(self) -> int:
        return self.part.total

    @cached_property
    def study(self) -> TransferStudy:
        """The study; its storage stays open until the study is complete."""
        return TransferStudy(self.part, folder=self.folder, data_dir=self.data_dir)

    def done(self) -> int:
        if self.is_complete():
            return self.total
        if not (self.folder / DATABASE).exists():
            return 0
        return len(self.part.by_state(self.study.store.entries())[ENDED])

    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        job, store = self.study.job(), self.study.store
        if self.part.next(store.entries(), job.since) is None and not wait and self.done() < self.total:
            return True  # other processes train the runs that are left
        finished = work(job, store, data_of(self.part.config, self.data_dir), stopped, tick, wait)
        if self.done() == self.total:  # true in the process that ends the last run
            self.study.record()
            self._mark_complete()
            vars(self).pop("study")  # closes its connections
        return finished

    def result(self) -> StudyRecord:
        return thinned(StudyRecord.load(self.folder / RECORD))


@dataclass(frozen=True)
class AssignedWhole(Assigned):
    """A part that one process runs from start to end."""

    part: Checking | Regression

    @property
    def total(self) -> int:
        return len(self.part.widths) * self.part.seeds

    def done(self) -> int:
        return self.total if self.is_complete() else 0

    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, wait=wait) as acquired:
            if acquired and not self.is_complete():
                self._make(tick)
        return not stopped()

    @abstractmethod
    def _make(self, tick: Tick) -> None: ...


@dataclass(frozen=True)
class AssignedRegression(AssignedWhole):
    """Kernel regression on the features of untrained networks."""

    part: Regression

    def _make(self, tick: Tick) -> None:
        regress(self.part, data_of(self.part.config, self.data_dir)).save(self.folder / RECORD)
        self._mark_complete()

    def result(self) -> StudyRecord:
        return StudyRecord.load(self.folder / RECORD)


@dataclass(frozen=True)
class AssignedCheck(AssignedWhole):
    """A coordinate check."""

    part: Checking

    def _make(self, tick: Tick) -> None:
        part, began = self.part, time.perf_counter()
        result = check_run(
            part.config,
            widths=part.widths,
            seeds=part.seeds,
            steps=part.steps,
            dataset=data_of(part.config, self.data_dir),
            progress=lambda *_: tick(),
        )
        last = [row for row in result.record.rows if row.step == result.record.steps]
        about = {**result.record.about, "seconds": round(time.perf_counter() - began, 1)}
        kept = replace(result, record=replace(result.record, rows=tuple(last), about=about))
        write_json(self.folder / CHECK_FILE, kept.to_dict())
        self._mark_complete()

    def result(self) -> Check:
        return Check.load(self.folder / CHECK_FILE)


@lru_cache(maxsize=2)
def _data(fields: str, data_dir: str | None) -> Dataset:
    return dataset_of(RunConfig(**json.loads(fields)), None, data_dir)


def data_of(config: RunConfig, data_dir: str | None) -> Dataset:
    """Return the data of a config; the data sets used last are cached."""
    content = config.to_dict()
    fields = {name: content[name] for name in ("data", "data_options", "samples", "test_samples", "device")}
    return _data(json.dumps(fields, sort_keys=True), data_dir)
