"""The numbers of a split: its loss, its accuracy, and for a text its bits per byte."""

from __future__ import annotations

import math

import torch

from mukron.data import Dataset
from mukron.train.build import Built
from mukron.train.config import RunConfig
from mukron.train.losses import counted
from mukron.train.outputs import hits
from mukron.train.processes import ONE_PROCESS, Processes
from mukron.train.rows import EpochRow

EVALUATED = 1024  # targets, such as 16 windows of 64 tokens, in one forward pass of an evaluation


@torch.no_grad()
def evaluate(built: Built, dataset: Dataset, processes: Processes = ONE_PROCESS) -> tuple[float, float | None]:
    """Return loss and accuracy on the test samples. Samples whose targets are all ignored do not count.

    Args:
        built: The network and its loss; it is in training mode afterwards.
        dataset: The data, with test samples.
        processes: Those that share the samples. All of them must call this, and get the same.

    Returns:
        The mean loss over all targets, and the accuracy; None if the network's output has none.

    Example:
        >>> from mukron.train import RunConfig, build, dataset_of
        >>> config = RunConfig(width=64, method="sgd")
        >>> data = dataset_of(config)
        >>> loss, accuracy = evaluate(build(config, data), data)
        >>> 2 < loss < 3
        True
    """
    test, model = dataset.test, built.model
    loss, seen = 0.0, 0
    correct: int | None = 0
    at_once = max(1, EVALUATED // dataset.positions) * processes.size
    model.eval()
    for inputs, targets in zip(torch.split(test.inputs, at_once), torch.split(test.targets, at_once), strict=True):
        part = processes.part(len(targets))
        y = targets[part]
        number = counted(y)
        if not number and processes.size == 1:
            continue
        x = inputs[part] if len(y) else inputs[:1]  # a sharded network runs on all ranks or on none
        output = built.outputs(dataset.prepare(x, built.config.weights_dtype))
        if not number:
            continue
        loss += built.loss(output, y).item() * number
        correct = total(correct, hits(output, y, built.config, dataset))
        seen += number
    model.train()
    losses, count, right = processes.totals([loss, seen, correct or 0])
    return losses / count, None if correct is None else right / count


def total(correct: int | None, more: int | None) -> int | None:
    """Return the sum of two numbers of hits; None if one of them is not known.

    Args:
        correct: A number of hits.
        more: Another one.

    Example:
        >>> total(1, 2), total(1, None)
        (3, None)
    """
    return None if correct is None or more is None else correct + more


def columns(config: RunConfig, dataset: Dataset, split: str, loss: float, accuracy: float | None) -> EpochRow:
    """Return the numbers of a split as columns of an epoch's row.

    Args:
        config: The run.
        dataset: The data.
        split: "train" or "test".
        loss: The loss.
        accuracy: The accuracy; None if there is none.

    Returns:
        The loss, the accuracy if there is one, and the bits per byte if the loss is the plain cross-entropy of a text.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig()
        >>> columns(config, dataset_of(config), "test", loss=0.5, accuracy=0.9)
        {'test_loss': 0.5, 'test_accuracy': 0.9}
    """
    row: EpochRow = {f"{split}_loss": loss}
    if accuracy is not None:
        row[f"{split}_accuracy"] = accuracy
    if dataset.tokens == "bytes" and config.loss == "cross-entropy" and not config.label_smoothing:
        row[f"{split}_bits_per_byte"] = loss / math.log(2)
    return row
