"""What a run leaves behind, in memory and in its folder.

config.json     the run's description
metrics.jsonl   one line an epoch, written as it ends
metrics.csv     the same as a table, made anew at every checkpoint
result.json     how the run ended; not there while it runs
checkpoint.pt   all that is needed to continue
tensorboard/    the same numbers for TensorBoard, if asked for

``seconds`` is wall-clock time, and the one number that two equal runs do not share.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mukron import __version__
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.train.config import RunConfig
from mukron.train.errors import RunError, writing
from mukron.train.schedules import Schedule

KIND, VERSION = "run", 1
CHECKPOINT_KIND, CHECKPOINT_VERSION = "checkpoint", 1
VERSIONS = {"mukron": __version__, "torch": str(torch.__version__)}
FINISHED, DIVERGED, INTERRUPTED = "finished", "diverged", "interrupted"
AGAIN = "begin it anew with --restart (resume=False)"
Row = dict[str, Any]  # an epoch's numbers; one that is not finite is None


@dataclass(frozen=True)
class Run:
    """A run that ended: how, and every epoch's numbers.

    A row holds epoch, step, lr, train_loss, train_accuracy (running, over the epoch's batches), test_loss,
    test_accuracy, seconds, and whatever was recorded.
    """

    config: RunConfig
    status: str  # "finished", "diverged" or "interrupted"
    epochs: Sequence[Row] = ()
    reason: str = ""  # why it did not finish
    seconds: float = 0.0  # of training, all sittings together
    stored: bool = field(default=False, compare=False)  # had ended before, and was read from its folder

    @property
    def final(self) -> Row:
        """The last epoch's numbers; none if no epoch was finished."""
        return dict(self.epochs[-1]) if self.epochs else {}

    def best(self, metric: str, lowest: bool | None = None) -> Row:
        """The epoch with the best value: the lowest of a loss, the highest of an accuracy; others must be told."""
        if lowest is None:
            if not metric.endswith(("loss", "accuracy")):
                raise RunError(f"best({metric!r}): is low or high best? Say so, lowest=True or lowest=False")
            lowest = metric.endswith("loss")
        rows = [row for row in self.epochs if row.get(metric) is not None]
        if not rows:
            raise RunError(f"best({metric!r}): no epoch of this run has it; they have {sorted(self.final)}")
        return dict((min if lowest else max)(rows, key=lambda row: row[metric]))

    def to_dict(self) -> Data:
        content = {"config": self.config.to_dict(), "epochs": [dict(row) for row in self.epochs]}
        return stamp(KIND, VERSION, {**content, **self._ending()})

    @classmethod
    def from_dict(cls, data: object, source: str = "run") -> Run:
        content = check_stamp(data, KIND, VERSION, source)
        config = RunConfig.from_dict(content.get("config"), source)
        with damaged(source):
            return cls(config, content["status"], content["epochs"], content["reason"], content["seconds"])

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """From a run's folder. One that was killed reads as interrupted."""
        return Folder(folder).run()

    def _ending(self) -> Data:
        return {"status": self.status, "reason": self.reason, "seconds": self.seconds}

    def result(self) -> Data:
        """What result.json says: the ending, the last epoch, and the best one by test loss and accuracy."""
        best = {}
        for metric in ("test_loss", "test_accuracy"):
            if any(row.get(metric) is not None for row in self.epochs):
                row = self.best(metric)
                best[metric] = {"epoch": row["epoch"], "value": row[metric]}
        content = {**self._ending(), "final": self.final, "best": best, "versions": VERSIONS}
        return stamp(KIND, VERSION, content)


class Folder:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config, self.result = self.path / "config.json", self.path / "result.json"
        self.metrics, self.table = self.path / "metrics.jsonl", self.path / "metrics.csv"
        self.checkpoint, self.tensorboard = self.path / "checkpoint.pt", self.path / "tensorboard"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock goes with its process, however that ends."""
        with writing(self.path):
            ours = not self.path.exists()
            if self.path.is_file():
                raise RunError(f"{self.path}: is a file; a run needs a folder")
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # not a Unix
            yield
            return
        with writing(self.path):
            handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunError(f"{self.path}: another process is training there; wait for it or choose a folder") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(handle)
            if ours:
                with suppress(OSError):
                    self.path.rmdir()  # a run that could not begin leaves no empty folder

    def ended(self, config: RunConfig) -> Run | None:
        """The run as it is stored here, if it has ended. A folder that holds another run is refused."""
        if not any(file.exists() and file.stat().st_size for file in (self.metrics, self.checkpoint, self.result)):
            return None
        if not self.config.exists():
            raise RunError(f"{self.config}: missing, beside files of a run; {AGAIN}, or choose another folder")
        run = self.run()
        _refuse_another(self.path, run.config, config)
        over = run.status == DIVERGED or (run.status == FINISHED and run.final["epoch"] == config.epochs)
        return run if over else None

    def run(self) -> Run:
        if not self.config.exists():
            raise RunError(f"{self.path}: there is no run (no config.json)")
        with _whole(self.config):
            config = RunConfig.load(self.config)
        status, reason, seconds, last = INTERRUPTED, "it ended without a word", 0.0, None
        if self.result.exists():
            with _whole(self.result):
                ending = check_stamp(read_json(self.result), KIND, VERSION, str(self.result))
                status, reason, seconds = ending["status"], ending["reason"], ending["seconds"]
                last = ending["final"].get("epoch", 0)
        with _whole(self.metrics):  # whole lines: a run may be killed while it writes one
            text = self.metrics.read_text() if self.metrics.exists() else ""
            rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            epoch = rows[-1]["epoch"] if rows else 0
            seconds = seconds or (rows[-1]["seconds"] if rows else 0.0)
        if last not in (None, epoch):
            raise RunError(f"{self.metrics}: damaged, it ends with epoch {epoch} and result.json with {last}; {AGAIN}")
        return Run(config, status, rows, reason, seconds, stored=True)

    # While it trains.

    def begin(self, config: RunConfig, rows: Sequence[Row]) -> None:
        """Make the folder ready, with the metrics as of the checkpoint: what came after it will be written again."""
        if not rows:
            shutil.rmtree(self.tensorboard, ignore_errors=True)
        with writing(self.result):
            self.result.unlink(missing_ok=True)
        with writing(self.config):
            config.save(self.config)
        _write(self.metrics, lambda file: file.write("".join(map(_line, rows)).encode()))

    def forget(self) -> None:
        """What would be continued is not."""
        with writing(self.checkpoint):
            self.checkpoint.unlink(missing_ok=True)

    def append(self, row: Row) -> None:
        with writing(self.metrics), self.metrics.open("a") as file:
            file.write(_line(row))

    def save(self, checkpoint: Data, rows: Sequence[Row]) -> None:
        content = stamp(CHECKPOINT_KIND, CHECKPOINT_VERSION, {**checkpoint, "versions": VERSIONS})
        _write(self.table, lambda file: file.write(_csv(rows).encode()))
        _write(self.checkpoint, lambda file: torch.save(content, file))

    def saved(self) -> Data | None:
        """The checkpoint, if there is one."""
        if not self.checkpoint.exists():
            return None
        try:
            data = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch has no one error for it
            raise RunError(
                f"{self.checkpoint}: damaged, {type(error).__name__}; delete it to train this run from its beginning"
            ) from error
        checkpoint = check_stamp(data, CHECKPOINT_KIND, CHECKPOINT_VERSION, str(self.checkpoint))
        self._warn_of_another_version(checkpoint.get("versions", {}))
        return checkpoint

    def _warn_of_another_version(self, there: Mapping[str, str]) -> None:
        other = [
            f"{name} {there.get(name)}, here is {here}" for name, here in VERSIONS.items() if there.get(name) != here
        ]
        if other:
            warnings.warn(
                f"{self.checkpoint}: written by {'; '.join(other)}. The run goes on, but its numbers may not be those "
                "of a run that was never stopped",
                UserWarning,
                stacklevel=4,
            )

    def end(self, run: Run) -> None:
        _write(self.table, lambda file: file.write(_csv(run.epochs).encode()))
        with writing(self.result):
            write_json(self.result, run.result())


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """A file of a run that cannot be read is told so, by its own name and with the way out."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        said = str(error).removeprefix(f"{path}: ")
        raise RunError(f"{path}: damaged, {type(error).__name__} {said}; {AGAIN}") from error


def _refuse_another(path: Path, there: RunConfig, config: RunConfig) -> None:
    """Another config is refused, but for more epochs where those do not change the ones before."""
    different = there.differences(config)
    if set(different) == {"epochs"} and config.epochs > there.epochs:
        schedule = Schedule.parse(config.schedule)
        if not schedule.knows_its_end:
            return
        raise RunError(
            f"{path}: holds a run of {there.epochs} epochs; a {schedule} schedule that ends after {config.epochs} has "
            "other learning rates from the start, so it cannot be continued. Choose another folder (--out)"
        )
    if different:
        fields = ", ".join(f"{name} {old!r} there and {new!r} here" for name, (old, new) in different.items())
        raise RunError(f"{path}: holds another run: {fields}. Choose another folder (--out), or {AGAIN}")


def finite(row: Mapping[str, Any]) -> Row:
    """The same as plain numbers, and None for what is not finite: JSON knows no such numbers."""
    plain = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    return {name: value if math.isfinite(value) else None for name, value in plain.items()}


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _csv(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """All or nothing, whatever happens meanwhile: a file that is there is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path):
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
