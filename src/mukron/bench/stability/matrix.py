"""All runs of the stability matrix and of the check on fitted data, one after the other; each is stored at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from threading import Lock

from mukron.bench.measure import check_device
from mukron.bench.stability.fitted import FITTED_PROBLEMS, FITTED_SEEDS, FITTED_STEPS, FittedRun, train_fitted
from mukron.bench.stability.problems import SMOKE_SAMPLES, STABILITY_PROBLEMS, StabilityProblem
from mukron.bench.stability.result import (
    StabilityResult,
    StabilityRow,
    new_stability_result,
    over_seeds,
    row_finding,
)
from mukron.bench.stability.rule import RULE
from mukron.bench.stability.runs import (
    CLASS_DEFAULTS,
    PLAIN_STEP,
    StabilityOutcome,
    StabilityRun,
    settings_arguments,
    train_run,
)
from mukron.bench.stability.search import best_power, first_powers, lowest_power, next_power
from mukron.data import DataError, Split
from mukron.optim.spec import SPECS, spec_of
from mukron.workers.pool import WorkerPool
from mukron.workers.progress import TimeLeft

Say = Callable[[str], None]
REFRESHED = ("kfac", "foof", "shampoo")  # methods with factors that are kept
SMOKE_FITTED = {"steps": 10, "seeds": 2}


@dataclass(frozen=True)
class StabilityOptions:
    """What to run.

    Attributes:
        problems: Names of problems.
        methods: Names of methods.
        settings: "defaults", "plain" (``trust=None``), or trusts as ``Trust.of`` reads them.
        memories: What factors remember, as texts.
        momenta: Momenta, as plain numbers.
        intervals: Steps from one refresh of the inverses to the next; the first is 1.
        steps: The number of steps. None: each problem's own.
        seeds: The number of seeds.
        device: "cpu" or "cuda".
        data_folder: Where data sets are. None: as ``mukron.data.data_folder`` says.
        smoke: Narrow networks, a few steps, one memory and momentum, two intervals, no search beyond the first grid.
        extends: Whether the grid of learning rates grows while the best one lies on its edge.
        workers: The number of processes; each trains one run at a time.

    Raises:
        ValueError: A name is not known, or there is no such device.

    Example:
        >>> StabilityOptions(("digits",), ("kfac",)).intervals
        (1, 5, 10, 50)
        >>> StabilityOptions(("digits",), ("kfac",)).for_smoke().intervals
        (1, 5)
    """

    problems: tuple[str, ...] = tuple(STABILITY_PROBLEMS)
    methods: tuple[str, ...] = REFRESHED
    settings: tuple[str, ...] = (CLASS_DEFAULTS, PLAIN_STEP)
    memories: tuple[str, ...] = ("batch", "ema:0.95", "sum")
    momenta: tuple[float, ...] = (0.0, 0.9)
    intervals: tuple[int, ...] = (1, 5, 10, 50)
    steps: int | None = None
    seeds: int = 1
    device: str = "cpu"
    data_folder: Path | None = None
    smoke: bool = False
    extends: bool = True
    workers: int = 1

    def __post_init__(self) -> None:
        _check_known("--problems", self.problems, STABILITY_PROBLEMS)
        _check_known("--methods", self.methods, REFRESHED)
        check_device(self.device)
        for settings in self.settings:
            settings_arguments(settings)

    def for_smoke(self) -> StabilityOptions:
        """The same problems and methods at a tiny scale."""
        memories, momenta, intervals = self.memories[-2:-1], self.momenta[-1:], self.intervals[:2]
        return replace(self, memories=memories, momenta=momenta, intervals=intervals, smoke=True, extends=False)


class StabilityMatrix:
    """Runs the matrix, row by row, and stores every run at once.

    Args:
        options: What to run.
        result: Where runs are added; those that it has are not repeated.
        folder: Where the result is saved.
        say: Is told what was done, in lines.

    Example:
        >>> result = new_stability_result("mukron bench stability --smoke", "cpu", smoke=True)
        >>> options = StabilityOptions(("digits",), ("foof",), ("plain",)).for_smoke()
        >>> StabilityMatrix(options, result, Path("bench"), say=lambda line: None).run()
        >>> len(result.findings())
        1
    """

    def __init__(self, options: StabilityOptions, result: StabilityResult, folder: Path, say: Say) -> None:
        self.options, self.result, self.folder, self.say = options, result, folder, say
        self.lock = Lock()  # of the result: rows come from several threads

    def run(self) -> None:
        """Run what is not stored yet."""
        options = self.options
        drop_outdated(self.result, options.methods, options.settings, self.say)
        self.result.intervals = sorted({*self.result.intervals, *options.intervals})
        kinds = [*product(options.methods, options.memories, options.momenta, options.settings)]
        rows: list[StabilityRun] = []
        for name in options.problems:
            problem = stability_problem(name, options.smoke)
            try:
                stability_data(name, options.smoke, options.data_folder, options.device)
            except DataError as error:
                self.say(f"{name} is skipped, its data are not here: {error}")
                continue
            self.say(f"{name}: {problem.title}; {len(kinds)} rows")
            steps = options.steps or problem.steps
            for method, memory, momentum, settings in kinds:
                rows.append(StabilityRun(name, method, settings, memory, momentum, 1, 0, 0, steps))
        with WorkerPool(options.workers) as pool:
            self.pool, self.time_left = pool, TimeLeft(len(rows))
            pool.for_each(rows, self._row)

    def _summary(self, row: StabilityRow) -> str:
        runs = {run: outcome for run, outcome in self.result.runs.items() if StabilityRow.of(run) == row}
        finding = row_finding(row, runs, self.options.intervals)
        assert finding is not None
        details = [f"every {every}: {', '.join(found)}" for every, found in finding.violations.items()]
        return f"{row.label}, {row.settings}, lr 2^{finding.power}: {'; '.join(details) or finding.verdict}"

    def _row(self, first: StabilityRun) -> None:
        """Find the learning rate at an interval of 1, then run the other intervals with it."""
        fresh: dict[int, StabilityOutcome] = {}
        powers = list(first_powers(spec_of(first.method).rates(settings_arguments(first.settings))))
        while powers:
            power = powers.pop(0)
            fresh[power] = self._outcome(replace(first, power=power))
            if not powers and self.options.extends and (beyond := next_power(fresh)) is not None:
                powers.append(beyond)
        best, lowest = best_power(fresh), lowest_power(fresh)
        for power in {best, lowest} if RULE.stable(fresh[lowest]) else {best}:
            for every in self.options.intervals:
                self._outcome(replace(first, power=power, every=every))
        with self.lock:
            self.say(f"  {self.time_left.part_done()}: {self._summary(StabilityRow.of(first))}")

    def _outcome(self, first: StabilityRun) -> StabilityOutcome:
        """What is measured over seeds; runs that are not stored are run."""
        options, outcomes = self.options, {}
        for seed in range(options.seeds):
            run = replace(first, seed=seed)
            if run not in self.result.runs:
                outcome = self.pool.call(train_stored_run, run, options.smoke, options.data_folder, options.device)
                with self.lock:
                    self.result.runs[run] = outcome
                    self.result.save(self.folder)
            outcomes[seed] = self.result.runs[run]
        return over_seeds(outcomes)


def stability_problem(name: str, smoke: bool) -> StabilityProblem:
    """Return a problem by its name; with ``smoke`` narrow and short."""
    problem = STABILITY_PROBLEMS[name]
    return problem.for_smoke() if smoke else problem


@lru_cache(maxsize=len(STABILITY_PROBLEMS))
def stability_data(name: str, smoke: bool, folder: Path | None, device: str) -> Split:
    """Return a problem's training data, loaded once in every process."""
    return stability_problem(name, smoke).load(folder, device, SMOKE_SAMPLES if smoke else None)


def train_stored_run(run: StabilityRun, smoke: bool, folder: Path | None, device: str) -> StabilityOutcome:
    """Train a run in whatever process this is."""
    data = stability_data(run.problem, smoke, folder, device)
    return train_run(run, stability_problem(run.problem, smoke), data, device)


@dataclass(frozen=True)
class FittedOptions:
    """What to run of the check on fitted data.

    Attributes:
        problems: Names of small problems.
        methods: Names of methods of this library.
        settings: "defaults", "plain" (``trust=None``), or trusts as ``Trust.of`` reads them.
        steps: The number of steps.
        seeds: The number of seeds.
        device: "cpu" or "cuda".
        workers: The number of processes; each trains one run at a time.

    Raises:
        ValueError: A name is not known, or there is no such device.

    Example:
        >>> len([*FittedOptions(methods=("kfac",)).runs()])
        90
    """

    problems: tuple[str, ...] = tuple(FITTED_PROBLEMS)
    methods: tuple[str, ...] = REFRESHED
    settings: tuple[str, ...] = (CLASS_DEFAULTS,)
    steps: int = FITTED_STEPS
    seeds: int = FITTED_SEEDS
    device: str = "cpu"
    workers: int = 1

    def __post_init__(self) -> None:
        _check_known("--problems", self.problems, FITTED_PROBLEMS)
        _check_known("--methods", self.methods, [name for name, spec in SPECS.items() if spec.layerwise])
        check_device(self.device)
        for settings in self.settings:
            settings_arguments(settings)

    def runs(self) -> Iterator[FittedRun]:
        """All runs."""
        for problem, method, settings, seed in product(self.problems, self.methods, self.settings, range(self.seeds)):
            yield FittedRun(problem, method, settings, seed, self.steps)


def run_fitted(options: FittedOptions, result: StabilityResult, folder: Path, say: Say) -> None:
    """Run what is not stored yet of the check on fitted data, and store every run at once.

    Args:
        options: What to run.
        result: Where runs are added; those that it has are not repeated.
        folder: Where the result is saved.
        say: Is told what was done, in lines.

    Example:
        >>> result = new_stability_result("mukron bench stability --fitted", "cpu", smoke=True)
        >>> options = FittedOptions(("toy",), ("foof",), steps=10, seeds=2)
        >>> run_fitted(options, result, Path("bench"), say=lambda line: None)
        >>> len(result.fitted)
        2
    """
    drop_outdated(result, options.methods, options.settings, say)
    lock = Lock()

    def train(run: FittedRun) -> None:
        if run not in result.fitted:
            outcome = pool.call(train_fitted, run, options.device)
            with lock:
                result.fitted[run] = outcome
                result.save(folder)
        group = [result.fitted.get(replace(run, seed=seed)) for seed in range(options.seeds)]
        outcomes = [outcome for outcome in group if outcome is not None]
        with lock:
            if len(outcomes) == options.seeds and run not in told:
                told.update(replace(run, seed=seed) for seed in range(options.seeds))
                left = sum(outcome.left is not None for outcome in outcomes)
                fitted = sum(outcome.fitted is not None for outcome in outcomes)
                name = f"{run.problem}, {spec_of(run.method).title}, {run.settings}"
                say(f"{name}: {fitted} of {len(group)} seeds fitted, {left} left the fit")

    told: set[FittedRun] = set()
    with WorkerPool(options.workers) as pool:
        pool.for_each(options.runs(), train)


def stored_result(folder: Path, command: str, device: str, smoke: bool) -> StabilityResult:
    """Return the result that is stored in a folder, to be continued; a new one if there is none.

    Args:
        folder: The folder.
        command: The command that is run.
        device: "cpu" or "cuda".
        smoke: Whether it is a quick trial.

    Returns:
        The result, with this machine and today's date.

    Raises:
        ValueError: The file that is there is something else.

    Example:
        >>> stored_result(Path("empty"), "mukron bench stability", "cpu", smoke=False).runs
        {}
    """
    result = new_stability_result(command, device, smoke)
    path = folder / f"{result.name}.json"
    if path.exists():
        stored = StabilityResult.load(path)
        commands = list(dict.fromkeys([*stored.commands, command]))
        result = replace(stored, commands=commands, machine=result.machine, versions=result.versions, date=result.date)
    return result


def drop_outdated(result: StabilityResult, methods: tuple[str, ...], settings: tuple[str, ...], say: Say) -> None:
    """Drop stored runs of methods that do something else by now with the same settings, and say so."""
    for method in methods:
        if dropped := sum(result.drop_outdated(method, one) for one in settings):
            say(f"{spec_of(method).title} has other defaults than when it was stored: {dropped} runs are repeated")


def _check_known(option: str, names: tuple[str, ...], known: Iterable[str]) -> None:
    listed = [*known]
    for name in names:
        if name not in listed:
            raise ValueError(f"{option} {name!r}; known: {', '.join(listed)}")
