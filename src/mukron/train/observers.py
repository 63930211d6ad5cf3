"""Observers: functions of the user that see every epoch's end and add numbers to its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mukron.data import Dataset
from mukron.train.build import Built
from mukron.train.config import RunConfig
from mukron.train.errors import RunError

COLUMNS = {"epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"}  # a row's


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
    taken = COLUMNS.union(moment.row)
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
