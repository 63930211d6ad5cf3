"""Base shapes: which dimensions of a network grow with its width, and sizes and initial values at the base width."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import nn

from mukron.layers import Shape
from mukron.params.building import (
    Factory,
    at_depth,
    build_without_memory,
    draw,
    draw_from,
    own_random_streams,
    plain_width,
)
from mukron.params.declared import declared_roles
from mukron.params.depth import BlockStack, find_stacks, matches
from mukron.params.errors import ParametrizationError
from mukron.params.initial import LAWS, PROBE_TOLERANCE, Law, Spread, law_of_change, measure, scale_change
from mukron.params.inventory import Found, inventory, on_meta
from mukron.params.parameter_plan import check_sizes
from mukron.params.resolve import Growth, Sizes, Unresolved, check_names, resolve_all
from mukron.params.sharded import whole
from mukron.params.shown import ShownShapes
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.theory import Role
from mukron.typed import fields_of, read_as

KIND, VERSION = "base_shapes", 3  # 2: with the laws of the initializers; 3: with the blocks that depth adds
PROBE_DRAWS, NUMBERS_TO_PROBE = 3, 8_000_000  # draws at two widths from the same random numbers


@dataclass(frozen=True)
class BaseParameter:
    """One parameter at the base width.

    Attributes:
        base: Its sizes and fans at the base width.
        wider: The same at another width; None: not known, and the network itself is compared instead.
        role: The role that the user declared; None: it follows from the modules that own the parameter.
        spread: Standard deviation, number, centre and kurtosis of its initial values.
        law: How its initializer depends on the width; None: not known.
        depth_exponent: The exponent k of its initializer's dependence on the depth, std ~ L^-k, inside of a residual
            block; None: not known.

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
    depth_exponent: Fraction | None = None


@dataclass(frozen=True, repr=False)
class BaseShapes(ShownShapes):
    """A network at its base width, by parameter name: shapes, what grows, and the spread of the initial values.

    Made by ``base_shapes``. It is plain data, which saves to and loads from JSON.

    Attributes:
        parameters: The parameters at the base width, by name.
        width: The width that the factory was called with; for display only.
        depth: The depth that the factory was called with; None: it was not asked for, and other depths are refused.
        stacks: The containers of residual blocks, which have more entries the deeper the network is.

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
    depth: int | None = None
    stacks: tuple[BlockStack, ...] = ()

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
                "depth_exponent": None if entry.depth_exponent is None else str(entry.depth_exponent),
            }
            for name, entry in self.parameters.items()
        }
        stacks = [asdict(stack) for stack in self.stacks]
        content = {"width": self.width, "depth": self.depth, "stacks": stacks}
        return stamp(KIND, VERSION, {**content, "parameters": parameters})

    @classmethod
    def from_dict(cls, data: object, source: str = "base shapes") -> BaseShapes:
        """Read the data of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.
            source: Names the data in errors.
        """
        content = check_stamp(data, KIND, VERSION, source)
        with damaged(source):
            entries = fields_of(content["parameters"], "parameters")
            parameters = {name: _parameter_from_dict(entry, f'parameter "{name}"') for name, entry in entries.items()}
            for name, entry in parameters.items():
                _check_law(entry.law, parameters, f'parameter "{name}"')
            stacks = read_as(tuple[BlockStack, ...], content["stacks"], "stacks")
            width = read_as(float | None, content["width"], "width")
            return cls(parameters, width, read_as(int | None, content["depth"], "depth"), stacks)


def base_shapes(
    source: Factory | nn.Module,
    width: float | None = None,
    *,
    depth: int | None = None,
    roles: Mapping[str, Role | str] | None = None,
) -> BaseShapes:
    """Record a network at its base width, the one that its settings are tuned at, and what grows with the width.

    A factory is built at ``width`` for its shapes and the spread of its initial values, several times if it is small,
    and at twice the width on the meta device, without memory, to see which dimensions grow. A small network is also
    built for real at both widths, from the same random numbers, which shows how each initializer depends on the width.
    The user's random streams are left as they were.

    With ``depth`` the factory is also built at twice that depth. Numbered containers that then have more entries hold
    residual blocks, and networks of any number of blocks can be parametrized. In your forward pass, multiply what each
    residual branch adds by base depth / depth; ``mukron.diagnose.check_branches`` measures whether it is.

    Args:
        source: A function or class that builds the network for a given width, which is its parameter ``width`` or its
            only parameter. Or the network at the base width itself: what grows is then determined when a wider network
            is parametrized, and initializers are known from the values of the two networks alone.
        width: The base width; required with a factory, and refused with a network, which has its own.
        depth: The base depth, which the factory takes as ``depth``. None: all networks have one depth.
        roles: Roles of the parameters that no known module owns or whose owners disagree, by name, such as
            ``{"position": "input"}``. Roles are input, hidden, output, vector and scalar. A module may declare them
            itself, ``self.mukron_roles = {"position": "input"}``; those given here win.

    Returns:
        The base shapes, for ``parametrize``.

    Raises:
        ParametrizationError: The source is neither a factory nor a network with values, the width is missing or not
            positive, no shape depends on the width, the role of a parameter cannot be determined, or depth changes
            something other than the number of blocks in a container.

    Example:
        >>> from torch import nn
        >>> import mukron
        >>> def network(width):
        ...     return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
        >>> shapes = mukron.base_shapes(network, width=64)
        >>> p = mukron.parametrize(network(256), shapes)
        >>> p.parameters["2.weight"].growth.r_in
        Fraction(4, 1)
        >>> from mukron.models import GPT
        >>> def gpt(width, depth):
        ...     return GPT(width, depth, base_depth=2)  # multiplies branches by 2 / depth
        >>> p = mukron.parametrize(gpt(32, depth=8), mukron.base_shapes(gpt, width=32, depth=2))
        >>> p.scales("sgd")["blocks.7.mlp.up.weight"].lr
        4.0
    """
    if isinstance(source, nn.Module):
        if width is not None:
            raise ParametrizationError(
                f"width={width!r}: this {type(source).__name__} is built already, with a width of its own. Pass a "
                f"function of the width, base_shapes(lambda width: ..., width={width!r}); or the network at the base "
                "width alone, base_shapes(network)"
            )
        if depth is not None:
            raise ParametrizationError(
                "one network does not show what depth adds; give a factory, base_shapes(factory, width=..., depth=...)"
            )
        found = inventory(source)
        if on_meta(found):
            raise ParametrizationError(
                "the base model is on the meta device: its initial values show nothing; use a factory"
            )
        declared = declared_roles(source, found, roles).checked()
        parameters = {
            name: BaseParameter(_sizes(entry), None, declared.get(name), measure([whole(entry.parameter)]))
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
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ParametrizationError(f"the base depth must be a whole number of at least 1, got {depth!r}")
    width, factory = plain_width(width), source if depth is None else at_depth(source, depth)
    model, found, spreads = draw(factory, width)
    declarations = declared_roles(model, found, roles)
    declared = declarations.roles
    wider = inventory(build_without_memory(factory, 2 * width))
    check_names(found, wider, f"at width {2 * width}", f"at width {width}")
    if all(entry.shape == wider[name].shape for name, entry in found.items()):
        raise ParametrizationError(
            f"no parameter's shape differs between widths {width} and {2 * width}; does the factory use its width?"
        )
    unresolved = {}
    for name, entry in found.items():
        sizes, at_twice = _sizes(entry), _sizes(wider[name])
        role = declared.get(name)
        unresolved[name] = Unresolved(sizes, at_twice, at_twice, role, entry.owner, entry.bare, entry.part_of)
    growths = resolve_all(unresolved, declarations.wrong)  # reports now what would be wrong at every width
    laws = _laws(factory, width, found, wider, spreads, growths)
    stacks: tuple[BlockStack, ...] = ()
    depth_exponents: dict[str, Fraction] = {}
    if depth is not None:
        deep_factory = at_depth(source, 2 * depth)
        deeper = inventory(build_without_memory(deep_factory, width))
        stacks = find_stacks(found, deeper, depth, 2 * depth)
        depth_exponents = _depth_exponents(factory, deep_factory, width, found, deeper, stacks)
    parameters = {
        name: BaseParameter(
            *(_sizes(entry), _sizes(wider[name]), declared.get(name), spreads[name], laws.get(name)),
            depth_exponents.get(name),
        )
        for name, entry in found.items()
    }
    return BaseShapes(parameters, width, depth, stacks)


def _sizes(found: Found) -> Sizes:
    return Sizes(found.shape, found.uses)


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
    with own_random_streams(), torch.device("cpu"):
        for size, networks in draws.items():
            networks.extend(draw_from(seed, factory, size) for seed in range(PROBE_DRAWS))
    laws, sources = {}, _Sources(growths)
    for name in varied:
        change = scale_change(*([network[name].parameter for network in networks] for networks in draws.values()))
        law = None if change is None else law_of_change(change, sources.of(name))
        if law is not None:
            laws[name] = law
    return laws


def _depth_exponents(
    factory: Factory,
    deep_factory: Factory,
    width: float,
    base: Mapping[str, Found],
    deeper: Mapping[str, Found],
    stacks: tuple[BlockStack, ...],
) -> dict[str, Fraction]:
    """The exponent k of std ~ L^-k of each initializer inside of blocks, where draws at two depths show it."""
    numbers = sum(entry.parameter.numel() for network in (base, deeper) for entry in network.values())
    if PROBE_DRAWS * numbers > NUMBERS_TO_PROBE:
        return {}
    growth = {name: match.L for name, match in matches(_shapes(base), _shapes(deeper), stacks).items() if name in base}
    with own_random_streams(), torch.device("cpu"):
        draws = [[draw_from(seed, make, width) for seed in range(PROBE_DRAWS)] for make in (factory, deep_factory)]
    exponents = {}
    for name, L in growth.items():
        change = scale_change(*([network[name].parameter for network in networks] for networks in draws))
        if L is not None and change is not None:
            for exponent in LAWS:
                if abs(change + float(exponent) * math.log(L)) <= PROBE_TOLERANCE:
                    exponents[name] = exponent
    return exponents


def _shapes(found: Mapping[str, Found]) -> dict[str, Shape]:
    return {name: entry.shape for name, entry in found.items()}


class _Sources:
    """What an initializer may follow: first the fan-in of its own layer, then its fan-out, then any other layer's.

    Of all layers, the first with a growth stands for the others that grow alike: a network has thousands of layers, and
    few growths.
    """

    def __init__(self, growths: Mapping[str, Growth]) -> None:
        self._growths = growths
        self._layers: dict[str, list[str]] = {}
        for name in growths:
            self._layers.setdefault(name.rpartition(".")[0], []).append(name)
        distinct: dict[tuple[str, Fraction], tuple[str, str, Fraction]] = {}
        for source in self._each(growths):
            distinct.setdefault(source[1:], source)
        self._distinct = list(distinct.values())

    def _each(self, names: Iterable[str]) -> Iterator[tuple[str, str, Fraction]]:
        names = list(names)
        yield from ((name, "r_in", self._growths[name].r_in) for name in names)
        yield from ((name, "r_out", self._growths[name].r_out) for name in names)

    def of(self, name: str) -> list[tuple[str, str, Fraction]]:
        layer = self._layers[name.rpartition(".")[0]]
        return [*self._each([name, *(other for other in layer if other != name)]), *self._distinct]


def _sizes_to_dict(sizes: Sizes) -> Data:
    return {"shape": list(sizes.shape), "uses": {name: use and list(use) for name, use in sizes.uses.items()}}


def _parameter_from_dict(entry: Any, place: str) -> BaseParameter:
    content = dict(fields_of(entry, place, "std", "numbers", "center", "kurtosis"))
    spread = {name: content.pop(name) for name in ("std", "numbers", "center", "kurtosis")}
    parameter: BaseParameter = read_as(BaseParameter, {**content, "spread": spread}, place)
    for sizes in filter(None, (parameter.base, parameter.wider)):
        check_sizes(sizes.shape, place)
        if not sizes.uses:
            raise ValueError(f"{place}: there are no uses")
    return parameter


def _law_to_dict(law: Law) -> Data:
    return {"exponent": str(law.exponent), "parameter": law.parameter, "side": law.side}


def _check_law(law: Law | None, parameters: Mapping[str, Any], place: str) -> None:
    if law is None:
        return
    if law.side not in ("r_in", "r_out") or (law.exponent != 0 and law.parameter not in parameters):
        raise ValueError(f"{place}: there is no such law as {_law_to_dict(law)}")
