"""The parts of recipes as they are run: studies and coordinate checks, each in a folder named by what it runs."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from pathlib import Path
from typing import cast

from mukron.data import Dataset
from mukron.diagnose.check import Check
from mukron.diagnose.configured import check_run
from mukron.paper.outcome import thinned
from mukron.paper.recipe import Checking, Part, PartResult
from mukron.params.storage import read_json, write_json
from mukron.study.design import Design
from mukron.study.record import StudyRecord
from mukron.study.store import ENDED
from mukron.study.transfer import DATABASE, RECORD, TransferStudy
from mukron.study.work import work
from mukron.train import RunConfig, dataset_of
from mukron.workers.interrupts import Stopped
from mukron.workers.locks import locked
from mukron.workers.machine import describe_machine
from mukron.workers.worker import Tick

CHECK_FILE, OVER = "check.json", "over.json"


@dataclass(frozen=True)
class Assigned(ABC):
    """A part and its folder."""

    title: str
    part: Part
    folder: Path
    data_dir: str | None

    @property
    @abstractmethod
    def total(self) -> int:
        """Runs."""

    @abstractmethod
    def done(self) -> int:
        """Runs that have ended."""

    @abstractmethod
    def found(self) -> PartResult:
        """What it found, once it is over."""

    @abstractmethod
    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool: ...

    def run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        """What nobody else runs; False if it was stopped."""
        if self.over():
            return True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="output layer", category=UserWarning)  # it is what is shown
            warnings.filterwarnings("ignore", message="layer .* factorized with", category=RuntimeWarning)  # so is this
            return self._run(stopped, tick, wait)

    def over(self) -> bool:
        """Whether all of it was run, and what it found is kept."""
        return (self.folder / OVER).exists()

    def made(self) -> dict[str, str]:
        """Where and when it was run."""
        return cast("dict[str, str]", read_json(self.folder / OVER))

    def _write_down(self) -> None:
        """That it is over, and on which machine it was run."""
        made = describe_machine(self.part.config.device)
        made["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        write_json(self.folder / OVER, made)


@dataclass(frozen=True)
class AssignedStudy(Assigned):
    """Runs from a storage that several processes share."""

    part: Design

    @property
    def total(self) -> int:
        return self.part.total

    @cached_property
    def study(self) -> TransferStudy:
        """Opened once, until it is over."""
        return TransferStudy(self.part, folder=self.folder, data_dir=self.data_dir)

    def done(self) -> int:
        if self.over():
            return self.total
        if not (self.folder / DATABASE).exists():
            return 0
        return len(self.part.standing(self.study.store.entries())[ENDED])

    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        job, store = self.study.job(), self.study.store
        if self.part.next(store.entries(), job.since) is None and not wait and self.done() < self.total:
            return True  # others are at it
        on = work(job, store, data_of(self.part.config, self.data_dir), stopped, tick, wait)
        if self.done() == self.total:  # whoever ends the last run
            self.study.record()
            self._write_down()
            vars(self).pop("study")  # and its connections
        return on

    def found(self) -> StudyRecord:
        return thinned(StudyRecord.load(self.folder / RECORD))


@dataclass(frozen=True)
class AssignedCheck(Assigned):
    """A coordinate check, by one process from its start to its end."""

    part: Checking

    @property
    def total(self) -> int:
        return len(self.part.widths) * self.part.seeds

    def done(self) -> int:
        return self.total if self.over() else 0

    def _run(self, stopped: Stopped, tick: Tick, wait: bool) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, wait=wait) as ours:
            if ours and not self.over():
                self._check(tick)
        return not stopped()

    def _check(self, tick: Tick) -> None:
        part = self.part
        result = check_run(
            part.config,
            widths=part.widths,
            seeds=part.seeds,
            steps=part.steps,
            dataset=data_of(part.config, self.data_dir),
            progress=lambda *_: tick(),
        )
        last = [row for row in result.record.rows if row.step == result.record.steps]
        kept = replace(result, record=replace(result.record, rows=tuple(last)))
        write_json(self.folder / CHECK_FILE, kept.to_dict())
        self._write_down()

    def found(self) -> Check:
        return Check.load(self.folder / CHECK_FILE)


@lru_cache(maxsize=2)
def _data(fields: str, data_dir: str | None) -> Dataset:
    return dataset_of(RunConfig(**json.loads(fields)), None, data_dir)


def data_of(config: RunConfig, data_dir: str | None) -> Dataset:
    """The config's samples; those used last are still there."""
    content = config.to_dict()
    fields = {name: content[name] for name in ("data", "data_options", "samples", "test_samples", "device")}
    return _data(json.dumps(fields, sort_keys=True), data_dir)
