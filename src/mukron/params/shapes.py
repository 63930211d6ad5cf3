"""Base shapes: which dimensions of a network grow with its width, and sizes and initial values at the base width."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from mukron.layers import Fans, Shape
from mukron.params.declared import declared_roles
from mukron.params.errors import ParametrizationError
from mukron.params.initial import Law, SameRandomNumbers, Spread, law_of_change, measure, scale_change
from mukron.params.inventory import Found, inventory, on_meta
from mukron.params.resolve import Growth, Sizes, check_names, resolve
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.theory import Role

KIND, VERSION = "base_shapes", 2  # 2: with the laws of the initializers
MAX_DRAWS, NUMBERS_TO_DRAW = 8, 4_000_000
PROBE_DRAWS, NUMBERS_TO_PROBE = 3, 8_000_000  # draws at two widths from the same random numbers

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class BaseParameter:
    """One parameter at the base width.

    Attributes:
        base: Its sizes and fans at the base width.
        wider: The same at another width; None: not known, and the network itself is compared instead.
        role: The role that the user declared; None: it follows from the modules that own the parameter.
        spread: Standard deviation, number, centre and kurtosis of its initial values.
        law: How its initializer depends on the width; None: not known.

    Example:
        >>> from mukron import base_shapes
        >>> from mukron.models import MLP
        >>> base_shapes(MLP, width=16).parameters["fc1.weight"].base.shape
        (16, 784)
    """

    base: Sizes
    wider: Sizes | None
    role: Role | None
    spread: Spread
    law: Law | None = None


@dataclass(frozen=True)
class BaseShapes:
    """A network at its base width, by parameter name: shapes, what grows, and the spread of the initial values.

    Made by ``base_shapes``. It is plain data, which saves to and loads from JSON.

    Attributes:
        parameters: The parameters at the base width, by name.
        width: The width that the factory was called with; for display only.

    Example:
        >>> import os, tempfile
        >>> from torch import nn
        >>> from mukron.params import BaseShapes, base_shapes
        >>> shapes = base_shapes(lambda width: nn.Linear(width, 10), width=16)
        >>> shapes.parameters["weight"].base.shape, shapes.parameters["weight"].wider.shape
        ((10, 16), (10, 32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "shapes.json")
        ...     shapes.save(path)
        ...     BaseShapes.load(path) == shapes
        True
    """

    parameters: Mapping[str, BaseParameter]
    width: float | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file.

        Args:
            path: The path of the JSON file.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BaseShapes:
        """Read a JSON file that ``save`` wrote.

        Args:
            path: The path of the JSON file.

        Raises:
            ParametrizationError: The file is damaged, or of another kind or version.
        """
        return cls.from_dict(read_json(path), source=str(path))

    def to_dict(self) -> Data:
        """Plain JSON data, as ``save`` writes it."""
        parameters = {
            name: {
                "base": _sizes_to_dict(entry.base),
                "wider": entry.wider and _sizes_to_dict(entry.wider),
                "role": entry.role and entry.role.value,
                "std": entry.spread.std,
                "numbers": entry.spread.numbers,
                "center": entry.spread.center,
                "kurtosis": entry.spread.kurtosis,
                "law": entry.law and _law_to_dict(entry.law),
            }
            for name, entry in self.parameters.items()
        }
        return stamp(KIND, VERSION, {"width": self.width, "parameters": parameters})

    @classmethod
    def from_dict(cls, data: object, source: str = "base shapes") -> BaseShapes:
        """Read the data of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.
            source: Names the data in errors.
        """
        content = check_stamp(data, KIND, VERSION, source)
        with damaged(source):
            parameters = {
                name: BaseParameter(
                    base=_sizes_from_dict(entry["base"]),
                    wider=entry["wider"] and _sizes_from_dict(entry["wider"]),
                    role=entry["role"] and Role(entry["role"]),
                    spread=Spread(entry["std"], entry["numbers"], entry["center"], entry["kurtosis"]),
                    law=entry["law"] and _law_from_dict(entry["law"], content["parameters"]),
                )
                for name, entry in content["parameters"].items()
            }
            return cls(parameters, content["width"])


def plain_width(width: float) -> float:
    """The width as a Python int if it is whole, else a float: networks do not take 64.0, nor JSON numpy's numbers.

    Args:
        width: A number of any type.

    Returns:
        The width as Python's int or float.

    Example:
        >>> plain_width(64.0), plain_width(0.5)
        (64, 0.5)
    """
    return int(width) if float(width).is_integer() else float(width)


def base_shapes(
    source: Factory | nn.Module, width: float | None = None, *, roles: Mapping[str, Role | str] | None = None
) -> BaseShapes:
    """Record a network at its base width, the one that its settings are tuned at, and what grows with the width.

    A factory is built at ``width`` for its shapes and the spread of its initial values, several times if it is small,
    and at twice the width on the meta device, without memory, to see which dimensions grow. A small network is also
    built for real at both widths, from the same random numbers, which shows how each initializer depends on the width.
    The user's random streams are left as they were.

    Args:
        source: A function or class that builds the network for a given width, which is its parameter ``width`` or its
            only parameter. Or the network at the base width itself: what grows is then determined when a wider network
            is parametrized, and initializers are known from the values of the two networks alone.
        width: The base width; required with a factory.
        roles: Roles of the parameters that no known module owns or whose owners disagree, by name, such as
            ``{"position": "input"}``. Roles are input, hidden, output, vector and scalar. A module may declare them
            itself, ``self.mukron_roles = {"position": "input"}``; those given here win.

    Returns:
        The base shapes, for ``parametrize``.

    Raises:
        ParametrizationError: The source is neither a factory nor a network with values, the width is missing or not
            positive, no shape depends on the width, or the role of a parameter cannot be determined.

    Example:
        >>> from torch import nn
        >>> import mukron
        >>> def network(width):
        ...     return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
        >>> shapes = mukron.base_shapes(network, width=64)
        >>> p = mukron.parametrize(network(256), shapes)
        >>> p.parameters["2.weight"].growth.r_in
        Fraction(4, 1)
    """
    if isinstance(source, nn.Module):
        found = inventory(source)
        if on_meta(found):
            raise ParametrizationError(
                "the base model is on the meta device: its initial values show nothing; use a factory"
            )
        declared = declared_roles(source, found, roles)
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
    model, found, spreads = _draw(source, width)
    declared = declared_roles(model, found, roles)
    wider = inventory(build_without_memory(source, 2 * width))
    check_names(found, wider, f"at width {2 * width}", f"at width {width}")
    if all(entry.shape == wider[name].shape for name, entry in found.items()):
        raise ParametrizationError(
            f"no parameter's shape differs between widths {width} and {2 * width}; does the factory use its width?"
        )
    growths = {}
    for name, entry in found.items():  # reports now what would be wrong at every width
        sizes = _sizes(wider[name])
        growths[name] = resolve(name, _sizes(entry), sizes, sizes, declared.get(name), entry.owner)
    laws = _laws(source, width, found, wider, spreads, growths)
    parameters = {
        name: BaseParameter(_sizes(entry), _sizes(wider[name]), declared.get(name), spreads[name], laws.get(name))
        for name, entry in found.items()
    }
    return BaseShapes(parameters, width)


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


def _draw(factory: Factory, width: float) -> tuple[nn.Module, dict[str, Found], dict[str, Spread]]:
    """Build at the base width, several times if small: the std of few numbers is inaccurate."""
    with _own_random_numbers(), torch.device("cpu"):
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
            draws = [_draw_from(seed, factory, width) for seed in range(more + 1)]  # the factory seeds torch itself
    return model, found, {name: measure([draw[name].parameter for draw in draws]) for name in found}


def _draw_from(seed: int, factory: Factory, width: float) -> dict[str, Found]:
    with SameRandomNumbers(seed):
        return inventory(build(factory, width))


def _laws(
    factory: Factory,
    width: float,
    base: Mapping[str, Found],
    wider: Mapping[str, Found],
    spreads: Mapping[str, Spread],
    growths: Mapping[str, Growth],
) -> dict[str, Law]:
    """How the initializer of each parameter depends on the width, where draws from the same random numbers show it."""
    varied = [name for name, spread in spreads.items() if spread.std != 0]
    numbers = sum(entry.parameter.numel() for network in (base, wider) for entry in network.values())
    if not varied or PROBE_DRAWS * numbers > NUMBERS_TO_PROBE:
        return {}
    draws: dict[float, list[dict[str, Found]]] = {width: [], 2 * width: []}
    with _own_random_numbers(), torch.device("cpu"):
        for size, networks in draws.items():
            networks.extend(_draw_from(seed, factory, size) for seed in range(PROBE_DRAWS))
    laws = {}
    for name in varied:
        change = scale_change(*([network[name].parameter for network in networks] for networks in draws.values()))
        law = None if change is None else law_of_change(change, _sources(name, growths))
        if law is not None:
            laws[name] = law
    return laws


def _sources(name: str, growths: Mapping[str, Growth]) -> list[tuple[str, str, Fraction]]:
    """What an initializer may follow: first the fan-in of its own layer, then its fan-out, then any other layer's."""
    module = name.rpartition(".")[0]
    own = [name, *(other for other in growths if other.rpartition(".")[0] == module and other != name)]
    others = [other for other in growths if other not in own]
    return [
        (parameter, side, growths[parameter].r_in if side == "r_in" else growths[parameter].r_out)
        for parameters in (own, others)
        for side in ("r_in", "r_out")
        for parameter in parameters
    ]


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
    with _own_random_numbers():
        try:
            with torch.device("meta"):
                return build(factory, width)
        except (NotImplementedError, RuntimeError):  # something in it needs values
            with torch.device("cpu"):
                return build(factory, width)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
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


def _sizes_to_dict(sizes: Sizes) -> Data:
    return {"shape": list(sizes.shape), "uses": {name: use and list(use) for name, use in sizes.uses.items()}}


def _sizes_from_dict(data: Mapping[str, Any]) -> Sizes:
    shape: Shape = tuple(data["shape"])
    return Sizes(shape, {name: use and Fans(*use) for name, use in data["uses"].items()})


def _law_to_dict(law: Law) -> Data:
    return {"exponent": str(law.exponent), "parameter": law.parameter, "side": law.side}


def _law_from_dict(data: Mapping[str, Any], parameters: Mapping[str, Any]) -> Law:
    law = Law(Fraction(data["exponent"]), data["parameter"], data["side"])
    if law.side not in ("r_in", "r_out") or (law.exponent != 0 and law.parameter not in parameters):
        raise ValueError(f"no such law: {dict(data)}")
    return law
