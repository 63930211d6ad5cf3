"""Run recipes: every part once, by one process or by many, resumable; then judge, draw and keep.

Read downwards:  recipes -> parts -> workers walk along the parts -> a recipe whose parts are all there is concluded.

Parts live in FOLDER/runs/KEY, named by what they run: recipes share them, and a second command goes on where the first
was stopped. What is concluded lives in FOLDER/NAME.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from mukron.data import Dataset
from mukron.diagnose.check import Check
from mukron.diagnose.configured import check_run
from mukron.paper.errors import ReproductionError
from mukron.paper.outcome import RESULT_FILE, Outcome, judge_claims, keep, thinned
from mukron.paper.recipe import RECIPES, Checking, Evidence, Experiment, Less, Part, PartResult, Scale, key_of
from mukron.params.storage import read_json, write_json
from mukron.study.design import Design
from mukron.study.record import StudyRecord
from mukron.study.store import ENDED
from mukron.study.transfer import DATABASE, RECORD, TransferStudy, machine
from mukron.study.work import as_worker, cores, ctrl_c, work
from mukron.train import RunConfig, dataset_of

RUNS, LOG, CHECK_FILE, OVER = "runs", "workers.log", "check.json", "over.json"
IDLE = 1.0  # seconds between two looks
DEATHS = 10  # workers that are replaced; what is left then is run by this process


@dataclass(frozen=True)
class Request:
    """What is to be reproduced, and where."""

    names: tuple[str, ...]
    scale: Scale
    folder: str
    less: Less = field(default_factory=Less)
    device: str = "cpu"
    data_dir: str | None = None

    def experiments(self) -> dict[str, Experiment]:
        if unknown := [name for name in self.names if name not in RECIPES]:
            raise ReproductionError(f"no recipe is called {', '.join(unknown)}; mukron reproduce --list names them all")
        found = {name: RECIPES[name].experiment(self.scale, self.less, self.device) for name in self.names}
        for name in self.names:
            self._refuse_another(name)
        return found

    def _refuse_another(self, name: str) -> None:
        """A result of the same recipe, but of another size, is not overwritten."""
        folder = Path(self.folder) / name
        if not (folder / RESULT_FILE).exists():
            return
        there = Outcome.load(folder)
        if (there.scale, there.less) != (self.scale.value, self.reduced(name)):
            size = there.scale + (f", reduced: {there.less}" if there.less else "")
            raise ReproductionError(f"{folder}: holds a result of another size ({size}); choose another folder (--out)")

    def reduced(self, name: str) -> str:
        """How the recipe is smaller than its scale, in words; nothing where it is not."""
        whole, less = (RECIPES[name].experiment(self.scale, each, self.device).parts for each in (None, self.less))
        return "" if whole == less else self.less.words()

    def parts(self) -> list[Assigned]:
        """In the order of the recipes; one that several have is there once."""
        found: dict[str, Assigned] = {}
        for name, experiment in self.experiments().items():
            for title, part in experiment.parts.items():
                found.setdefault(key_of(part), self._assigned(f"{name}: {title}", part))
        return list(found.values())

    def _assigned(self, title: str, part: Part) -> Assigned:
        folder = Path(self.folder) / RUNS / key_of(part)
        if isinstance(part, Checking):
            return AssignedCheck(title, part, folder, self.data_dir)
        return AssignedStudy(title, part, folder, self.data_dir)

    def command(self, name: str) -> str:
        """What runs one of the recipes again, wherever data and results are kept."""
        said = ["mukron", "reproduce", name, "--scale", self.scale.value]
        said += ["--device", self.device] if self.device != "cpu" else []
        return " ".join([*said, *self.less.options()])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scale": self.scale.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        less = data["less"]
        widths = None if less["widths"] is None else tuple(less["widths"])
        plain = {
            "names": tuple(data["names"]),
            "scale": Scale(data["scale"]),
            "less": Less(**{**less, "widths": widths}),
        }
        return cls(**{**data, **plain})


@dataclass(frozen=True)
class Progress:
    """Where it stands."""

    parts: int
    of_parts: int
    runs: int
    of_runs: int
    now: str  # the first part that is not over


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
    def _run(self, stopped: Callable[[], bool], tell: Callable[[], None], wait: bool) -> bool: ...

    def run(self, stopped: Callable[[], bool], tell: Callable[[], None], wait: bool) -> bool:
        """What nobody else runs; False if it was stopped."""
        if self.over():
            return True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="output layer", category=UserWarning)  # it is what is shown
            warnings.filterwarnings("ignore", message="layer .* factorized with", category=RuntimeWarning)  # so is this
            return self._run(stopped, tell, wait)

    def over(self) -> bool:
        """Whether all of it was run, and what it found is kept."""
        return (self.folder / OVER).exists()

    def made(self) -> dict[str, str]:
        """Where and when it was run."""
        return cast("dict[str, str]", read_json(self.folder / OVER))

    def _write_down(self) -> None:
        """That it is over, and on which machine it was run."""
        made = machine(self.part.config.device)
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
        design = self.part
        return TransferStudy(
            design.config,
            widths=design.widths,
            lr=design.lr,
            damping=design.damping,
            schemes=design.schemes,
            seeds=design.seeds,
            metric=design.metric,
            folder=self.folder,
            data_dir=self.data_dir,
        )

    def done(self) -> int:
        if self.over():
            return self.total
        if not (self.folder / DATABASE).exists():
            return 0
        return len(self.part.standing(self.study.store.entries())[ENDED])

    def _run(self, stopped: Callable[[], bool], tell: Callable[[], None], wait: bool) -> bool:
        job, store = self.study.job(), self.study.store
        if self.part.next(store.entries(), job.since) is None and not wait and self.done() < self.total:
            return True  # others are at it
        on = work(job, store, data_of(self.part.config, self.data_dir), stopped, tell, wait)
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

    def _run(self, stopped: Callable[[], bool], tell: Callable[[], None], wait: bool) -> bool:
        with _alone(self.folder, wait) as ours:
            if ours and not self.over():
                self._check(tell)
        return not stopped()

    def _check(self, tell: Callable[[], None]) -> None:
        part = self.part
        result = check_run(
            part.config,
            widths=part.widths,
            seeds=part.seeds,
            steps=part.steps,
            dataset=data_of(part.config, self.data_dir),
            progress=lambda *_: tell(),
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


@contextmanager
def _alone(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether no other process is at this check; the lock goes with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


# All of it.


def reproduce(
    request: Request,
    *,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
    concluded: Callable[[Outcome, list[Path]], None] | None = None,
) -> dict[str, Outcome]:
    """Run what is not there yet, conclude every recipe, and return what each found. Ctrl-C stops it; nothing is lost.

    concluded: called with each outcome and its files as soon as the recipe's parts are all there.
    """
    if workers < 1:
        raise ReproductionError(f"workers: at least 1, got {workers}")
    book = Book(request, concluded)
    tell = _teller(book, progress)
    with ctrl_c() as stopped:
        if workers > 1:

            def look() -> None:
                book.conclude()
                tell()

            _employ(request, workers, stopped, look)
        book.conclude()
        for assigned in book.parts:  # all of them, or what dead workers left
            if stopped() or not assigned.run(stopped, tell, wait=True):
                raise KeyboardInterrupt
            book.conclude()
    tell(True)
    missing = [name for name in request.names if name not in book.outcomes]
    if missing:
        left = next(assigned for assigned in book.parts if not assigned.over())
        raise ReproductionError(f"{left.title}: runs are missing, as their workers died every time (out of memory?)")
    return book.outcomes


class Book:
    """Which parts are there, and what was concluded from them."""

    def __init__(self, request: Request, concluded: Callable[[Outcome, list[Path]], None] | None) -> None:
        self.request, self.concluded = request, concluded
        self.experiments, self.parts = request.experiments(), request.parts()
        self.by_key = {assigned.folder.name: assigned for assigned in self.parts}
        self.outcomes: dict[str, Outcome] = {}
        self.began = time.monotonic()
        self._over: set[str] = set()

    def over(self, assigned: Assigned) -> bool:
        key = assigned.folder.name
        if key not in self._over and assigned.over():
            self._over.add(key)
        return key in self._over

    def conclude(self) -> None:
        """Every recipe whose parts are all there. They are run in order: after a missing one, none is looked at."""
        for name, experiment in self.experiments.items():
            if name in self.outcomes:
                continue
            mine = [self.by_key[key_of(part)] for part in experiment.parts.values()]
            if not all(self.over(assigned) for assigned in mine):
                return
            evidence = Evidence({title: each.found() for title, each in zip(experiment.parts, mine, strict=True)})
            self._conclude(name, experiment, evidence, _made(mine, self.request.device))

    def _conclude(self, name: str, experiment: Experiment, evidence: Evidence, made: dict[str, str]) -> None:
        request = self.request
        made = {"command": request.command(name), **made, "runs": _runs(evidence)}
        outcome = judge_claims(name, request.scale.value, request.reduced(name), experiment, evidence, made)
        self.outcomes[name] = outcome
        written = keep(outcome, experiment, evidence, Path(request.folder) / name)
        if self.concluded is not None:
            self.concluded(outcome, written)

    def standing(self) -> Progress:
        waiting = [assigned for assigned in self.parts if not self.over(assigned)]
        left = sum(assigned.total for assigned in waiting)
        first = waiting[0] if waiting else None
        total = sum(assigned.total for assigned in self.parts)
        done = total - left + (first.done() if first else 0)
        return Progress(len(self.parts) - len(waiting), len(self.parts), done, total, first.title if first else "")


def _made(parts: Sequence[Assigned], device: str) -> dict[str, str]:
    """Where and when the parts were run: several machines may have had their share."""
    found = [assigned.made() for assigned in parts] or [machine(device)]
    dates = [each["date"] for each in found if "date" in each]
    said = {name: "; ".join(dict.fromkeys(each[name] for each in found)) for name in ("machine", "versions")}
    return {**said, "date": max(dates, default=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))}


def _runs(evidence: Evidence) -> str:
    """How many there were, and how long they took together."""
    count: Counter[str] = Counter()
    seconds = 0.0
    for found in evidence.values():
        if isinstance(found, Check):
            count["steps of a check"] += len({(row.width, row.seed) for row in found.record.rows})
            continue
        for result in found.results:
            count[result.status] += 1
            seconds += result.seconds
    said = ", ".join(f"{number} {status}" for status, number in count.items()) or "none: theory alone"
    return said + (f"; {seconds:.0f} s of training" if seconds else "")


def _teller(book: Book, progress: Callable[[Progress], None] | None) -> Callable[..., None]:
    last = 0.0

    def tell(now: bool = False) -> None:
        nonlocal last
        if progress is not None and (now or time.monotonic() - last > IDLE):
            progress(book.standing())
            last = time.monotonic()

    return tell


# Workers.


def _employ(request: Request, workers: int, stopped: Callable[[], bool], look: Callable[[], None]) -> None:
    """Have the parts run by so many processes. One that is killed is replaced; an error of one ends all."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"request": request.to_dict(), "path": sys.path, "parent": os.getpid()}
    content["threads"] = max(1, cores() // workers)
    log = folder / LOG
    said_before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-m", "mukron.paper", json.dumps(content)]
    processes: list[subprocess.Popen[bytes]] = []

    def hire() -> None:
        with log.open("ab") as file:  # a session of its own: Ctrl-C reaches the foreman alone
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        processes.append(process)

    try:
        for _ in range(workers):
            hire()
        while not stopped():
            codes = [process.poll() for process in processes]
            killed = min(sum(code not in (None, 0, 130) for code in codes), DEATHS)
            if set(codes) & {2, 3} or (None not in codes and len(processes) == workers + killed):
                break
            if len(processes) < workers + killed:
                hire()
            look()
            time.sleep(IDLE)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in processes:
            _end(process)
    if any(process.returncode in (2, 3) for process in processes):
        text = log.read_bytes()[said_before:].decode(errors="replace").strip()
        if any(process.returncode == 3 for process in processes):
            raise RuntimeError(f"a worker broke; {log} has all it said:\n{text[-2000:]}")
        raise ReproductionError(text.rpartition("error: ")[2])


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(text: str) -> int:
    """A worker process."""
    content = json.loads(text)

    def do(stopped: Callable[[], bool], tell: Callable[[], None]) -> bool:
        return walk(Request.from_dict(content["request"]).parts(), stopped, tell)

    return as_worker(do, content["path"], content["parent"], content["threads"])


def walk(parts: Sequence[Assigned], stopped: Callable[[], bool], tell: Callable[[], None]) -> bool:
    """Along all parts, taking what nobody else has; then once more, waiting for the others and their deaths."""
    return all(assigned.run(stopped, tell, wait) for wait in (False, True) for assigned in parts)
