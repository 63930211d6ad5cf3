"""Run recipes: every part once, by one process or by many, resumable; then judge, draw and keep.

Read downwards:  recipes -> parts -> workers walk along the parts -> a recipe whose parts are all there is concluded.

Parts live in FOLDER/runs/KEY, named by what they run: recipes share them, and a second command goes on where the first
was stopped. What is concluded lives in FOLDER/NAME.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mukron.diagnose.check import Check
from mukron.paper.errors import ReproductionError
from mukron.paper.evidence import Evidence
from mukron.paper.outcome import RESULT_FILE, Outcome, judge_claims, keep, provenance_here
from mukron.paper.parts import Assigned, AssignedCheck, AssignedRegression, AssignedStudy
from mukron.paper.recipe import RECIPES, Checking, Experiment, Less, Part, Regression, Scale, key_of
from mukron.readers import nearest
from mukron.study.transfer import LOG
from mukron.workers.exits import STOPPED
from mukron.workers.foreman import Foreman
from mukron.workers.interrupts import Stopped, interruptible
from mukron.workers.progress import Reporter
from mukron.workers.worker import Tick, WorkerTask, serve

PARTS_FOLDER = "runs"
REPORT_INTERVAL = 1.0  # seconds between two reports
DEATHS = 10  # workers that are replaced; what is left then is run by this process


@dataclass(frozen=True)
class Request:
    """What is to be reproduced, and where.

    Attributes:
        names: The recipes.
        scale: The size of the runs.
        folder: Where results are kept.
        less: What is made smaller than the scale.
        device: A device of torch.
        data_dir: Where data sets are kept; None: the usual folder.

    Example:
        >>> Request(("abc-parametrization",), Scale.SMOKE, "results").command("abc-parametrization")
        'mukron reproduce abc-parametrization --scale smoke'
    """

    names: tuple[str, ...]
    scale: Scale
    folder: str
    less: Less = field(default_factory=Less)
    device: str = "cpu"
    data_dir: str | None = None

    def experiments(self) -> dict[str, Experiment]:
        """Return the parts of every recipe; refuse unknown recipes and results of another size."""
        if unknown := [name for name in self.names if name not in RECIPES]:
            hint = nearest(unknown[0], RECIPES)
            raise ReproductionError(
                f"no recipe is called {', '.join(unknown)}{hint}; mukron reproduce --list names them all"
            )
        experiments = {name: RECIPES[name].experiment(self.scale, self.less, self.device) for name in self.names}
        for name in self.names:
            self._refuse_another(name)
        return experiments

    def _refuse_another(self, name: str) -> None:
        """A result of the same recipe, but of another size, is not overwritten."""
        folder = Path(self.folder) / name
        if not (folder / RESULT_FILE).exists():
            return
        kept = Outcome.load(folder)
        if (kept.scale, kept.less) != (self.scale.value, self.reduced(name)):
            size = kept.scale + (f", reduced: {kept.less}" if kept.less else "")
            raise ReproductionError(f"{folder}: holds a result of another size ({size}); choose another folder (--out)")

    def reduced(self, name: str) -> str:
        """How the recipe is smaller than its scale, in words; nothing where it is not.

        Args:
            name: The recipe.
        """
        whole, smaller = (RECIPES[name].experiment(self.scale, less, self.device).parts for less in (None, self.less))
        return "" if whole == smaller else self.less.words()

    def parts(self) -> list[Assigned]:
        """All parts in the order of the recipes; a part that several recipes share is there once."""
        parts: dict[str, Assigned] = {}
        for name, experiment in self.experiments().items():
            for title, part in experiment.parts.items():
                parts.setdefault(key_of(part), self._assigned(f"{name}: {title}", part))
        return list(parts.values())

    def _assigned(self, title: str, part: Part) -> Assigned:
        folder = Path(self.folder) / PARTS_FOLDER / key_of(part)
        if isinstance(part, Checking):
            return AssignedCheck(title, part, folder, self.data_dir)
        if isinstance(part, Regression):
            return AssignedRegression(title, part, folder, self.data_dir)
        return AssignedStudy(title, part, folder, self.data_dir)

    def command(self, name: str) -> str:
        """The command that runs one of the recipes again, wherever data and results are kept.

        Args:
            name: The recipe.
        """
        words = ["mukron", "reproduce", name, "--scale", self.scale.value]
        words += ["--device", self.device] if self.device != "cpu" else []
        return " ".join([*words, *self.less.options()])

    def to_dict(self) -> dict[str, Any]:
        """Return the request as plain data for JSON."""
        return {**asdict(self), "scale": self.scale.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """Read what ``to_dict`` returned.

        Args:
            data: What ``to_dict`` returned.
        """
        less = data["less"]
        widths = None if less["widths"] is None else tuple(less["widths"])
        plain = {
            "names": tuple(data["names"]),
            "scale": Scale(data["scale"]),
            "less": Less(**{**less, "widths": widths}),
        }
        return cls(**{**data, **plain})


@dataclass(frozen=True)
class ReproductionProgress:
    """How much of the recipes is run.

    Attributes:
        parts: Parts that are complete.
        of_parts: All parts.
        runs: Runs that have ended.
        of_runs: All runs.
        now: The title of the first part that is not complete.

    Example:
        >>> ReproductionProgress(parts=1, of_parts=4, runs=10, of_runs=40, now="MLP").of_runs
        40
    """

    parts: int
    of_parts: int
    runs: int
    of_runs: int
    now: str


# All of it.


def reproduce(
    request: Request,
    *,
    workers: int = 1,
    progress: Callable[[ReproductionProgress], None] | None = None,
    concluded: Callable[[Outcome, list[Path]], None] | None = None,
) -> dict[str, Outcome]:
    """Run the parts of recipes that were not run yet, and conclude every recipe. Ctrl-C stops it; nothing is lost.

    Args:
        request: The recipes, their size, and where results are kept.
        workers: Processes on this machine.
        progress: Called now and then with how much is run.
        concluded: Called with every outcome and its files as soon as the recipe's parts are complete.

    Returns:
        The outcomes by the names of the recipes.

    Raises:
        ReproductionError: The request is wrong, or runs are missing since their workers died every time.
        RuntimeError: A worker broke.
        KeyboardInterrupt: It was stopped. Call it again to continue.

    Example:
        >>> request = Request(("abc-parametrization",), Scale.SMOKE, "results")
        >>> outcomes = reproduce(request)
        >>> list(outcomes)
        ['abc-parametrization']
    """
    if workers < 1:
        raise ReproductionError(f"workers: at least 1, got {workers}")
    book = Book(request, concluded)
    report = Reporter(progress, book.standing, REPORT_INTERVAL)
    with interruptible(terminate=True) as stopped:
        if workers > 1:

            def look() -> None:
                book.conclude()
                report()

            RecipeForeman(request, workers).run(stopped, look)
        book.conclude()
        for assigned in book.parts:  # all of them, or what dead workers left
            if stopped() or not assigned.run(stopped, report, wait=True):
                raise KeyboardInterrupt
            book.conclude()
    report(now=True)
    missing = [name for name in request.names if name not in book.outcomes]
    if missing:
        left = next(assigned for assigned in book.parts if not assigned.is_complete())
        raise ReproductionError(f"{left.title}: runs are missing, as their workers died every time (out of memory?)")
    return book.outcomes


class Book:
    """Tracks which parts are complete, and concludes the recipes whose parts all are."""

    def __init__(self, request: Request, concluded: Callable[[Outcome, list[Path]], None] | None) -> None:
        self.request, self.concluded = request, concluded
        self.experiments, self.parts = request.experiments(), request.parts()
        self.by_key = {assigned.folder.name: assigned for assigned in self.parts}
        self.outcomes: dict[str, Outcome] = {}
        self._complete: set[str] = set()

    def is_complete(self, assigned: Assigned) -> bool:
        key = assigned.folder.name
        if key not in self._complete and assigned.is_complete():
            self._complete.add(key)
        return key in self._complete

    def conclude(self) -> None:
        """Conclude recipes in order, up to the first that has an incomplete part: parts are run in the same order."""
        for name, experiment in self.experiments.items():
            if name in self.outcomes:
                continue
            mine = [self.by_key[key_of(part)] for part in experiment.parts.values()]
            if not all(self.is_complete(assigned) for assigned in mine):
                return
            evidence = Evidence(
                {title: assigned.result() for title, assigned in zip(experiment.parts, mine, strict=True)}
            )
            self._conclude(name, experiment, evidence, _made(mine, self.request.device))

    def _conclude(self, name: str, experiment: Experiment, evidence: Evidence, made: dict[str, str]) -> None:
        request = self.request
        made = {"command": request.command(name), **made, "runs": _runs(evidence)}
        outcome = judge_claims(name, request.scale.value, request.reduced(name), experiment, evidence, made)
        self.outcomes[name] = outcome
        written = keep(outcome, experiment, evidence, Path(request.folder) / name)
        if self.concluded is not None:
            self.concluded(outcome, written)

    def standing(self) -> ReproductionProgress:
        waiting = [assigned for assigned in self.parts if not self.is_complete(assigned)]
        left = sum(assigned.total for assigned in waiting)
        first = waiting[0] if waiting else None
        total = sum(assigned.total for assigned in self.parts)
        done = total - left + (first.done() if first else 0)
        return ReproductionProgress(
            len(self.parts) - len(waiting), len(self.parts), done, total, first.title if first else ""
        )


def _made(parts: Sequence[Assigned], device: str) -> dict[str, str]:
    """Return where and when the parts were run; several machines may have shared them."""
    provenances = [assigned.provenance() for assigned in parts] or [provenance_here(device)]
    dates = [provenance["date"] for provenance in provenances if "date" in provenance]
    joined = {
        name: "; ".join(dict.fromkeys(text for provenance in provenances if (text := provenance.get(name))))
        for name in ("machine", "versions", "commit")
    }
    return {**joined, "date": max(dates, default="")}


def _runs(evidence: Evidence) -> str:
    """Return the number of runs by status, and their total time, as text."""
    count: Counter[str] = Counter()
    for part_result in evidence.values():
        if isinstance(part_result, Check):
            count["steps of a check"] += len({(row.width, row.seed) for row in part_result.record.rows})
            continue
        for result in part_result.results:
            count[result.status] += 1
    text = ", ".join(f"{number} {status}" for status, number in count.items()) or "none: theory alone"
    return text + (f"; {evidence.seconds:.0f} s of training" if evidence.minutes else "")


# Workers.


class RecipeForeman(Foreman):
    """Has the parts run by several processes. What is left after many deaths is run by this process."""

    def __init__(self, request: Request, workers: int) -> None:
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__("mukron.paper", request.to_dict(), workers, folder / LOG)
        self.deaths = 0

    def replaces(self, process_id: int, code: int) -> bool:
        if code == STOPPED:
            return False
        self.deaths += 1
        return self.deaths <= DEATHS

    def refusal(self, text: str) -> ReproductionError:
        return ReproductionError(text)


def main() -> int:
    """Run a worker process and return its exit code."""
    return serve(sys.stdin, _work_on_task)


def _work_on_task(task: WorkerTask, stopped: Stopped, tick: Tick) -> bool:
    return walk(Request.from_dict(task).parts(), stopped, tick)


def walk(parts: Sequence[Assigned], stopped: Stopped, tick: Tick) -> bool:
    """Along all parts, taking what nobody else has; then once more, waiting for the others and their deaths."""
    return all(assigned.run(stopped, tick, wait) for wait in (False, True) for assigned in parts)
