"""The loss of a run: which part of the network's output it takes, what it expects of it, and what counts as a hit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mukron.data import Dataset, centred_one_hot
from mukron.data.dataset import IGNORED
from mukron.imports import import_function
from mukron.train.config import RunConfig
from mukron.train.errors import RunError

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
    smoothing, dim = config.label_smoothing, class_dim(config, dataset)

    def checked(output: Tensor) -> Tensor:
        check_output(output, config, dataset)
        output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return output if output.ndim == 2 else output.movedim(dim, -1)

    def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
        output = checked(output)
        if output.ndim > 2:
            output, labels = output.flatten(0, -2), labels.flatten()
        return F.cross_entropy(output, labels, label_smoothing=smoothing)

    def half_squares(output: Tensor, targets: Tensor) -> Tensor:
        output = checked(output)
        if not dataset.regression:
            targets = (1 - smoothing) * centred_one_hot(targets, output.shape[-1], output.dtype)
        loss: Tensor = (output - targets.to(output.dtype)).square().sum(-1).mean() / 2
        return loss

    return half_squares if config.loss == "mse" else cross_entropy


def _own_loss(config: RunConfig) -> Loss:
    function = import_function(config.loss, "loss")

    def own(output: Tensor, targets: Tensor) -> Tensor:
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


def class_dim(config: RunConfig, dataset: Dataset) -> int:
    """Return the dimension of the output that holds the classes: the last, unless the method's options say another.

    Args:
        config: The run.
        dataset: The data.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig()
        >>> class_dim(config, dataset_of(config))
        -1
    """
    given: int | None = config.method_options.get("class_dim")
    return -1 if given is None or dataset.regression else given


def output_of(config: RunConfig, returned: Any) -> Any:
    """Pick the output out of what the network returned: the part that ``config.output`` names.

    Args:
        config: The run.
        returned: What the network returned.

    Returns:
        The output.

    Raises:
        RunError: There is no such part, or several and none is named.

    Example:
        >>> output_of(RunConfig(output="logits"), {"logits": torch.zeros(2, 3), "loss": None}).shape
        torch.Size([2, 3])
    """
    name = config.output
    if name is None:
        if not isinstance(returned, Tensor) and (parts := _parts(returned)):
            raise RunError(
                f"the network returned a {type(returned).__name__} of {', '.join(parts)}; name its output, "
                f"output={next(iter(parts))!r} (--output {next(iter(parts))})"
            )
        return returned
    parts = _parts(returned)
    if name not in parts:
        known = ", ".join(parts) or "a tensor alone"
        raise RunError(f"output={name!r}: the network returned a {type(returned).__name__} of {known}")
    return parts[name]


def _parts(returned: Any) -> dict[str, Any]:
    """What a network returned, by name."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    if is_dataclass(returned):
        return {field.name: getattr(returned, field.name) for field in fields(returned)}
    if hasattr(returned, "_fields"):
        return {name: getattr(returned, name) for name in returned._fields}
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return {str(number): value for number, value in enumerate(returned)}
    return {}


def check_output(output: Any, config: RunConfig, dataset: Dataset) -> None:
    """Refuse an output that the loss cannot take.

    More classes than the labels show are fine: data of one's own may not hold them all.

    Args:
        output: The network's output for a batch.
        config: The run.
        dataset: The data.

    Raises:
        RunError: The output is no tensor, or has another shape than the targets want.
    """
    positions = list(dataset.train.targets.shape[1:])
    wanted = ", ".join(map(str, ["samples", *positions, *([] if dataset.regression else [dataset.classes])]))
    if not isinstance(output, Tensor):
        raise RunError(f"the network returned a {type(output).__name__}; expected a tensor [{wanted}]")
    if ":" in config.loss:
        return  # the user's own loss knows
    shape = list(output.shape if output.ndim < 2 else output.movedim(class_dim(config, dataset), -1).shape)
    fits = shape[1:] == positions if dataset.regression else shape[1:-1] == positions and shape[-1] >= dataset.classes
    if len(shape) < 2 or not fits:
        hint = ""
        if positions and not dataset.regression and len(shape) == len(positions) + 2:
            hint = "; if its classes are in dimension 1, say --set method_options.class_dim=1"
        raise RunError(f"the network's output has shape {list(output.shape)}; {config.data} wants [{wanted}]{hint}")


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


def hits(output: Tensor, targets: Tensor, dim: int) -> int:
    """Return how many targets are the likeliest class; 0 for regression and where shapes do not say.

    Args:
        output: The outputs of a batch.
        targets: Its targets.
        dim: The dimension of the output that holds the classes.

    Example:
        >>> hits(torch.eye(3), torch.tensor([0, 1, 1]), -1)
        2
    """
    if targets.is_floating_point() or output.ndim != targets.ndim + 1:
        return 0
    likeliest = output.detach().argmax(dim)
    return int((likeliest == targets).sum()) if likeliest.shape == targets.shape else 0
