"""A network as the shapes of its layers, from a model on the meta device or from a table: plans need no more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import Host, Watch, hosts
from mukron.layers import BIAS, WEIGHT, MatrixLayer, layer_of
from mukron.optim.options import StepOptions, Trust
from mukron.optim.places import TakenLayer, other_uses, places_of
from mukron.optim.spec import MethodSpec
from mukron.params.excluded import Excluded, covers
from mukron.params.inventory import inventory, pattern_of


@dataclass(frozen=True)
class LayerShape:
    """A layer that is preconditioned, or several that are alike.

    Attributes:
        name: Its name; ``*`` stands for numbers that differ.
        d_out, d_in: The sides of its weight as a matrix.
        count: How many such layers there are.
        groups: How many such matrices a layer has.
        bias: Whether it has a bias that is preconditioned too.
        one_hot: Its inputs are indices.
        ties_head: Its weight is that of an embedding and of a head.
        positions: Of a sample, that share its weight; None: those of the batch, such as tokens.

    Example:
        >>> LayerShape("layers.*.mlp.up", 11008, 4096, count=32).numbers
        1442840576
    """

    name: str
    d_out: int
    d_in: int
    count: int = 1
    groups: int = 1
    bias: bool = False
    one_hot: bool = False
    ties_head: bool = False
    positions: int | None = None

    @property
    def numbers(self) -> int:
        """In the weights and biases of all of them."""
        return self.count * self.groups * self.d_out * (self.d_in + self.bias)


@dataclass(frozen=True)
class NetworkShapes:
    """The layers of a network.

    Attributes:
        title: What network it is.
        layers: Those that are preconditioned.
        others: Numbers in all other parameters, which take the fallback rule.
        first: Numbers in the module that runs first, whose input needs no derivative.

    Example:
        >>> llama = KNOWN_SHAPES["llama-7b"]
        >>> f"{llama.numbers:,}"
        '6,738,415,616'
    """

    title: str
    layers: tuple[LayerShape, ...]
    others: int = 0
    first: int = 0

    @property
    def numbers(self) -> int:
        """In all parameters."""
        return self.others + sum(layer.numbers for layer in self.layers)

    def without(self, names: Sequence[Excluded]) -> NetworkShapes:
        """With some layers left to the fallback rule.

        Args:
            names: Of layers, or of what they are in; or patterns of them.
        """
        known = [layer.name for layer in self.layers]
        for name in names:
            if not any(covers(name, layer) for layer in known):
                raise ValueError(f'exclude: no layer "{name}" is preconditioned; there are: {", ".join(known)}')
        left = [layer for layer in self.layers if any(covers(name, layer.name) for name in names)]
        kept = tuple(layer for layer in self.layers if layer not in left)
        return replace(self, layers=kept, others=self.others + sum(layer.numbers for layer in left))


def llama(name: str, d: int, layers: int, mlp: int, vocabulary: int = 32000, keys: int | None = None) -> NetworkShapes:
    """The layers of a LLaMA: no biases, an embedding and norms by the fallback rule, an untied head.

    Args:
        name: Its title.
        d: The size of a token's vector.
        layers: The number of blocks.
        mlp: The size of the hidden vectors of an MLP.
        vocabulary: The number of tokens.
        keys: The size of a token's keys and values; None: d.

    Example:
        >>> [layer.count for layer in llama("small", 64, layers=2, mlp=128).layers]
        [4, 4, 4, 2, 1]
    """
    keys = keys or d
    matrices = (
        LayerShape("layers.*.attention.{q,o}", d, d, 2 * layers),
        LayerShape("layers.*.attention.{k,v}", keys, d, 2 * layers),
        LayerShape("layers.*.mlp.{gate,up}", mlp, d, 2 * layers),
        LayerShape("layers.*.mlp.down", d, mlp, layers),
        LayerShape("head", vocabulary, d),
    )
    return NetworkShapes(name, matrices, others=vocabulary * d + (2 * layers + 1) * d, first=vocabulary * d)


KNOWN_SHAPES = {
    "llama-7b": llama("LLaMA 7B", 4096, layers=32, mlp=11008),
    "llama-13b": llama("LLaMA 13B", 5120, layers=40, mlp=13824),
    "llama-70b": llama("Llama 2 70B", 8192, layers=80, mlp=28672, keys=1024),
}


def known_shapes(name: str) -> NetworkShapes:
    """A network whose shapes are known by name.

    Args:
        name: A key of ``KNOWN_SHAPES``.

    Raises:
        ValueError: There is none of that name.

    Example:
        >>> known_shapes("llama-13b").title
        'LLaMA 13B'
    """
    if name not in KNOWN_SHAPES:
        raise ValueError(f"unknown shapes {name!r}; known: {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]


def shapes_of(
    model: nn.Module, spec: MethodSpec, options: Mapping[str, Any], sample: Sequence[int] | None = None
) -> NetworkShapes:
    """The layers of a model that a method preconditions.

    Args:
        model: The model; it may be on the meta device.
        spec: The method's record.
        options: The method's options, as its optimizer takes them, with defaults.
        sample: The shape of one sample, to find how many positions of it each layer sees; of tokens, if the model
            begins with an embedding. None: those of the batch.

    Raises:
        ValueError: The number of positions of a layer does not follow from those of the batch, and there is no sample.

    Example:
        >>> from mukron.optim import spec_of
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> shapes = shapes_of(model, spec_of("kfac"), spec_of("kfac").all_options({}))
        >>> [(layer.name, layer.d_out, layer.d_in, layer.bias) for layer in shapes.layers]
        [('0', 16, 8, True), ('2', 4, 16, True)]
    """
    named = {name: options.get(name) for name in ("exclude", "block", "split")}
    chosen, found = StepOptions.of(spec.method, Trust.of(options.get("trust")), **named), inventory(model)
    measures = bool(spec.captures)  # others see no positions
    places = places_of(model, set(found), chosen.named(model), spec.method, captures=measures)
    others = other_uses(model, places) if measures else {}
    positions: Mapping[str, int] = {}
    if sample is not None and measures:
        with counting_positions(model, places, others) as positions, torch.no_grad():
            tokens = getattr(layer_of(_first_module(model)), "one_hot", False)
            kind, device = torch.long if tokens else torch.get_default_dtype(), next(model.parameters()).device
            model(torch.zeros(1, *sample, dtype=kind, device=device))
    for name, (layer, _) in places.items():
        if sample is None and measures and layer.called and not (layer.plain_rows or layer.one_hot):
            raise ValueError(
                f'how many positions layer "{name}" sees depends on the shape of a sample: give it, as in '
                "sample=(3, 32, 32)"
            )
    shapes = [
        _shape(name, taken, any(not other.one_hot for other in others.get(name, {}).values()), positions.get(name))
        for name, taken in places.items()
    ]
    numbers = sum(entry.parameter.numel() for entry in found.values())
    rest = numbers - sum(shape.numbers for shape in shapes)
    first = sum(parameter.numel() for parameter in _first_module(model).parameters(recurse=False))
    return NetworkShapes(type(model).__name__, tuple(alike(shapes)), rest, first)


def takes_tokens(model: nn.Module) -> bool:
    """Whether a sample of the model's has several positions at which layers are applied: it embeds or attends.

    Args:
        model: The model; it may be on the meta device.

    Example:
        >>> takes_tokens(nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))), takes_tokens(nn.Linear(8, 8))
        (True, False)
    """
    return any(
        getattr(layer_of(module), "one_hot", False) or isinstance(module, nn.MultiheadAttention)
        for module in model.modules()
    )


def _first_module(model: nn.Module) -> nn.Module:
    """The first one that has parameters of its own."""
    return next((module for module in model.modules() if [*module.parameters(recurse=False)]), model)


def _shape(name: str, taken: TakenLayer, other_heads: bool, positions: int | None) -> LayerShape:
    layer, blocks = taken
    d_in = layer.d_in if WEIGHT in blocks else 0  # a bias alone: its weight is frozen
    sizes = (layer.d_out, d_in, 1, layer.groups, BIAS in blocks, layer.one_hot)
    return LayerShape(name, *sizes, ties_head=layer.one_hot and other_heads, positions=positions)


def alike(shapes: Sequence[LayerShape]) -> Iterator[LayerShape]:
    """Layers whose names differ in numbers alone, and of one shape, as one.

    Args:
        shapes: The layers.

    Example:
        >>> [shape.name for shape in alike([LayerShape("blocks.0.up", 8, 2), LayerShape("blocks.1.up", 8, 2)])]
        ['blocks.*.up']
    """
    groups: dict[LayerShape, list[LayerShape]] = {}
    for shape in shapes:
        groups.setdefault(replace(shape, name=pattern_of(shape.name)), []).append(shape)
    for pattern, group in groups.items():
        count = sum(shape.count for shape in group)
        yield group[0] if len(group) == 1 else replace(pattern, count=count)


@contextmanager
def counting_positions(
    model: nn.Module, places: Mapping[str, TakenLayer], others: Mapping[str, Mapping[str, MatrixLayer]]
) -> Iterator[Counter[str]]:
    """Counts how many positions of a sample share each layer's weight, in a forward pass inside.

    Those of a head that is tied to an embedding have its own name: they are no rows of the embedding's.

    Args:
        model: The model.
        places: Its layers.
        others: By layer, others that use its weight, by name.
    """
    positions, handles = Counter[str](), []

    def counter(name: str, known: MatrixLayer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            positions[name] += known.inputs(inputs[0]).shape[2]

        return count

    for name, (layer, _) in places.items():
        for use, known in {name: layer, **others.get(name, {})}.items():
            if known.called:
                counted = counter(use if layer.one_hot and not known.one_hot else name, known)
                handles.append(known.module.register_forward_pre_hook(counted))
    inside = _ProductPositions(positions)
    for host in hosts(model, {name: (name, layer) for name, (layer, _) in places.items()}):
        handles.append(host.module.register_forward_pre_hook(lambda *_, host=host: inside.begin(host)))
        handles.append(host.module.register_forward_hook(inside.end, always_call=True))
    try:
        yield positions
    finally:
        for handle in handles:
            handle.remove()


class _ProductPositions:
    """Counts positions of linear maps that modules apply by themselves, of stacked ones the most that one has."""

    def __init__(self, positions: Counter[str]) -> None:
        self.positions, self.watches = positions, list[Watch]()

    def begin(self, host: Host) -> None:
        self.watches.append(host.watch(self.count))
        self.watches[-1].begin()

    def end(self, *_: Any) -> None:
        self.watches.pop().end()

    def count(self, watch: Watch, x: Tensor, weight: Tensor, output: Tensor) -> None:
        name, rows = watch.name_of(weight), watch.samples_first(x)
        self.positions[name] = max(self.positions[name], rows.shape[1] if rows.ndim > 2 else 1)
