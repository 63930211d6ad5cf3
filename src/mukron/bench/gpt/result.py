"""Stored runs of the GPT, the table of losses, and the verdict on transfer, fixed before results were seen."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import product
from math import inf, isfinite, log2
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

import torch

from mukron import __version__
from mukron.bench.gpt.references import REFERENCE_METHODS
from mukron.bench.gpt.task import GPTOutcome, GPTRun, check_method, load_text, train_gpt
from mukron.bench.measure import check_device
from mukron.bench.result import machine_of
from mukron.bench.stability.runs import CLASS_DEFAULTS, method_defaults, same_defaults
from mukron.optim.spec import spec_of
from mukron.params.storage import write_json
from mukron.table import Table
from mukron.workers.pool import WorkerPool
from mukron.workers.progress import TimeLeft

LARGEST_FACTOR = 1.5  # between the best learning rates of two widths, for a verdict of transfer


@dataclass(frozen=True)
class GPTOptions:
    """What to run.

    Attributes:
        methods: Names of methods.
        widths: The sizes of a token's vector; the narrowest is the base of the parametrization.
        rates: Learning rates.
        steps: The number of steps.
        seeds: The number of seeds.
        file: The text. None: a synthetic one.
        device: "cpu" or "cuda".
        precision: Of float32 products on a GPU: "float32" or "tf32".
        workers: The number of processes; each trains one run at a time.

    Raises:
        ValueError: A name is not known, or the text cannot be read.

    Example:
        >>> len([*GPTOptions(methods=("kfac",), widths=(64, 128), rates=(0.05, 0.1), seeds=2).runs()])
        8
    """

    methods: tuple[str, ...] = ("kfac", "shampoo")
    widths: tuple[int, ...] = (256,)
    rates: tuple[float, ...] = (0.1,)
    steps: int = 500
    seeds: int = 1
    file: Path | None = None
    device: str = "cpu"
    precision: str = "float32"
    workers: int = 1

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("--methods: name at least one")
        for method in self.methods:
            check_method(method)
        for width in self.widths:
            if width < 1 or (width > 64 and width % 64):
                raise ValueError(f"--widths {width}: beyond 64 expected multiples of 64, the size of a head")
        if any(not 0 < rate < inf for rate in self.rates):
            raise ValueError(f"--rates: expected positive numbers, got {', '.join(map(str, self.rates))}")
        check_device(self.device, self.precision)
        load_text(self.file, "cpu")

    def runs(self) -> Iterable[GPTRun]:
        """All runs, the widest first: they take longest."""
        base = min(self.widths)
        for width, method, lr, seed in product(
            sorted(self.widths, reverse=True), self.methods, self.rates, range(self.seeds)
        ):
            yield GPTRun(method, width, base, lr, seed, self.steps)


@dataclass
class GPTResult:
    """All stored runs, and where they were made.

    Attributes:
        commands: The commands that the runs come from.
        device: "cpu" or "cuda".
        text: The name of the text.
        precision: Of float32 products on a GPU.
        runs: What was measured in each run.
        defaults: By method of this library, what it does where only a learning rate is passed.
        machine: Names of processor and GPU, numbers of cores and threads.
        versions: Versions by package.
        date: The day of the last run.

    Example:
        >>> result = GPTResult.new("mukron bench gpt", GPTOptions())
        >>> result.name, result.table().rows
        ('gpt-cpu', ())
    """

    commands: list[str]
    device: str
    text: str
    precision: str
    runs: dict[GPTRun, GPTOutcome] = field(default_factory=dict)
    defaults: dict[str, dict[str, str]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    @staticmethod
    def new(command: str, options: GPTOptions) -> GPTResult:
        """A result without runs, with this machine and today's date.

        Args:
            command: The command that is run.
            options: What is to be run.
        """
        versions = {"mukron": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        text = options.file.name if options.file is not None else "synthetic"
        today = datetime.now(timezone.utc).date().isoformat()
        machine = machine_of(options.device)
        return GPTResult([command], options.device, text, options.precision, {}, {}, machine, versions, today)

    @staticmethod
    def stored(folder: Path, command: str, options: GPTOptions) -> GPTResult:
        """The result that is stored in a folder, to be continued; a new one if there is none.

        Args:
            folder: The folder.
            command: The command that is run.
            options: What is to be run.

        Raises:
            ValueError: The file that is there is something else, or comes from another text or precision.
        """
        result = GPTResult.new(command, options)
        path = folder / f"{result.name}.json"
        if path.exists():
            old = GPTResult.load(path)
            if (old.text, old.precision) != (result.text, result.precision):
                raise ValueError(
                    f"{path} has runs with text {old.text} and precision {old.precision}; choose another --out"
                )
            result.commands = list(dict.fromkeys([*old.commands, command]))
            result.runs, result.defaults = old.runs, old.defaults
        return result

    @property
    def name(self) -> str:
        """The name of its files, without ending."""
        return f"gpt-{self.device}"

    def save(self, folder: Path) -> Path:
        """Write all to NAME.json. A file that is there is whole at any time.

        Args:
            folder: Where to write; created if missing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        names = ("commands", "device", "text", "precision", "date", "machine", "versions", "defaults")
        runs = [{"run": asdict(run), "outcome": _finite(asdict(outcome))} for run, outcome in self.runs.items()]
        write_json(path, {**{name: getattr(self, name) for name in names}, "runs": runs})
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> GPTResult:
        """Read what ``save`` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: The file cannot be read or holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            entries = data.pop("runs")
            result = GPTResult(**data)
            for entry in entries:
                outcome = {name: inf if number is None else number for name, number in entry["outcome"].items()}
                result.runs[GPTRun(**entry["run"])] = GPTOutcome(**outcome)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no result of mukron bench gpt could be read ({error})") from None
        return result

    def drop_outdated(self, method: str) -> int:
        """Drop the runs of a method that does something else by now, and record what it does.

        Args:
            method: The method's name.

        Returns:
            The number of runs dropped.
        """
        before, present = len(self.runs), method_defaults(spec_of(method), CLASS_DEFAULTS)
        if not same_defaults(self.defaults.get(method), present):
            self.runs = {run: outcome for run, outcome in self.runs.items() if run.method != method}
        self.defaults[method] = present
        return before - len(self.runs)

    def groups(self) -> dict[tuple[str, int, int], dict[int, dict[float, list[GPTOutcome]]]]:
        """Runs by method, base and steps; then by width; then by learning rate, all in rising order."""
        found: dict[tuple[str, int, int], dict[int, dict[float, list[GPTOutcome]]]] = {}
        for run in sorted(self.runs, key=lambda run: (run.base, run.steps, run.width, run.lr, run.seed)):
            widths = found.setdefault((run.method, run.base, run.steps), {})
            widths.setdefault(run.width, {}).setdefault(run.lr, []).append(self.runs[run])
        return found

    def table(self) -> Table:
        """The table of losses."""
        lines = []
        for (method, base, steps), widths in self.groups().items():
            for width, rates in widths.items():
                for lr, outcomes in rates.items():
                    losses = [outcome.validation for outcome in outcomes]
                    cells = (f"{fmean(losses):.3f}", " - ".join(f"{loss:.3f}" for loss in (min(losses), max(losses))))
                    largest = max(outcome.largest for outcome in outcomes)
                    seconds = fmean(outcome.seconds for outcome in outcomes)
                    numbers = (str(width), str(base), str(steps), f"{lr:.4g}", str(len(outcomes)))
                    lines.append((title_of(method), *numbers, *cells, f"{largest:.2f}", f"{seconds:.0f}"))
        columns = ("method", "width", "base", "steps", "lr", "seeds", "loss", "range", "largest loss", "seconds")
        notes = (
            "Loss: nats per byte, over the whole validation text, averaged over seeds.",
            "Largest loss: of a training batch. Seconds: of a run, beside others on the same device.",
        )
        return Table("A GPT of bytes", columns, tuple(lines), notes if lines else ())

    def transfers(self, loss: str = "validation") -> list[GPTTransfer]:
        """For every method with several widths and learning rates, what was found.

        Args:
            loss: The loss that is compared: "validation" or "training".
        """
        found = []
        for (method, _, _), widths in self.groups().items():
            curves = {
                width: {lr: fmean(getattr(o, loss) for o in outcomes) for lr, outcomes in rates.items()}
                for width, rates in widths.items()
            }
            if len(curves) > 1 and all(len(curve) > 2 for curve in curves.values()):
                found.append(GPTTransfer(title_of(method), curves))
        return found

    def transfer_table(self) -> Table:
        """The table of best learning rates."""
        lines = []
        for both in zip(self.transfers(), self.transfers("training"), strict=True):
            for width in both[0].curves:
                cells = [both[0].method, str(width)]
                for found in both:
                    verdict = found.verdict if width == max(found.curves) else ""
                    cells += [f"{found.best(width):.3f}", f"{found.at_narrow(width):.3f}", verdict]
                lines.append(tuple(cells))
        measured = ("best lr", "loss at the narrowest width's best", "verdict")
        columns = ("method", "width", *measured, *(f"training loss: {name}" for name in measured))
        notes = (
            "Best lr: where the parabola through the lowest mean loss and its two neighbours is lowest, over log lr.",
            f"Transfers: no two best rates are more than a factor of {LARGEST_FACTOR:g} apart, and at the tried rate "
            "that is best at the narrowest width no width is worse than the narrowest.",
            "Training loss: the same for the mean loss of the last tenth of the batches.",
        )
        return Table("Does the best learning rate transfer?", columns, tuple(lines), notes if lines else ())


@dataclass(frozen=True)
class GPTTransfer:
    """Where the best learning rate of a method lies at every width.

    Attributes:
        method: The method's title.
        curves: By width, mean losses by learning rate, in rising order.

    Example:
        >>> falling = {0.05: 2.0, 0.1: 1.8, 0.2: 2.0}
        >>> GPTTransfer("K-FAC", {128: falling, 256: {0.05: 1.9, 0.1: 1.7, 0.2: 1.9}}).verdict
        'transfers, factor 1.00'
    """

    method: str
    curves: Mapping[int, Mapping[float, float]]

    def best(self, width: int) -> float:
        """The best learning rate of a width; on the edge of the grid, that edge.

        Args:
            width: The width.
        """
        return lowest_of_parabola(self.curves[width])

    def at_narrow(self, width: int) -> float:
        """The loss at the learning rate that is best at the narrowest width, of those that were tried.

        Args:
            width: The width.
        """
        narrow = self.curves[min(self.curves)]
        return self.curves[width].get(min(narrow, key=lambda lr: narrow[lr]), inf)

    @property
    def on_edge(self) -> list[int]:
        """Widths whose lowest loss lies on the edge of the grid."""
        lowest = {width: min(curve, key=lambda lr: curve[lr]) for width, curve in self.curves.items()}
        return [width for width, lr in lowest.items() if lr in (min(self.curves[width]), max(self.curves[width]))]

    @property
    def verdict(self) -> str:
        """The verdict, and the factor between the best learning rates."""
        rates = [self.best(width) for width in self.curves]
        factor = max(rates) / min(rates)
        narrow = self.at_narrow(min(self.curves))
        worse = [width for width in self.curves if not self.at_narrow(width) <= narrow]
        if self.on_edge:
            return f"open: best at the edge of the grid at width {', '.join(map(str, self.on_edge))}"
        if factor > LARGEST_FACTOR:
            return f"does not transfer, factor {factor:.2f}"
        if worse:
            return f"does not transfer: worse at width {', '.join(map(str, worse))}"
        return f"transfers, factor {factor:.2f}"


def lowest_of_parabola(curve: Mapping[float, float]) -> float:
    """Return where the parabola through the lowest point and its neighbours is lowest, over the logarithm.

    Args:
        curve: Losses by learning rate.

    Returns:
        The learning rate; on the edge, or with a neighbour that diverged, the lowest point itself.

    Example:
        >>> round(lowest_of_parabola({0.05: 2.0, 0.1: 1.8, 0.2: 2.0}), 3)
        0.1
    """
    rates = sorted(curve)
    place = min(range(len(rates)), key=lambda k: curve[rates[k]])
    if place in (0, len(rates) - 1):
        return rates[place]
    low, mid, high = rates[place - 1 : place + 2]
    a, b, c = curve[low], curve[mid], curve[high]
    if not (isfinite(a) and isfinite(c)):
        return mid
    left, right = log2(low / mid), log2(high / mid)
    slope, curvature = _parabola(left, a - b, right, c - b)
    return float(mid * 2 ** (-slope / (2 * curvature))) if curvature > 0 else mid


def _parabola(x: float, y: float, u: float, v: float) -> tuple[float, float]:
    """The slope and the curvature of s t + k t^2 through (0, 0), (x, y) and (u, v)."""
    k = (y / x - v / u) / (x - u)
    return y / x - k * x, k


def title_of(method: str) -> str:
    """The name of a method for people."""
    return REFERENCE_METHODS[method].title if method in REFERENCE_METHODS else spec_of(method).title


def run_gpt(options: GPTOptions, result: GPTResult, folder: Path, say: Callable[[str], None]) -> None:
    """Run what is not stored yet, and store every run at once.

    Args:
        options: What to run.
        result: Where runs are added; those that it has are not repeated.
        folder: Where the result is saved.
        say: Is told what was done, in lines.
    """
    for method in options.methods:
        if method not in REFERENCE_METHODS and (dropped := result.drop_outdated(method)):
            say(f"{title_of(method)} has other defaults than when it was stored: {dropped} runs are repeated")
    missing: Sequence[GPTRun] = [run for run in options.runs() if run not in result.runs]
    lock, left = Lock(), TimeLeft(len(missing))

    def train(run: GPTRun) -> None:
        outcome = pool.call(train_gpt, run, options.file, options.device, options.precision)
        with lock:
            result.runs[run] = outcome
            result.save(folder)
            place = f"{title_of(run.method)}, width {run.width}, lr {run.lr:.4g}, seed {run.seed}"
            say(f"  {left.part_done()}: {place}: {outcome.validation:.4f} in {outcome.seconds:.0f} s")

    with WorkerPool(options.workers) as pool:
        pool.for_each(missing, train)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: number if isfinite(number) else None for name, number in numbers.items()}
