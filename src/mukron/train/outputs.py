"""The output of a network: which part of what it returns, where its classes are, what it must be, what is a hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mukron.data import Dataset
from mukron.train.config import RunConfig
from mukron.train.errors import RunError


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
        >>> import torch
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


def given_class_dim(config: RunConfig) -> int | None:
    """Return what a run says about where the classes are: its field, or the option of K-FAC's that means the same.

    Args:
        config: The run.

    Example:
        >>> given_class_dim(RunConfig(class_dim=1)), given_class_dim(RunConfig())
        (1, None)
    """
    option: int | None = config.method_options.get("class_dim")
    return option if config.class_dim is None else config.class_dim


def class_dim(config: RunConfig, dataset: Dataset, shape: Sequence[int]) -> int | None:
    """Return the dimension of an output that holds the classes.

    It is what the run says, and the last one for a built-in loss. For a loss of the user's own it is the one without
    which the output has the targets' shape.

    Args:
        config: The run.
        dataset: The data.
        shape: The shape of the output.

    Returns:
        The dimension; None if the shapes do not show it.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig()
        >>> class_dim(config, dataset_of(config), (64, 10))
        -1
    """
    given = given_class_dim(config)
    if dataset.regression or ":" not in config.loss or given is not None:
        return -1 if given is None or dataset.regression else given
    positions = list(dataset.train.targets.shape[1:])
    dims = [dim for dim in range(1, len(shape)) if [*shape[1:dim], *shape[dim + 1 :]] == positions]
    if len(dims) != 1:
        return None
    return -1 if dims[0] == len(shape) - 1 else dims[0]


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
    positions = list(dataset.train.targets.shape[1:]) or ([1] if dataset.regression else [])
    wanted = ", ".join(map(str, ["samples", *positions, *([] if dataset.regression else [dataset.classes])]))
    if not isinstance(output, Tensor):
        raise RunError(f"the network returned a {type(output).__name__}; expected a tensor [{wanted}]")
    dim = class_dim(config, dataset, output.shape)
    if dim is not None and output.ndim > 1 and not (-output.ndim < dim < output.ndim and dim):
        raise RunError(f"class_dim={dim}: does not fit the network's output of shape {list(output.shape)}")
    if ":" in config.loss or dim is None:
        return  # the user's own loss knows
    shape = list(output.shape if output.ndim < 2 else output.movedim(dim, -1).shape)
    fits = shape[1:] == positions if dataset.regression else shape[1:-1] == positions and shape[-1] >= dataset.classes
    if len(shape) < 2 or not fits:
        hint = ""
        moved = list(output.movedim(1, -1).shape) if output.ndim > 2 else []
        if positions and not dataset.regression and moved[1:-1] == positions and moved[-1] >= dataset.classes:
            hint = "; if its classes are in dimension 1, say --set class_dim=1 (RunConfig(class_dim=1))"
        raise RunError(f"the network's output has shape {list(output.shape)}; {config.data} wants [{wanted}]{hint}")


def hits(output: Tensor, targets: Tensor, config: RunConfig, dataset: Dataset) -> int | None:
    """Return how many targets are the likeliest class.

    Args:
        output: The outputs of a batch.
        targets: Its targets.
        config: The run.
        dataset: The data.

    Returns:
        The number; None for regression, and for a loss of the user's own if shapes do not show where the classes are.

    Example:
        >>> import torch
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig()
        >>> hits(torch.eye(10)[:3], torch.tensor([0, 1, 1]), config, dataset_of(config))
        2
    """
    dim = class_dim(config, dataset, output.shape)
    if dataset.regression or dim is None or output.ndim != targets.ndim + 1:
        return None
    if ":" in config.loss and output.shape[dim] < max(2, dataset.classes):
        return None  # such as one logit for two classes
    likeliest = output.detach().argmax(dim)
    return int((likeliest == targets).sum()) if likeliest.shape == targets.shape else None
