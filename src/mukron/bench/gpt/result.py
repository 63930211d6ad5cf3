"""Stored runs of the GPT, the table of losses, and the verdict on transfer, fixed before results were seen."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, NamedTuple

import torch

from mukron import __version__
from mukron.bench.gpt.options import GPTOptions, title_of
from mukron.bench.gpt.references import REFERENCE_METHODS
from mukron.bench.gpt.task import GPTOutcome, GPTRun, train_gpt
from mukron.bench.gpt.transfer import LARGEST_FACTORS, GPTTransfer
from mukron.bench.result import machine_of
from mukron.bench.stability.runs import CLASS_DEFAULTS, method_defaults, same_defaults
from mukron.damping import Rule
from mukron.optim.spec import spec_of
from mukron.params.storage import read_json, write_json
from mukron.table import Table
from mukron.typed import fields_of, read_as
from mukron.workers.pool import WorkerPool
from mukron.workers.progress import TimeLeft


class GPTGroup(NamedTuple):
    """What runs of several widths, depths and learning rates have in common."""

    method: str
    base: int
    base_depth: int
    steps: int
    scheme: str
    weight_decay: float
    damping: str

    @property
    def title(self) -> str:
        """The method's name in tables."""
        decay = f", decay {self.weight_decay:g}" if self.weight_decay else ""
        damping = f", damping {self.damping}" if self.damping else ""
        return title_of(self.method) + (", SP" if self.scheme == "sp" else "") + decay + damping


def group_of(run: GPTRun) -> GPTGroup:
    """The group that a run belongs to."""
    return GPTGroup(run.method, run.base, run.base_depth, run.steps, run.scheme, run.weight_decay, run.damping)


@dataclass
class GPTResult:
    """All stored runs, and where they were made.

    Attributes:
        commands: The commands that the runs come from.
        device: "cpu" or "cuda".
        text: The name of the text.
        digest: Of its bytes; empty: not known.
        precision: Of float32 products on a GPU.
        runs: What was measured in each run.
        defaults: By method of this library, what it does where only a learning rate is passed.
        machine: Names of processor and GPU, numbers of cores and threads.
        versions: Versions by package.
        date: The day of the last run.
        costs: By method and width, milliseconds per step with nothing else on the device.

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
    costs: dict[str, float] = field(default_factory=dict)
    digest: str = ""

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
        digest = "" if options.file is None else sha256(options.file.read_bytes()).hexdigest()[:16]
        made = (machine, versions, today)
        return GPTResult([command], options.device, text, options.precision, {}, {}, *made, digest=digest)

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
            if old.runs and old.digest and old.digest != result.digest:
                raise ValueError(f"{path} has runs of another text named {old.text}; choose another --out")
            result.commands = list(dict.fromkeys([*old.commands, command]))
            result.runs, result.defaults, result.costs = old.runs, old.defaults, old.costs
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
        names = (
            "commands",
            "device",
            "text",
            "precision",
            "date",
            "machine",
            "versions",
            "defaults",
            "costs",
            "digest",
        )
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
            data = fields_of(read_json(path), "result", "runs")
            result: GPTResult = read_as(GPTResult, {**data, "runs": {}}, "result")
            for number, entry in enumerate(read_as(list[Any], data["runs"], "runs")):
                parts = fields_of(entry, f"runs[{number}]", "run", "outcome")
                run = read_as(GPTRun, parts["run"], f"runs[{number}].run")
                result.runs[run] = read_as(GPTOutcome, parts["outcome"], f"runs[{number}].outcome")
        except (OSError, ValueError) as error:
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
            self.costs = {key: cost for key, cost in self.costs.items() if key.split()[0] != method}
        self.defaults[method] = present
        return before - len(self.runs)

    def groups(self) -> dict[GPTGroup, dict[tuple[int, int], dict[float, list[GPTOutcome]]]]:
        """Runs that differ in their size alone, together; then by width and depth; then by learning rate, rising."""
        found: dict[GPTGroup, dict[tuple[int, int], dict[float, list[GPTOutcome]]]] = {}
        runs = [run for run in self.runs if not run.seconds]
        for run in sorted(runs, key=lambda run: (run.base, run.steps, run.width, run.depth, run.lr, run.seed)):
            rates = found.setdefault(group_of(run), {}).setdefault((run.width, run.depth), {})
            rates.setdefault(run.lr, []).append(self.runs[run])
        return found

    def table(self) -> Table:
        """The table of losses; depth and weight decay have columns if they differ from run to run."""
        lines = []
        deep, decays = len({run.depth for run in self.runs}) > 1, any(run.weight_decay for run in self.runs)
        for group, sizes in self.groups().items():
            for (width, depth), rates in sizes.items():
                for lr, outcomes in rates.items():
                    losses = [outcome.validation for outcome in outcomes]
                    cells = (f"{fmean(losses):.3f}", " - ".join(f"{loss:.3f}" for loss in (min(losses), max(losses))))
                    largest = max(outcome.largest for outcome in outcomes)
                    seconds = fmean(outcome.seconds for outcome in outcomes)
                    numbers = [str(width), str(group.base), str(group.steps), f"{lr:.4g}", str(len(outcomes))]
                    numbers[2:2] = [str(depth)] if deep else []
                    numbers[-2:-2] = [f"{group.weight_decay:g}"] if decays else []
                    most = f"{largest:.2f}" if isfinite(largest) or not isfinite(fmean(losses)) else ""
                    lines.append((group.title, *numbers, *cells, most, f"{seconds:.0f}"))
        columns = [*("method", "width", "base", *(["depth"] if deep else []), "steps", *(["decay"] if decays else []))]
        columns += ["lr", "seeds", "loss", "range", "largest loss", "seconds"]
        notes = (
            "Loss: nats per byte, over the whole validation text, averaged over seeds.",
            "Largest loss: of a training batch. Seconds: of a run, beside others on the same device.",
        )
        return Table("A GPT of bytes", tuple(columns), tuple(lines), notes if lines else ())

    def transfers(self, loss: str = "validation") -> list[GPTTransfer]:
        """For every method with several widths or depths, and learning rates, what was found.

        Widths are compared at the base depth, depths at the base width.

        Args:
            loss: The loss that is compared: "validation" or "training".
        """
        found = []
        for group, sizes in sorted(self.groups().items(), key=lambda pair: pair[0]):
            by_axis = {
                "width": {width: rates for (width, depth), rates in sizes.items() if depth == group.base_depth},
                "depth": {depth: rates for (width, depth), rates in sizes.items() if width == group.base},
            }
            for axis, of_sizes in by_axis.items():
                losses = {
                    size: {lr: [float(getattr(o, loss)) for o in outcomes] for lr, outcomes in rates.items()}
                    for size, rates in of_sizes.items()
                }
                if len(losses) > 1 and all(len(rates) > 2 for rates in losses.values()):
                    seeds = tuple(
                        (size, lr, x) for size, rates in losses.items() for lr, xs in rates.items() for x in xs
                    )
                    means = {size: {lr: fmean(xs) for lr, xs in rates.items()} for size, rates in losses.items()}
                    found.append(GPTTransfer(group.title, means, axis, seeds, "lr", group.steps))
        return found + self._damping_transfers(loss)

    def _damping_transfers(self, loss: str) -> list[GPTTransfer]:
        """The same for damping, at one learning rate; each kind of rule by itself."""
        found: dict[tuple[Any, ...], dict[int, dict[float, list[float]]]] = {}
        for run, outcome in self.runs.items():
            if run.damping and run.depth == run.base_depth:
                key = (group_of(replace(run, damping=run.damping.partition(":")[0])), run.lr)
                numbers = found.setdefault(key, {}).setdefault(run.width, {})
                numbers.setdefault(Rule.parse(run.damping).rho, []).append(float(getattr(outcome, loss)))
        transfers = []
        for (group, lr), widths in sorted(found.items()):
            if len(widths) > 1 and all(len(numbers) > 2 for numbers in widths.values()):
                curves = {w: {rho: fmean(widths[w][rho]) for rho in sorted(widths[w])} for w in sorted(widths)}
                seeds = tuple((w, rho, x) for w, of in widths.items() for rho, xs in of.items() for x in xs)
                title = f"{group.title}, lr {lr:g}"
                transfers.append(GPTTransfer(title, curves, "width", seeds, "damping", group.steps))
        return transfers

    def transfer_table(self) -> Table:
        """The table of best learning rates."""
        lines = []
        for both in zip(self.transfers(), self.transfers("training"), strict=True):
            pairs = zip(both[0].seeds, both[1].seeds, strict=True)
            kept = all(isfinite(training[-1]) or not isfinite(whole[-1]) for whole, training in pairs)
            for size in both[0].curves:
                cells = [both[0].method, f"{both[0].axis} {size}", str(both[0].steps), both[0].setting]
                for found in both if kept else both[:1]:
                    verdict = found.verdict if size == max(found.curves) else ""
                    cells += [f"{found.best(size):.3g}", f"{found.at_smallest(size):.3f}", verdict]
                cells += [] if kept else ["", "", "not kept" if size == max(both[0].curves) else ""]
                lines.append(tuple(cells))
        measured = ("best", "loss at the smallest size's best", "verdict")
        columns = ("method", "size", "steps", "tuned", *measured, *(f"training loss: {name}" for name in measured))
        notes = (
            "Best: where the parabola through the lowest mean loss and its neighbours is lowest, over the logarithm.",
            f"Transfers: no two best learning rates are more than a factor of {LARGEST_FACTORS['lr']:g} apart "
            f"(dampings: {LARGEST_FACTORS['damping']:g}), and at the tried value that is best at the smallest size no "
            "size is worse than the smallest.",
            "Training loss: the same for the mean loss of the last tenth of the batches.",
        )
        return Table("Does the best value transfer?", columns, tuple(lines), notes if lines else ())


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
    train_missing(options.runs(), options, result, folder, say)


def train_missing(
    runs: Iterable[GPTRun], options: GPTOptions, result: GPTResult, folder: Path, say: Callable[[str], None]
) -> None:
    """Train what is not stored yet, and store every run at once.

    Args:
        runs: The runs.
        options: Where they are trained, and in how many processes.
        result: Where runs are added.
        folder: Where the result is saved.
        say: Is told what was done, in lines.
    """
    missing: Sequence[GPTRun] = [run for run in runs if run not in result.runs]
    lock, left = Lock(), TimeLeft(len(missing))

    def train(run: GPTRun) -> None:
        outcome = pool.call(train_gpt, run, options.file, options.device, options.precision)
        with lock:
            result.runs[run] = outcome
            result.save(folder)
            depth = f", depth {run.depth}" if len(options.depths) > 1 else ""
            place = f"{group_of(run).title}, width {run.width}{depth}, lr {run.lr:.4g}, seed {run.seed}"
            say(f"  {left.part_done()}: {place}: {outcome.validation:.4f} in {outcome.seconds:.0f} s")

    with WorkerPool(options.workers) as pool:
        pool.for_each(missing, train)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: number if isfinite(number) else None for name, number in numbers.items()}
