"""The record of a run, in memory and in its folder.

config.json     the run's configuration
metrics.jsonl   one line per epoch, written when the epoch ends
metrics.csv     the same as a table, rewritten at every checkpoint
result.json     how the run ended; absent while it runs
checkpoint.pt   everything needed to continue; checkpoint.before.pt is the one before it
trackers.json   what trackers were told, if there are any (--tracker)
tensorboard/    the same numbers for TensorBoard, if it is one of them

``seconds`` is wall-clock time, and the only number in which two equal runs differ.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json, write_text
from mukron.train.checkpoint_files import VERSIONS, CheckpointFiles
from mukron.train.config import RunConfig
from mukron.train.errors import RunError, writing
from mukron.train.folder_lock import locked_folder
from mukron.train.rows import EpochRow, check_rows, line_of, rows_of, table_of
from mukron.train.schedules import Schedule
from mukron.train.shown import ShownRun
from mukron.typed import read_as

RUN_KIND, RUN_VERSION = "run", 1
TRACKED_FILE = "trackers.json"
FINISHED, DIVERGED, INTERRUPTED = "finished", "diverged", "interrupted"
LOW_IS_BEST = ("loss", "bits_per_byte")  # endings of metrics
RESTART_HINT = "begin it anew with --restart (resume=False)"


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
        self.trackers = self.path / TRACKED_FILE
        self.checkpoints = CheckpointFiles(self.path / "checkpoint.pt", self.path / "checkpoint.before.pt")
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
        if not any(
            file.exists() and file.stat().st_size for file in (self.metrics, *self.checkpoints.files, self.result)
        ):
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
            with _readable(self.result, self._way_out):
                content = check_stamp(read_json(self.result), RUN_KIND, RUN_VERSION, str(self.result))
                ending = read_as(Ending, {name: content[name] for name in Ending._fields if name in content}, "run")
                final = read_as(dict[str, float | None], content["final"], "final")
                last = read_as(int, final.get("epoch", 0), "final.epoch")
        with _readable(self.metrics, self._way_out):
            text = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
            rows = rows_of(text, str(self.metrics))
            epoch = len(rows)
            seconds = ending.seconds or read_as(float, rows[-1]["seconds"] if rows else 0.0, "seconds")
        if last not in (None, epoch):
            ends = f"it ends with epoch {epoch} and result.json with {last}"
            raise RunError(f"{self.metrics}: damaged, {ends}; {self._way_out}")
        return Run(config, ending.status, rows, ending.reason, seconds, stored=True, sample=ending.sample)

    @property
    def _way_out(self) -> str:
        """What to do about damaged numbers: a checkpoint has them too."""
        if not any(file.exists() for file in self.checkpoints.files):
            return RESTART_HINT
        files = f"{self.metrics.name} and {self.result.name}"
        return f"delete {files} to go on from the checkpoint, which has the numbers too, or {RESTART_HINT}"

    def begin(self, config: RunConfig, rows: Sequence[EpochRow], forget: bool = False) -> None:
        """Writes the configuration, and the metrics up to the checkpoint that the run continues from.

        Args:
            config: The configuration.
            rows: The epochs up to the checkpoint; later ones are trained again.
            forget: Delete the checkpoint first, so that the run starts from its beginning.
        """
        if forget:
            self.checkpoints.forget()
            with writing(self.trackers):
                self.trackers.unlink(missing_ok=True)  # which then begin new runs
            shutil.rmtree(self.tensorboard, ignore_errors=True)
        with writing(self.result):
            self.result.unlink(missing_ok=True)
        with writing(self.config):
            write_json(self.config, config.to_dict())
        _write(self.metrics, "".join(map(line_of, rows)))

    def append(self, row: EpochRow) -> None:
        """Appends the numbers of an epoch to metrics.jsonl."""
        with writing(self.metrics), self.metrics.open("a") as file:
            file.write(line_of(row))

    def save(self, checkpoint: Data, rows: Sequence[EpochRow]) -> None:
        """Writes a checkpoint and metrics.csv, and keeps the checkpoint before it.

        Args:
            checkpoint: The state of the run.
            rows: The epochs so far.
        """
        _write(self.table, table_of(rows))
        self.checkpoints.save(checkpoint)

    def saved(self) -> Data | None:
        """Returns the last whole checkpoint, or None if there is none.

        Raises:
            RunError: If none can be read.
        """
        return self.checkpoints.load()

    def end(self, run: Run) -> None:
        """Writes metrics.csv and result.json of a run that has ended."""
        _write(self.table, table_of(run.epochs))
        with writing(self.result):
            write_json(self.result, run.result())


@contextmanager
def _readable(path: Path, way_out: str = RESTART_HINT) -> Iterator[None]:
    """Reports a file that cannot be read as ``RunError`` with its name."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = str(error).removeprefix(f"{path}: ")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise RunError(f"{path}: damaged, {kind}{message}; {way_out}") from error


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


def _write(path: Path, text: str) -> None:
    with writing(path):
        write_text(path, text, sole=True)  # the folder is locked
