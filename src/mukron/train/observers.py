"""Functions of the user: those that see how far a run is, and observers, which add numbers to every epoch's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mukron.data import Dataset
from mukron.train.build import Built
from mukron.train.config import RunConfig
from mukron.train.errors import RunError
from mukron.train.rows import EpochRow

EPOCH_COLUMNS = {"epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"}


@dataclass(frozen=True)
class Progress:
    """Where a run stands, after every step and, with its row, after every epoch.

    Attributes:
        epoch: The epoch under way, from 1.
        epochs: All epochs.
        step: Steps taken.
        steps: All steps.
        loss: The mean loss of the epoch so far.
        accuracy: The accuracy of the epoch so far; NaN if there is none.
        seconds_left: The estimated time until the run ends.
        row: The epoch's numbers, if it has just ended.

    Example:
        >>> Progress(epoch=1, epochs=20, step=3, steps=100, loss=2.3, accuracy=0.1, seconds_left=9.0).steps
        100
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float
    seconds_left: float
    row: EpochRow | None = None


def standing_of(at: Progress) -> tuple[float, float, str]:
    """What a progress bar shows of a run."""
    return at.step, at.steps, f"steps, epoch {at.epoch}/{at.epochs}, loss {at.loss:.4g}"


@dataclass(frozen=True)
class Moment:
    """The end of an epoch, as an observer sees it. What it returns joins the epoch's row.

    Attributes:
        config: The run.
        built: The network, its optimizer and its loss.
        dataset: The data.
        epoch: The epoch that has ended, from 1.
        step: Steps taken so far.
        row: The epoch's numbers.

    Example:
        >>> def weight_norm(moment):
        ...     return {"norm": float(moment.built.model.fc1.weight.detach().norm())}
        >>> from mukron.train import RunConfig, train
        >>> run = train(RunConfig(width=64, method="sgd", epochs=1), observe=[weight_norm])
        >>> run.status
        'finished'
    """

    config: RunConfig
    built: Built
    dataset: Dataset
    epoch: int
    step: int
    row: Mapping[str, Any]


Observer = Callable[[Moment], Mapping[str, float]]


def observed(observer: Observer, moment: Moment) -> dict[str, float]:
    """Return an observer's numbers, which may not replace those of the row. The network is left as it was."""
    taken = EPOCH_COLUMNS.union(moment.row)
    with moment.built.untouched():
        numbers: Any = observer(moment)
    name = getattr(observer, "__name__", repr(observer))
    if not isinstance(numbers, Mapping):
        raise RunError(f"observer {name}: returned {numbers!r:.80}; expected numbers by name, or {{}}")
    for column, value in numbers.items():
        if column in taken:
            raise RunError(f"observer {name}: a row has its own {column!r}; give the number another name")
        try:
            float(value)
        except (TypeError, ValueError) as error:
            raise RunError(f"observer {name}: {column!r} is {value!r:.80}, not a number") from error
    return dict(numbers)
