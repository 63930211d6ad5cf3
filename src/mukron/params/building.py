"""Networks from a factory: at a width and a depth, with values or without memory, from random numbers of its own."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real

import numpy as np
import torch
from torch import nn

from mukron.params.errors import ParametrizationError
from mukron.params.initial import SameRandomNumbers, Spread, measure
from mukron.params.inventory import Found, inventory, on_meta
from mukron.params.sharded import is_sharded
from mukron.readers import shown

LARGEST_WIDTH = 1e15
MAX_DRAWS, NUMBERS_TO_DRAW = 8, 4_000_000

Factory = Callable[..., nn.Module]


def plain_width(width: float) -> float:
    """The width as a Python int if it is whole, else a float: networks do not take 64.0, nor JSON numpy's numbers.

    Args:
        width: A number of any type.

    Returns:
        The width as Python's int or float.

    Raises:
        ParametrizationError: It is no number above 0, or larger than any network could be.

    Example:
        >>> plain_width(64.0), plain_width(0.5)
        (64, 0.5)
    """
    if isinstance(width, bool) or not isinstance(width, Real):
        raise ParametrizationError(f"width must be a number, got {shown(width)}")
    if not 0 < width <= LARGEST_WIDTH:
        raise ParametrizationError(f"width must be above 0 and at most {LARGEST_WIDTH:g}, got {shown(width)}")
    return int(width) if float(width).is_integer() else float(width)


def build(factory: Factory, width: float) -> nn.Module:
    """The factory's network at that width."""
    parameters = _parameters(factory)
    if parameters == []:
        raise ParametrizationError(
            "the factory takes no arguments, expected one for the width: base_shapes(lambda width: ..., width=...)"
        )
    if parameters is not None and "width" in parameters:
        model = _called(lambda: factory(width=width), width)
    elif parameters is not None and len(parameters) > 1:
        names = ", ".join(parameters)
        raise ParametrizationError(
            f"which parameter of the factory is its width: {names}? Say so: base_shapes(lambda width: ..., width=...)"
        )
    else:
        model = _called(lambda: factory(width), width)
    if not isinstance(model, nn.Module):
        raise ParametrizationError(f"the factory returned a {type(model).__name__}, expected an nn.Module")
    if any(map(is_sharded, model.parameters())):
        raise ParametrizationError(
            "the factory returned a model whose parameters are DTensors; let it return the plain model, and shard it "
            "outside of the factory"
        )
    return model


def _called(make: Callable[[], nn.Module], width: float) -> nn.Module:
    """Most networks take whole widths alone, and say so in torch's words."""
    try:
        return make()
    except TypeError as error:
        if isinstance(width, int):
            raise
        raise ParametrizationError(
            f"width={width:g}: the widths of this network are whole numbers ({error})"
        ) from error


def at_depth(factory: Factory, depth: int) -> Factory:
    """The factory of the network at that depth: a function of the width alone.

    Args:
        factory: Takes the depth as ``depth``, and the width as ``width`` or as its only other parameter.
        depth: The depth.
    """
    parameters = _parameters(factory) or []
    if parameters and "depth" not in parameters and not _takes_any(factory):
        raise ParametrizationError(
            f"depth={depth}: the factory has no parameter called depth, only {', '.join(parameters)}; "
            "write base_shapes(lambda width, depth: ..., width=..., depth=...)"
        )
    others = [name for name in parameters if name != "depth"]
    if "width" not in others and len(others) > 1:
        raise ParametrizationError(
            f"which parameter of the factory is its width: {', '.join(others)}? Say so: "
            "base_shapes(lambda width, depth: ..., width=..., depth=...)"
        )

    def network(width: float) -> nn.Module:
        return factory(width=width, depth=depth) if "width" in others else factory(width, depth=depth)

    return network


def _parameters(factory: Factory) -> list[str] | None:
    """The names of the factory's arguments; None: Python does not know them, as of some functions in C."""
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return None


def _takes_any(factory: Factory) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(factory).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def draw(factory: Factory, width: float) -> tuple[nn.Module, dict[str, Found], dict[str, Spread]]:
    """Build at the base width, several times if small: the std of few numbers is inaccurate."""
    with own_random_streams(), torch.device("cpu"):
        model = build(factory, width)
        found = inventory(model)
        if on_meta(found):
            raise ParametrizationError(
                "the factory builds on the meta device even at the base width: leave the device open"
            )
        numbers = sum(entry.parameter.numel() for entry in found.values())
        more = min(MAX_DRAWS, NUMBERS_TO_DRAW // max(1, numbers)) - 1
        draws = [found, *(inventory(build(factory, width)) for _ in range(more))]
        if more > 0 and all(torch.equal(draws[1][name].parameter, entry.parameter) for name, entry in found.items()):
            draws = [draw_from(seed, factory, width) for seed in range(more + 1)]  # the factory seeds torch itself
    return model, found, {name: measure([draw[name].parameter for draw in draws]) for name in found}


def draw_from(seed: int, factory: Factory, width: float) -> dict[str, Found]:
    """Build at a width from the same random numbers as every other network with that seed."""
    with SameRandomNumbers(seed):
        return inventory(build(factory, width))


def build_without_memory(factory: Factory, width: float) -> nn.Module:
    """Build the factory's network at a width, on the meta device if the factory works without values.

    Args:
        factory: Builds the network from its width.
        width: The width.

    Returns:
        The network.

    Example:
        >>> from mukron.models import MLP
        >>> build_without_memory(MLP, 4096).fc2.weight.device.type
        'meta'
    """
    with own_random_streams():
        try:
            with torch.device("meta"):
                return build(factory, width)
        except (NotImplementedError, RuntimeError):  # something in it needs values
            with torch.device("cpu"):
                return build(factory, width)


@contextmanager
def own_random_streams() -> Iterator[None]:
    """Draw the same numbers each time, and leave the user's random streams as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
