"""The stored result of the stability matrix and of the check on fitted data, and the tables made of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from mukron import __version__
from mukron.bench.result import machine_of
from mukron.bench.stability.fitted import FITTED_PROBLEMS, LEFT_ABOVE, FittedOutcome, FittedRun
from mukron.bench.stability.problems import STABILITY_PROBLEMS
from mukron.bench.stability.rule import RULE, times_text
from mukron.bench.stability.runs import (
    CLASS_DEFAULTS,
    PLAIN_STEP,
    StabilityOutcome,
    StabilityRun,
    method_defaults,
    same_defaults,
)
from mukron.bench.stability.search import best_power, lowest_power
from mukron.optim.spec import SPECS, spec_of
from mukron.params.storage import read_json, write_json
from mukron.readers import shown
from mukron.table import Table
from mukron.typed import fields_of, read_as

STABLE, INCOMPLETE = "stable", "incomplete"


class StabilityRow(NamedTuple):
    """A row of the matrix: runs that differ in learning rate, interval and seed alone.

    Attributes:
        problem: The problem's name.
        method: The method's name.
        memory: What factors remember, as text.
        momentum: The momentum.
        settings: "defaults", "plain" or a trust.
        steps: The number of steps.

    Example:
        >>> StabilityRow("digits", "kfac", "batch", 0.9, "defaults", 200).label
        'digits, K-FAC, batch, momentum 0.9'
    """

    problem: str
    method: str
    memory: str
    momentum: float
    settings: str
    steps: int

    @property
    def label(self) -> str:
        """The row without its settings, in words."""
        return f"{self.problem}, {spec_of(self.method).title}, {self.memory}, momentum {self.momentum:g}"

    @staticmethod
    def of(run: StabilityRun) -> StabilityRow:
        """The row of a run.

        Args:
            run: The run.
        """
        return StabilityRow(run.problem, run.method, run.memory, run.momentum, run.settings, run.steps)


@dataclass(frozen=True)
class StabilityFinding:
    """What was found in a row of the matrix, at the learning rate that is best when refreshed at every step.

    Attributes:
        row: The row.
        power: The learning rate is 2 to this power.
        outcomes: By interval, what was measured; over seeds the largest growth and the mean final loss.
        missing: Intervals that were not run yet.
        first: What was found at the learning rate with the lowest final loss, stable or not: the choice of the first
            rule. None: it is the same.

    Example:
        >>> row = StabilityRow("digits", "kfac", "batch", 0.9, "defaults", 200)
        >>> fresh, stale = StabilityOutcome(2.3, 2.3, 0.1), StabilityOutcome(2.3, 9.2, 0.3)
        >>> StabilityFinding(row, -7, {1: fresh, 10: stale}).verdict
        'unstable at 10'
    """

    row: StabilityRow
    power: int
    outcomes: Mapping[int, StabilityOutcome]
    missing: tuple[int, ...] = ()
    first: StabilityFinding | None = None

    def ratio(self, every: int) -> float:
        """The final loss over that of refreshing at every step.

        Args:
            every: Steps from one refresh to the next.
        """
        return RULE.ratio(self.outcomes[every], self.outcomes[1])

    @property
    def violations(self) -> dict[int, list[str]]:
        """By interval, what the rule forbids, in words; only intervals at which the row is not stable."""
        fresh = self.outcomes[1]
        found = {every: RULE.violations(every, outcome, fresh) for every, outcome in self.outcomes.items()}
        return {every: violations for every, violations in found.items() if violations}

    @property
    def verdict(self) -> str:
        """Either "stable", or the intervals at which the row is not, or "incomplete" while that is open."""
        if self.violations:
            return f"unstable at {', '.join(map(str, self.violations))}"
        return INCOMPLETE if self.missing else STABLE

    @property
    def first_verdict(self) -> str:
        """The verdict by the first rule."""
        return self.verdict if self.first is None else self.first.verdict


@dataclass
class StabilityResult:
    """All stored runs, and where and with which defaults they were made.

    Attributes:
        commands: The commands that the runs come from.
        device: "cpu" or "cuda".
        smoke: Whether it was a quick trial.
        intervals: The refresh intervals that every row is to have.
        runs: The runs of the matrix.
        fitted: The runs on fitted data.
        defaults: By method and settings, as in "kfac, plain", what the method does where nothing else is passed.
        machine: Names of processor and GPU, numbers of cores and threads.
        versions: Versions by package.
        date: The day of the last run.

    Example:
        >>> result = new_stability_result("mukron bench stability", "cpu", smoke=False)
        >>> result.name, result.table().rows
        ('stability-cpu', ())
    """

    commands: list[str]
    device: str
    smoke: bool
    intervals: list[int] = field(default_factory=list)
    runs: dict[StabilityRun, StabilityOutcome] = field(default_factory=dict)
    fitted: dict[FittedRun, FittedOutcome] = field(default_factory=dict)
    defaults: dict[str, dict[str, str]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def name(self) -> str:
        """The name of its files, without ending."""
        return f"stability{'-smoke' if self.smoke else ''}-{self.device}"

    def save(self, folder: Path) -> Path:
        """Write all to NAME.json. A file that is there is whole at any time.

        Args:
            folder: Where to write; created if missing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {
            **{
                name: getattr(self, name)
                for name in ("commands", "device", "smoke", "intervals", "date", "machine", "versions")
            },
            "defaults": self.defaults,
            "runs": [{**asdict(run), **outcome.to_dict()} for run, outcome in self.runs.items()],
            "fitted": [{**asdict(run), "outcome": outcome.to_dict()} for run, outcome in self.fitted.items()],
        }
        write_json(path, content)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> StabilityResult:
        """Read what ``save`` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: The file cannot be read or holds something else.
        """
        try:
            data = fields_of(read_json(path), "result", "runs", "fitted")
            measured = ("initial", "largest", "final", "failed")
            result: StabilityResult = read_as(StabilityResult, {**data, "runs": {}, "fitted": {}}, "result")
            for number, entry in enumerate(read_as(list[Any], data["runs"], "runs")):
                run = dict(fields_of(entry, f"runs[{number}]", *measured))
                outcome = StabilityOutcome.from_dict({name: run.pop(name) for name in measured})
                known = read_as(StabilityRun, run, f"runs[{number}]")
                if known.problem not in STABILITY_PROBLEMS:
                    raise ValueError(f"runs[{number}]: unknown problem {shown(known.problem)}")
                result.runs[known] = outcome
            for number, entry in enumerate(read_as(list[Any], data["fitted"], "fitted")):
                fit = dict(fields_of(entry, f"fitted[{number}]", "outcome"))
                outcome_of_fit = FittedOutcome.from_dict(fit.pop("outcome"))
                fitted = read_as(FittedRun, fit, f"fitted[{number}]")
                if fitted.problem not in FITTED_PROBLEMS:
                    raise ValueError(f"fitted[{number}]: unknown problem {shown(fitted.problem)}")
                result.fitted[fitted] = outcome_of_fit
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no result of mukron bench stability could be read ({error!s:.1000})") from None
        return result

    def drop_outdated(self, method: str, settings: str) -> int:
        """Drop runs if the method does something else by now with these settings, and record what it does.

        Args:
            method: The method's name.
            settings: "defaults", "plain", or a trust as ``Trust.of`` reads it.

        Returns:
            The number of runs dropped.
        """
        before, of = len(self.runs) + len(self.fitted), (method, settings)
        key, present = f"{method}, {settings}", method_defaults(spec_of(method), settings)
        if not same_defaults(self.defaults.get(key), present):
            self.runs = {run: found for run, found in self.runs.items() if (run.method, run.settings) != of}
            self.fitted = {run: found for run, found in self.fitted.items() if (run.method, run.settings) != of}
        self.defaults[key] = present
        return before - len(self.runs) - len(self.fitted)

    def findings(self) -> list[StabilityFinding]:
        """What was found in every row that has its learning rate, in the order of problems and methods."""
        rows: dict[StabilityRow, dict[StabilityRun, StabilityOutcome]] = {}
        for run, outcome in self.runs.items():
            rows.setdefault(StabilityRow.of(run), {})[run] = outcome
        found = (row_finding(row, rows[row], self.intervals) for row in sorted(rows, key=_place))
        return [finding for finding in found if finding is not None]

    def table(self) -> Table:
        """The table of the matrix: in a cell the largest loss over the initial one, and the final loss."""
        findings = self.findings()
        intervals = sorted({every for finding in findings for every in finding.outcomes})
        lines = []
        for finding in findings:
            row, outcomes = finding.row, finding.outcomes
            cells = [row.problem, spec_of(row.method).title, row.memory, f"{row.momentum:g}", str(row.steps)]
            cells += [row.settings, f"2^{finding.power}"]
            cells += [_cell(outcomes[every]) if every in outcomes else "-" for every in intervals]
            lines.append((*cells, finding.verdict))
        columns = ["problem", "method", "memory", "momentum", "steps", "settings", "lr"]
        notes = (
            f"Stable: {RULE.text}",
            "A cell: the largest loss over the initial loss, then the final loss.",
            *(["A trial of a few steps: these verdicts say nothing of the methods."] if self.smoke else []),
        )
        columns += [*(f"every {every}" for every in intervals), "verdict"]
        return Table("Stability with stale inverses", tuple(columns), tuple(lines), notes if lines else ())

    def summary(self) -> Table:
        """The number of stable rows by problem and method: for each kind of settings, by the rule and by the first."""
        counts: dict[tuple[str, str], dict[str, list[bool]]] = {}
        for finding in self.findings():
            columns = counts.setdefault((finding.row.problem, spec_of(finding.row.method).title), {})
            verdicts = {"": finding.verdict, ", first rule": finding.first_verdict}
            for rule, verdict in verdicts.items():
                columns.setdefault(f"{finding.row.settings}{rule}", []).append(verdict == STABLE)
        names = list(dict.fromkeys(name for columns in counts.values() for name in columns))
        lines = []
        for key, columns in counts.items():
            cells = [columns.get(name, []) for name in names]
            lines.append((*key, *(f"{sum(stable)} of {len(stable)}" if stable else "-" for stable in cells)))
        return Table("Stable rows", ("problem", "method", *names), tuple(lines))

    def fitted_table(self) -> Table:
        """The table of runs on fitted data."""
        groups: dict[tuple[str, str, str, int], list[FittedOutcome]] = {}
        problems = [*FITTED_PROBLEMS]
        for run in sorted(self.fitted, key=lambda run: problems.index(run.problem)):
            key = (run.problem, spec_of(run.method).title, run.settings, run.steps)
            groups.setdefault(key, []).append(self.fitted[run])
        lines = []
        for (problem, method, settings, steps), outcomes in groups.items():
            fitted = sum(outcome.fitted is not None for outcome in outcomes)
            left = sum(outcome.left is not None for outcome in outcomes)
            above = sum(outcome.final > LEFT_ABOVE for outcome in outcomes)
            numbers = (len(outcomes), fitted, left, above)
            final = f"{median(outcome.final for outcome in outcomes):.2g}"
            lines.append((problem, method, settings, str(steps), *map(str, numbers), final))
        columns = ("problem", "method", "settings", "steps", "seeds", "fitted", "left", "end above 0.5", "median loss")
        notes = ("Fitted: the loss of all data was below 0.05. Left: it was above 0.5 after that.",) if lines else ()
        return Table("Fitted data", columns, tuple(lines), notes)


def row_finding(
    row: StabilityRow, runs: Mapping[StabilityRun, StabilityOutcome], intervals: Sequence[int]
) -> StabilityFinding | None:
    """Return what was found in a row, or None while its learning rate is not known.

    Args:
        row: The row.
        runs: All its runs.
        intervals: The intervals that it is to have.

    Returns:
        The finding; it has the intervals that were run at the best learning rate with all seeds.

    Example:
        >>> row = StabilityRow("digits", "kfac", "batch", 0.0, "plain", 200)
        >>> run = StabilityRun("digits", "kfac", "plain", "batch", 0.0, every=1, power=-7, seed=0, steps=200)
        >>> finding = row_finding(row, {run: StabilityOutcome(2.3, 2.3, 0.1)}, intervals=(1, 10))
        >>> finding.power, finding.verdict
        (-7, 'incomplete')
    """
    by_place: dict[tuple[int, int], dict[int, StabilityOutcome]] = {}
    for run, outcome in runs.items():
        by_place.setdefault((run.every, run.power), {})[run.seed] = outcome
    fresh = {power: seeds for (every, power), seeds in by_place.items() if every == 1}
    if not fresh:
        return None
    most = max(map(len, fresh.values()))  # a run with more seeds may have been interrupted
    outcomes = {power: over_seeds(seeds) for power, seeds in fresh.items() if len(seeds) == most}

    def finding(chosen: int, first: StabilityFinding | None = None) -> StabilityFinding:
        places = {every: seeds for (every, power), seeds in sorted(by_place.items()) if power == chosen}
        complete = {every: over_seeds(seeds) for every, seeds in places.items() if len(seeds) == most}
        missing = tuple(every for every in intervals if every not in complete)
        return StabilityFinding(row, chosen, complete, missing, first)

    best, lowest = best_power(outcomes), lowest_power(outcomes)
    return finding(best, None if lowest == best else finding(lowest))


def over_seeds(outcomes: Mapping[int, StabilityOutcome]) -> StabilityOutcome:
    """Summarize a run over seeds: the largest growth, the mean final loss."""
    worst = max(outcomes.values(), key=lambda outcome: outcome.growth)
    failed = next((outcome.failed for outcome in outcomes.values() if outcome.failed), "")
    return StabilityOutcome(worst.initial, worst.largest, fmean(o.final for o in outcomes.values()), failed)


def _place(row: StabilityRow) -> tuple[object, ...]:
    """Where a row stands in tables, whatever was run first: settings beside each other."""
    problem, method = [*STABILITY_PROBLEMS].index(row.problem), [*SPECS].index(spec_of(row.method).name)
    settings = (row.settings != CLASS_DEFAULTS, row.settings != PLAIN_STEP, row.settings)
    return problem, row.steps, method, row.memory, row.momentum, settings


def _cell(outcome: StabilityOutcome) -> str:
    final = f"{outcome.final:.3f}" if outcome.final < 1000 else f"{outcome.final:.0e}"
    return f"{times_text(outcome.growth)} {final}"


def new_stability_result(command: str, device: str, smoke: bool) -> StabilityResult:
    """Return a result without runs, with this machine and today's date.

    Args:
        command: The command that runs it again.
        device: "cpu" or "cuda".
        smoke: Whether it is a quick trial.

    Returns:
        The result.

    Example:
        >>> new_stability_result("mukron bench stability --smoke", "cpu", smoke=True).name
        'stability-smoke-cpu'
    """
    versions = {"mukron": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    today = datetime.now(timezone.utc).date().isoformat()
    return StabilityResult([command], device, smoke, machine=machine_of(device), versions=versions, date=today)
