"""The network of a run as a function of its width."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from mukron.data import Dataset
from mukron.imports import import_function
from mukron.models import get_model
from mukron.params.building import Factory
from mukron.train.config import RunConfig
from mukron.train.errors import RunError


def factory_of(config: RunConfig, dataset: Dataset) -> Factory:
    """Return a function that builds a run's network from the width alone.

    Args:
        config: The run.
        dataset: The data.

    Returns:
        The factory.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(width=64, method="sgd")
        >>> factory_of(config, dataset_of(config))(16).fc1.weight.shape
        torch.Size([16, 64])
    """
    make: Callable[..., Any]
    make = import_function(config.model, "model") if ":" in config.model else get_model(config.model).factory
    options = network_options(config, dataset)
    _check_width(config.model, make)
    if not options:
        return make

    def factory(width: float, depth: int | None = None) -> nn.Module:
        try:
            model: nn.Module = make(width, **{**options, **({} if depth is None else {"depth": depth})})
            return model
        except TypeError as error:
            first = str(error).partition("\n")[0]
            if isinstance(width, float) and ":" not in config.model:
                raise RunError(f"width={width:g}: the widths of {config.model} are whole numbers") from error
            raise RunError(f"model={config.model!r}, model_options={dict(config.model_options)}: {first}") from error

    return factory


def network_options(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the keyword arguments of a run's network, apart from its width: the config's, and what fits the data.

    Args:
        config: The run.
        dataset: The data.

    Returns:
        The keyword arguments by name.

    Raises:
        RunError: A built-in network does not take such samples.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(model_options={"depth": 2})
        >>> network_options(config, dataset_of(config))
        {'inputs': 64, 'classes': 10, 'depth': 2}
    """
    if ":" in config.model:
        return dict(config.model_options)
    base_depth = _base_depth(config)
    classes = dataset.classes
    if dataset.token_numbers and not dataset.tokens:  # targets of one's own may not show every token
        classes = max(classes, *(int(split.inputs.max()) + 1 for split in (dataset.train, dataset.test) if len(split)))
    try:
        fitting = get_model(config.model).options(dataset.input_shape, classes)
        return {**fitting, **base_depth, **config.model_options}
    except ValueError as error:
        raise RunError(f"model={config.model!r}, data={config.data!r}: {error}") from error


def _base_depth(config: RunConfig) -> dict[str, int]:
    """The base depth as an option of a built-in network, which multiplies its branches by it; under SP it does not."""
    if config.base_depth is None:
        return {}
    if "base_depth" not in inspect.signature(get_model(config.model).factory).parameters:
        raise RunError(f"model={config.model!r} has no residual blocks, and base_depth={config.base_depth} no meaning")
    return {} if config.scheme == "sp" else {"base_depth": config.base_depth}


def _check_width(name: str, make: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a function that does not say
        return
    if not parameters:
        raise RunError(f"model={name!r}: takes no arguments; expected a function of the width, def make(width): ...")


def base_width_of(config: RunConfig) -> float:
    """Return the width that a run's settings are tuned at.

    Args:
        config: The run.

    Returns:
        The base width: the config's, or the built-in network's usual one.

    Example:
        >>> from mukron.train import RunConfig
        >>> base_width_of(RunConfig(base_width=32))
        32
    """
    return config.base_width if config.base_width is not None else get_model(config.model).base_width
