"""The record of a run, in memory and in its folder.

config.json     the run's configuration
metrics.jsonl   one line per epoch, written when the epoch ends
metrics.csv     the same as a table, rewritten at every checkpoint
result.json     how the run ended; absent while it runs
checkpoint.pt   everything needed to continue
trackers.json   what trackers were told, if there are any (--tracker)
tensorboard/    the same numbers for TensorBoard, if it is one of them

``seconds`` is wall-clock time, and the only number in which two equal runs differ.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mukron import __version__
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.train.config import RunConfig
from mukron.train.errors import RunError, writing
from mukron.train.folder_lock import locked_folder
from mukron.train.schedules import Schedule
from mukron.train.shown import ShownRun
from mukron.typed import read_as

RUN_KIND, RUN_VERSION = "run", 1
CHECKPOINT_KIND, CHECKPOINT_VERSION = "checkpoint", 1
VERSIONS = {"mukron": __version__, "torch": str(torch.__version__)}
TRACKED_FILE = "trackers.json"
FINISHED, DIVERGED, INTERRUPTED = "finished", "diverged", "interrupted"
LOW_IS_BEST = ("loss", "bits_per_byte")  # endings of metrics
RESTART_HINT = "begin it anew with --restart (resume=False)"
EpochRow = dict[str, Any]  # the numbers of an epoch by name; None stands for one that is not finite


class Ending(NamedTuple):
    """How a run ended, as its files say it."""

    status: str
    reason: str
    seconds: float = 0.0
    sample: str = ""


@dataclass(frozen=True, repr=False)
class Run(ShownRun):
    """A training run that has ended, with the numbers of every epoch.

    The numbers of an epoch are epoch, step, lr, train_loss and train_accuracy (running means over the epoch's
    batches), test_loss, test_accuracy (where the outputs show it), seconds, and whatever the run's ``record`` names;
    losses of a text also in bits per byte, and the tokens seen so far.

    Attributes:
        config: What was trained, and how.
        status: "finished", "diverged" or "interrupted".
        epochs: One mapping from names to numbers per epoch; None stands for a number that is not finite.
        reason: Why the run did not finish; empty if it did.
        seconds: Time of training; interruptions do not count.
        stored: Whether the run had ended before and was read from its folder.
        sample: For language data, what the network writes after training.

    Example:
        >>> run = Run(RunConfig(), "finished", [{"epoch": 1, "test_loss": 0.5}, {"epoch": 2, "test_loss": 0.7}])
        >>> run.final["test_loss"], run.best("test_loss")["epoch"]
        (0.7, 1)
    """

    config: RunConfig
    status: str
    epochs: Sequence[EpochRow] = ()
    reason: str = ""
    seconds: float = 0.0
    stored: bool = field(default=False, compare=False)
    sample: str = ""

    @property
    def final(self) -> EpochRow:
        """The numbers of the last epoch; empty if no epoch was finished."""
        return dict(self.epochs[-1]) if self.epochs else {}

    def best(self, metric: str, lowest: bool | None = None) -> EpochRow:
        """Returns the numbers of the epoch with the best value of a metric.

        Args:
            metric: The metric's name.
            lowest: Whether the lowest value is the best. By default it is for a loss and is not for an accuracy; any
                other metric needs the argument.

        Returns:
            The numbers of that epoch.

        Raises:
            RunError: If no epoch has the metric, or ``lowest`` is needed.

        Example:
            >>> run = Run(RunConfig(), "finished", [{"epoch": 1, "lr": 0.1}, {"epoch": 2, "lr": 0.01}])
            >>> run.best("lr", lowest=True)["epoch"]
            2
        """
        if lowest is None:
            if not metric.endswith((*LOW_IS_BEST, "accuracy")):
                raise RunError(f"best({metric!r}): is low or high best? Say so, lowest=True or lowest=False")
            lowest = metric.endswith(LOW_IS_BEST)
        rows = [row for row in self.epochs if row.get(metric) is not None]
        if not rows:
            raise RunError(f"best({metric!r}): no epoch of this run has it; they have {sorted(self.final)}")
        return dict((min if lowest else max)(rows, key=lambda row: row[metric]))

    def to_dict(self) -> Data:
        """Returns the run as data for JSON."""
        content = {"config": self.config.to_dict(), "epochs": [dict(row) for row in self.epochs]}
        return stamp(RUN_KIND, RUN_VERSION, {**content, **self._ending()})

    @classmethod
    def from_dict(cls, data: object, source: str = "run") -> Run:
        """Reads what ``to_dict`` returned.

        Args:
            data: The data.
            source: Where it comes from, for error messages.

        Returns:
            The run.

        Raises:
            ValueError: If the data is not that of a run, or is damaged.
        """
        content = check_stamp(data, RUN_KIND, RUN_VERSION, source)
        config = RunConfig.from_dict(content.get("config"), source)
        with damaged(source):
            rows = check_rows(content["epochs"], "epochs")
            ending: Ending = read_as(Ending, {name: content[name] for name in Ending._fields if name in content}, "run")
            return cls(config, ending.status, rows, ending.reason, ending.seconds, sample=ending.sample)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Reads a run from its folder. A run that was killed is read as interrupted.

        Args:
            folder: The run's folder.

        Returns:
            The run.

        Raises:
            RunError: If there is no run in the folder, or a file of it is damaged.
        """
        return RunFolder(folder).run()

    def _ending(self) -> Data:
        sample = {"sample": self.sample} if self.sample else {}
        return {"status": self.status, "reason": self.reason, "seconds": self.seconds, **sample}

    def result(self) -> Data:
        """Returns the content of result.json: how the run ended, its last epoch, and its best epochs."""
        best = {}
        for metric in ("test_loss", "test_accuracy"):
            if any(row.get(metric) is not None for row in self.epochs):
                row = self.best(metric)
                best[metric] = {"epoch": row["epoch"], "value": row[metric]}
        content = {**self._ending(), "final": self.final, "best": best, "versions": VERSIONS}
        return stamp(RUN_KIND, RUN_VERSION, content)


class RunFolder:
    """The folder of one run: reads, writes and locks its files.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config, self.result = self.path / "config.json", self.path / "result.json"
        self.metrics, self.table = self.path / "metrics.jsonl", self.path / "metrics.csv"
        self.checkpoint, self.trackers = self.path / "checkpoint.pt", self.path / TRACKED_FILE
        self.tensorboard = self.path / "tensorboard"

    def locked(self) -> AbstractContextManager[None]:
        """Creates the folder and locks it for this process; the lock ends with the process."""
        return locked_folder(self.path)

    def ended(self, config: RunConfig) -> Run | None:
        """Returns the stored run if it has ended.

        Args:
            config: The configuration that the folder must hold.

        Returns:
            The run, or None if it has not started or can be continued.

        Raises:
            RunError: If the folder holds another run, or files without a configuration.
        """
        if not any(file.exists() and file.stat().st_size for file in (self.metrics, self.checkpoint, self.result)):
            return None
        if not self.config.exists():
            raise RunError(f"{self.config}: missing, beside files of a run; {RESTART_HINT}, or choose another folder")
        run = self.run()
        _refuse_another(self.path, run.config, config)
        run = replace(run, config=run.config.trusted())  # its functions are those of ``config``
        over = run.status == DIVERGED or (run.status == FINISHED and run.final["epoch"] == config.epochs)
        return run if over else None

    def run(self) -> Run:
        """Reads the stored run; ``Run.load`` describes it."""
        if not self.config.exists():
            raise RunError(f"{self.path}: there is no run (no config.json)")
        with _readable(self.config):
            config = RunConfig.load(self.config)
        ending, last = Ending(INTERRUPTED, "it ended without a word"), None
        if self.result.exists():
            with _readable(self.result):
                content = check_stamp(read_json(self.result), RUN_KIND, RUN_VERSION, str(self.result))
                ending = read_as(Ending, {name: content[name] for name in Ending._fields if name in content}, "run")
                final = read_as(dict[str, float | None], content["final"], "final")
                last = read_as(int, final.get("epoch", 0), "final.epoch")
        with _readable(self.metrics):  # complete lines only: a run may be killed while it writes one
            text = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
            lines = text[: text.rfind("\n") + 1].splitlines()
            rows = check_rows([json.loads(line) for line in lines], "line", first=1)
            epoch = rows[-1]["epoch"] if rows else 0
            if epoch != len(rows):
                raise ValueError(f"{len(rows)} lines end with epoch {epoch}")
            seconds = ending.seconds or read_as(float, rows[-1]["seconds"] if rows else 0.0, "seconds")
        if last not in (None, epoch):
            raise RunError(
                f"{self.metrics}: damaged, it ends with epoch {epoch} and result.json with {last}; {RESTART_HINT}"
            )
        return Run(config, ending.status, rows, ending.reason, seconds, stored=True, sample=ending.sample)

    def begin(self, config: RunConfig, rows: Sequence[EpochRow], forget: bool = False) -> None:
        """Writes the configuration, and the metrics up to the checkpoint that the run continues from.

        Args:
            config: The configuration.
            rows: The epochs up to the checkpoint; later ones are trained again.
            forget: Delete the checkpoint first, so that the run starts from its beginning.
        """
        if forget:
            with writing(self.checkpoint):
                self.checkpoint.unlink(missing_ok=True)
                self.trackers.unlink(missing_ok=True)  # which then begin new runs
            shutil.rmtree(self.tensorboard, ignore_errors=True)
        with writing(self.result):
            self.result.unlink(missing_ok=True)
        with writing(self.config):
            config.save(self.config)
        _write_atomically(self.metrics, lambda file: file.write("".join(map(_line, rows)).encode()))

    def append(self, row: EpochRow) -> None:
        """Appends the numbers of an epoch to metrics.jsonl."""
        with writing(self.metrics), self.metrics.open("a") as file:
            file.write(_line(row))

    def save(self, checkpoint: Data, rows: Sequence[EpochRow]) -> None:
        """Writes a checkpoint and metrics.csv.

        Args:
            checkpoint: The state of the run.
            rows: The epochs so far.
        """
        content = stamp(CHECKPOINT_KIND, CHECKPOINT_VERSION, {**checkpoint, "versions": VERSIONS})
        _write_atomically(self.table, lambda file: file.write(_csv(rows).encode()))
        _write_atomically(self.checkpoint, lambda file: torch.save(content, file))

    def saved(self) -> Data | None:
        """Returns the checkpoint, or None if there is none.

        Raises:
            RunError: If it cannot be read.
        """
        if not self.checkpoint.exists():
            return None
        try:
            data = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises various errors for a damaged file
            raise RunError(
                f"{self.checkpoint}: damaged, {type(error).__name__}; delete it to train this run from its beginning"
            ) from error
        checkpoint = check_stamp(data, CHECKPOINT_KIND, CHECKPOINT_VERSION, str(self.checkpoint))
        self._warn_of_another_version(checkpoint.get("versions", {}))
        return checkpoint

    def _warn_of_another_version(self, stored: Mapping[str, str]) -> None:
        changed = [
            f"{name} {stored.get(name)}, here is {here}" for name, here in VERSIONS.items() if stored.get(name) != here
        ]
        if changed:
            warnings.warn(
                f"{self.checkpoint}: written by {'; '.join(changed)}. The run goes on, but its numbers may not be "
                "those of a run that was never stopped",
                UserWarning,
                stacklevel=4,
            )

    def end(self, run: Run) -> None:
        """Writes metrics.csv and result.json of a run that has ended."""
        _write_atomically(self.table, lambda file: file.write(_csv(run.epochs).encode()))
        with writing(self.result):
            write_json(self.result, run.result())


def check_rows(data: object, place: str, first: int = 0) -> list[EpochRow]:
    """Read the rows of epochs: numbers by name, with rising epochs.

    Args:
        data: A list of rows.
        place: The name of the list, for errors.
        first: The number of the first row in errors.

    Returns:
        The rows.

    Raises:
        ValueError: A row is something else.
    """
    rows: list[EpochRow] = []
    for number, row in enumerate(read_as(list[Any], data, place), first):
        numbers = read_as(dict[str, float | None], row, f"{place} {number}")
        epoch, before = read_as(int, numbers.get("epoch"), f"{place} {number}: epoch"), rows[-1]["epoch"] if rows else 0
        if epoch <= before:
            raise ValueError(f"{place} {number}: expected an epoch after {before}, found {epoch}")
        rows.append(numbers)
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Reports a file that cannot be read as ``RunError`` with its name."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = str(error).removeprefix(f"{path}: ")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise RunError(f"{path}: damaged, {kind}{message}; {RESTART_HINT}") from error


def _refuse_another(path: Path, stored: RunConfig, config: RunConfig) -> None:
    """Refuses another configuration, except more epochs if the schedule of the first ones stays the same."""
    differences = stored.differences(config)
    differences.pop("sharding", None)  # says where weights are, not what they become
    if set(differences) == {"epochs"} and config.epochs > stored.epochs:
        schedule = Schedule.parse(config.schedule)
        if not schedule.knows_its_end:
            return
        raise RunError(
            f"{path}: holds a run of {stored.epochs} epochs; a {schedule} schedule that ends after {config.epochs} has "
            "other learning rates from the start, so it cannot be continued. Choose another folder (--out)"
        )
    if differences:
        fields = ", ".join(f"{name} {old!r} there and {new!r} here" for name, (old, new) in differences.items())
        raise RunError(f"{path}: holds another run: {fields}. Choose another folder (--out), or {RESTART_HINT}")


def finite(row: Mapping[str, Any]) -> EpochRow:
    """Returns the numbers as Python numbers that JSON can hold.

    Args:
        row: Numbers by name, of Python, numpy or torch.

    Returns:
        The same, with None for what is not finite.

    Example:
        >>> finite({"epoch": 1, "train_loss": torch.tensor(0.5), "test_loss": math.inf})
        {'epoch': 1, 'train_loss': 0.5, 'test_loss': None}
    """
    plain = {name: int(value) if isinstance(value, int) else float(value) for name, value in row.items()}
    return {name: value if math.isfinite(value) else None for name, value in plain.items()}


def _line(row: EpochRow) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _csv(rows: Sequence[EpochRow]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """Writes to a temporary file and renames it, so that an existing file is always complete."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with writing(path):
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
