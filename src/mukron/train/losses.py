"""The loss of a run, and how many targets it is a mean over."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mukron.data import Dataset, centred_one_hot
from mukron.data.dataset import IGNORED
from mukron.imports import import_function
from mukron.train.config import RunConfig
from mukron.train.errors import RunError
from mukron.train.outputs import check_output, class_dim

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_of(config: RunConfig, dataset: Dataset) -> Loss:
    """Return the loss of a run.

    Args:
        config: The run.
        dataset: The data.

    Returns:
        A function from outputs and targets to the mean loss over samples and positions.

    Raises:
        RunError: The loss does not suit the targets.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig()
        >>> loss_of(config, dataset_of(config))(torch.zeros(1, 10), torch.tensor([0]))
        tensor(2.3026)
    """
    if ":" in config.loss:
        return _own_loss(config)
    if dataset.regression and config.loss != "mse":
        raise RunError(
            f"loss={config.loss!r}: the targets of {config.data} are real numbers; use loss='mse', or a loss of your "
            "own, loss='module:function'"
        )
    if dataset.regression and config.label_smoothing:
        raise RunError(f"label_smoothing={config.label_smoothing:g}: the targets of {config.data} are real numbers")
    smoothing = config.label_smoothing

    def checked(output: Tensor) -> Tensor:
        check_output(output, config, dataset)
        dim = class_dim(config, dataset, output.shape)
        assert dim is not None  # of a built-in loss
        return _precise(output if output.ndim == 2 else output.movedim(dim, -1))

    def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
        output = checked(output)
        if output.ndim > 2:
            output, labels = output.flatten(0, -2), labels.flatten()
        return F.cross_entropy(output, labels, label_smoothing=smoothing)

    def half_squares(output: Tensor, targets: Tensor) -> Tensor:
        output = checked(output)
        if dataset.regression:
            wanted, counts = targets.to(output.dtype).reshape(targets.shape if targets.ndim > 1 else (-1, 1)), None
        else:
            counts = None if targets.ndim == 1 else targets != IGNORED
            labels = targets if counts is None else targets.clamp(min=0)
            wanted = (1 - smoothing) * centred_one_hot(labels, output.shape[-1], output.dtype)
        if output.shape != wanted.shape:
            raise RunError(
                f"loss='mse': the network's output has shape {list(output.shape)}, but the targets of {config.data} "
                f"want {list(wanted.shape)}"
            )
        squares = (output - wanted).square().sum(-1)
        return (squares if counts is None else squares[counts]).mean() / 2

    return half_squares if config.loss == "mse" else cross_entropy


def _own_loss(config: RunConfig) -> Loss:
    function = import_function(config.loss, "loss")

    def own(output: Tensor, targets: Tensor) -> Tensor:
        output = _precise(output)
        if targets.is_floating_point() and output.shape != targets.shape and output.numel() == targets.numel():
            warnings.warn(
                f"loss={config.loss!r}: outputs are {list(output.shape)} and targets {list(targets.shape)}; their "
                "difference would be one of all pairs. Give both the same shape, in the data or in the loss",
                UserWarning,
                stacklevel=2,
            )
        try:
            loss = function(output, targets)
        except Exception as error:
            raise RunError(
                f"loss={config.loss!r} could not take outputs {list(output.shape)} and targets {list(targets.shape)}: "
                f"{' '.join(str(error).split())}"
            ) from error
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise RunError(f"loss={config.loss!r}: returned {got}; expected one number, the mean loss of a batch")
        return loss

    return own


def _precise(output: Tensor) -> Tensor:
    """What autocast computed in 16 bits as float32, in which losses are computed."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


def counted(targets: Tensor) -> int:
    """Return how many targets count: samples, or positions that are not ignored.

    Args:
        targets: The targets of a batch.

    Example:
        >>> counted(torch.tensor([[1, 2, -100]])), counted(torch.zeros(4, 2))
        (2, 4)
    """
    if targets.is_floating_point() or targets.ndim == 1:
        return len(targets)
    return int((targets != IGNORED).sum())
