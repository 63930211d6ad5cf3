"""Base shapes: which dimensions of a network grow with its width, and how large and how spread they are at the base."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from mukron.layers import Fans, Shape
from mukron.params.errors import ParametrizationError
from mukron.params.initial import Spread, measure
from mukron.params.inventory import Found, inventory, on_meta
from mukron.params.resolve import Sizes, check_names, resolve
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.theory import Role

KIND, VERSION = "base_shapes", 2
MAX_DRAWS, NUMBERS_TO_DRAW = 8, 4_000_000

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class BaseParameter:
    """One parameter at the base width."""

    base: Sizes
    wider: Sizes | None  # the same at another width; None: not known, the network itself is compared instead
    role: Role | None  # declared by the user; None: told by the modules that own it
    spread: Spread  # of its initial values


@dataclass(frozen=True)
class BaseShapes:
    """The base of a family of networks, by parameter name. Saves to and loads from JSON."""

    parameters: Mapping[str, BaseParameter]
    width: float | None = None  # for people: the number the factory was called with

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BaseShapes:
        return cls.from_dict(read_json(path), source=str(path))

    def to_dict(self) -> Data:
        parameters = {
            name: {
                "base": _sizes_to_dict(entry.base),
                "wider": entry.wider and _sizes_to_dict(entry.wider),
                "role": entry.role and entry.role.value,
                "std": entry.spread.std,
                "numbers": entry.spread.numbers,
                "center": entry.spread.center,
                "kurtosis": entry.spread.kurtosis,
            }
            for name, entry in self.parameters.items()
        }
        return stamp(KIND, VERSION, {"width": self.width, "parameters": parameters})

    @classmethod
    def from_dict(cls, data: object, source: str = "base shapes") -> BaseShapes:
        content = check_stamp(data, KIND, VERSION, source)
        with damaged(source):
            parameters = {
                name: BaseParameter(
                    base=_sizes_from_dict(entry["base"]),
                    wider=entry["wider"] and _sizes_from_dict(entry["wider"]),
                    role=entry["role"] and Role(entry["role"]),
                    spread=Spread(entry["std"], entry["numbers"], entry["center"], entry["kurtosis"]),
                )
                for name, entry in content["parameters"].items()
            }
            return cls(parameters, content["width"])


def plain_width(width: float) -> float:
    """A number of Python's own, whole where it is: networks take no 64.0, and JSON no numbers of numpy."""
    return int(width) if float(width).is_integer() else float(width)


def base_shapes(
    source: Factory | nn.Module, width: float | None = None, *, roles: Mapping[str, Role | str] | None = None
) -> BaseShapes:
    """What to compare a network with: the same network at the width its settings are tuned at.

    source: a function (or class) that builds the network for a given width: its parameter called ``width``, or the only
        one it has. It is built (several times, if small) at ``width``, for its shapes
        and the spread of its initial values, and at twice that on the meta device, without memory, to see what grows.
        Or the network at the base width itself: then what grows is seen when a wider one is parametrized.
    roles: the roles of parameters that no known module owns, or whose owners disagree, by name:
        ``roles={"position": "input"}``.
    """
    if roles is not None and not isinstance(roles, Mapping):
        raise ParametrizationError(f'roles must be given by name, roles={{"position": "input"}}, got {roles!r}')
    declared = {name: _role(name, role) for name, role in (roles or {}).items()}
    if isinstance(source, nn.Module):
        found = inventory(source)
        if on_meta(found):
            raise ParametrizationError(
                "the base model is on the meta device: its initial values show nothing; use a factory"
            )
        _check_declared(found, declared)
        parameters = {
            name: BaseParameter(_sizes(entry), None, declared.get(name), measure([entry.parameter]))
            for name, entry in found.items()
        }
        return BaseShapes(parameters, width)

    if not callable(source):
        raise ParametrizationError(
            f"expected a function that builds the network for a width, or a module, got {source!r}"
        )
    if width is None:
        raise ParametrizationError("base_shapes(factory) needs the base width: base_shapes(factory, width=64)")
    if isinstance(width, bool) or not isinstance(width, Real) or not width > 0:
        raise ParametrizationError(f"the base width must be a positive number, got {width!r}")
    width = plain_width(width)
    found, spreads = _draw(source, width)
    _check_declared(found, declared)
    wider = inventory(build_without_memory(source, 2 * width))
    check_names(found, wider, f"at width {2 * width}", f"at width {width}")
    parameters = {
        name: BaseParameter(_sizes(entry), _sizes(wider[name]), declared.get(name), spreads[name])
        for name, entry in found.items()
    }
    if all(entry.base.shape == entry.wider.shape for entry in parameters.values() if entry.wider):
        raise ParametrizationError(
            f"no parameter's shape differs between widths {width} and {2 * width}; does the factory use its width?"
        )
    for name, entry in parameters.items():  # says now what would be wrong at every width
        assert entry.wider is not None
        resolve(name, entry.base, entry.wider, entry.wider, entry.role, found[name].owner)
    return BaseShapes(parameters, width)


def _role(name: str, role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError:
        known = ", ".join(repr(each.value) for each in Role)
        raise ParametrizationError(f'parameter "{name}": unknown role {role!r}; known: {known}') from None


def _check_declared(found: Mapping[str, Found], declared: Mapping[str, Role]) -> None:
    for name in declared:
        if name not in found:
            aliases = {alias: first for first, entry in found.items() for alias in entry.uses}
            hint = f'; it is tied to "{aliases[name]}": declare that' if name in aliases else ""
            raise ParametrizationError(f'roles: the network has no parameter "{name}"{hint}')


def _sizes(found: Found) -> Sizes:
    return Sizes(found.shape, found.uses)


def build(factory: Factory, width: float) -> nn.Module:
    """The factory's network at that width."""
    try:
        parameters = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        parameters = []
    if "width" in parameters:
        model = factory(width=width)
    elif len(parameters) > 1:
        names = ", ".join(parameters)
        raise ParametrizationError(
            f"which parameter of the factory is its width: {names}? Say so: base_shapes(lambda width: ..., width=...)"
        )
    else:
        model = factory(width)
    if not isinstance(model, nn.Module):
        raise ParametrizationError(f"the factory returned a {type(model).__name__}, expected an nn.Module")
    return model


def _draw(factory: Factory, width: float) -> tuple[dict[str, Found], dict[str, Spread]]:
    """Build at the base width; small networks several times, since few numbers tell their spread only roughly."""
    with _own_random_numbers(), torch.device("cpu"):
        found = inventory(build(factory, width))
        if on_meta(found):
            raise ParametrizationError(
                "the factory builds on the meta device even at the base width: leave the device open"
            )
        numbers = sum(entry.parameter.numel() for entry in found.values())
        more = min(MAX_DRAWS, NUMBERS_TO_DRAW // max(1, numbers)) - 1
        draws = [found, *(inventory(build(factory, width)) for _ in range(more))]
    return found, {name: measure([draw[name].parameter for draw in draws]) for name in found}


def build_without_memory(factory: Factory, width: float) -> nn.Module:
    """On the meta device, if the factory can do without numbers."""
    with _own_random_numbers():
        try:
            with torch.device("meta"):
                return build(factory, width)
        except (NotImplementedError, RuntimeError):  # something in it needs real numbers
            with torch.device("cpu"):
                return build(factory, width)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the user's random streams as they were, and draw the same numbers each time."""
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


def _sizes_to_dict(sizes: Sizes) -> Data:
    return {"shape": list(sizes.shape), "uses": {name: use and list(use) for name, use in sizes.uses.items()}}


def _sizes_from_dict(data: Mapping[str, Any]) -> Sizes:
    shape: Shape = tuple(data["shape"])
    return Sizes(shape, {name: use and Fans(*use) for name, use in data["uses"].items()})
