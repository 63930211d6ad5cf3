"""Which parameters an optimizer trains, and which layers it preconditions: one record each, by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn import Parameter

from mukron.damping import Sides
from mukron.layers import BIAS, WEIGHT, BlockedLayer, MatrixLayer, ParameterMatrix, PartedLayer, cuts_of, layer_of
from mukron.optim.options import StepOptions
from mukron.params import Parametrization, Scales
from mukron.params.inventory import clean_name, inventory, unwrap
from mukron.params.resolve import Growth
from mukron.theory import SP, Method, Role

UNSCALED = Scales(lr=1.0, damping={})  # without a plan


def blocks_of(method: Method) -> tuple[str, ...]:
    """The blocks of a layer that a method preconditions."""
    return (WEIGHT,) if method.matrices_only else (WEIGHT, BIAS)


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter that the optimizer trains.

    Attributes:
        name: Its name in the model.
        parameter: The parameter itself.
        group: Its parameter group, as torch holds it.
        scale: The parametrization's multiplier of its learning rate.
        decay: That of learning rate times weight decay.
        eps: That of the eps of its method, if it has one.
        adams_eps: That of Adam's eps, where Adam is the fallback rule or is grafted.
        preconditioned: Whether it belongs to a layer that is preconditioned.
        natural: The Frobenius norm of a move whose singular values are all (d_out / d_in)^1/2, the usual size of a
            weight, before that multiplier; of a preconditioned matrix or bias.
    """

    name: str
    parameter: Parameter
    group: dict[str, Any]
    scale: float
    preconditioned: bool
    natural: float = math.inf
    decay: float = 1.0
    eps: float = 1.0
    adams_eps: float = 1.0


@dataclass(frozen=True)
class LayerEntry:
    """A layer with a weight, a bias or both to be trained.

    Attributes:
        name: Its name in the model.
        layer: Its layout.
        blocks: "weight", "bias" -> the parameter there.
        sides: By block, what a damping rule may know of it.
        anchor: The parameter whose optimizer state holds the layer's curvature.
    """

    name: str
    layer: MatrixLayer
    blocks: Mapping[str, ParameterEntry]
    sides: Mapping[str, Sides]
    anchor: Parameter

    def has_gradient_values(self) -> bool:
        """Whether a gradient of the layer has an entry that is not zero."""
        grads = [entry.parameter.grad for entry in self.blocks.values()]
        return any(grad is not None and (grad.is_sparse or bool(grad.any())) for grad in grads)


def build_tables(
    model: nn.Module,
    groups: Sequence[dict[str, Any]],
    options: StepOptions,
    plan: Parametrization | None,
    method: Method,
    rules: tuple[Method | str, str],
    captures: bool,
) -> tuple[dict[str, ParameterEntry], dict[str, LayerEntry]]:
    """The parameters of the groups and the layers to precondition, by their names in the model.

    rules: whose learning-rate multipliers preconditioned parameters take, and whose the others. captures: whether
    layers have to be called, so that their passes can be measured.
    """
    owned = _owned(model, groups)
    layers = dict(layers_of(model, owned, options, method, plan, captures))
    names = {name: names_of(name, layer, method) for name, layer in layers.items()}
    naturals = {full: _natural(layers[name], block) for name, of in names.items() for block, full in of.items()}
    taken = set(naturals)
    in_blocks = {
        full: method.in_blocks(*_more_blocks(layers[name], block, plan, full))
        for name, of in names.items()
        for block, full in of.items()
        if full in owned
    }
    laws = {law: plan.scales(law) for law in {*rules, method, "adamw"}} if plan is not None else {}
    entries = {}
    for name, (parameter, group) in owned.items():
        of_law = {law: scales[name] for law, scales in laws.items()}
        own = of_law.get(rules[0] if name in taken else rules[1], UNSCALED)
        if name in in_blocks and rules[0] == method:
            own = replace(own, lr=own.lr * in_blocks[name])
        natural = naturals.get(name, math.inf) / own.lr if own.lr > 0 else math.inf
        eps = [of_law.get(law, UNSCALED).eps for law in (method, "adamw")]
        eps[0] *= in_blocks.get(name, 1.0)
        entries[name] = ParameterEntry(name, parameter, group, own.lr, name in taken, natural, own.decay, *eps)
    _refuse_coupled_decay(groups, plan)
    damping = laws.get(method, {})
    table = {}
    for name, layer in layers.items():
        blocks = {block: entries[full] for block, full in names[name].items() if full in entries}
        if plan is not None and WEIGHT in blocks:
            _refuse_growing_groups(name, layer, plan.parameters[blocks[WEIGHT].name].growth, method)
        sides = {
            block: _sides(plan, entry.name, damping, _more_blocks(layer, block, plan, entry.name))
            for block, entry in blocks.items()
        }
        sides = {WEIGHT: next(iter(sides.values())), **sides}
        table[name] = LayerEntry(name, layer, blocks, sides, next(iter(blocks.values())).parameter)
    return entries, table


def _refuse_coupled_decay(groups: Sequence[dict[str, Any]], plan: Parametrization | None) -> None:
    if plan is not None and plan.decay and any(group["weight_decay"] and not group["decoupled"] for group in groups):
        raise ValueError(
            f"decoupled=False: decay that is preconditioned with the gradient has no law, but the plan has decay="
            f'{plan.decay}. Leave decoupled=True, or parametrize with decay="constant"'
        )


def _owned(model: nn.Module, groups: Sequence[dict[str, Any]]) -> dict[str, tuple[Parameter, dict[str, Any]]]:
    names = {id(found.parameter): name for name, found in inventory(model).items()}
    owned = {}
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is not one of the model's own; an optimizer trains "
                    "parameters of the model that it was given"
                )
            owned[names[id(parameter)]] = (parameter, group)
    return owned


def layers_of(
    model: nn.Module,
    owned: Collection[str],
    options: StepOptions,
    method: Method,
    plan: Parametrization | None = None,
    captures: bool = True,
) -> Iterator[tuple[str, MatrixLayer]]:
    """Layers with a layout that have an owned parameter and are not left to the fallback rule.

    A method that needs gradients alone also has matrices that no layer is called with, and tied ones, once.
    """
    found, exclude = inventory(model), options.exclude
    if method.gradients_alone and not captures:
        yield from _matrices_of(model, owned, options, method, plan)
        return
    outputs = _output_layers(model, plan) if method.matrices_only and exclude is None else ()
    _check_excluded(model, exclude)
    uses = {alias: list(entry.uses) for entry in found.values() for alias in entry.uses}
    first = {alias: name for name, entry in found.items() for alias in entry.uses}
    for module_name, module in unwrap(model).named_modules():
        name, layer = clean_name(module_name), layer_of(module)
        if not isinstance(layer, MatrixLayer) or (layer.one_hot if exclude is None else _excluded(name, exclude)):
            continue
        parameters = [full_name(name, block) for block in blocks_of(method)]
        if name in outputs:
            continue
        if options.leaves_tied and any(len(uses.get(full, ())) > 1 for full in parameters):
            continue
        held = [full for full in parameters if first.get(full) in owned]
        for full in held:
            if len(uses[full]) > 1:
                tied = ", ".join(f'"{use}"' for use in uses[full])
                raise ValueError(
                    f"tied parameter {tied}: the curvature of one use is not that of the other. Leave it to the "
                    f'fallback rule, exclude=("{name}", ...) with every layer that uses it'
                )
        if held:
            _refuse_empty(name, layer)
            yield name, layer


def _matrices_of(
    model: nn.Module, owned: Collection[str], options: StepOptions, method: Method, plan: Parametrization | None
) -> Iterator[tuple[str, MatrixLayer]]:
    found, exclude = inventory(model), options.exclude
    outputs = _output_layers(model, plan) if method.matrices_only and exclude is None else ()
    _check_excluded(model, exclude, found)
    _check_split(model, options.split, found)
    for module_name, module in unwrap(model).named_modules():
        name, layer = clean_name(module_name), layer_of(module)
        if name in outputs:
            continue
        if isinstance(layer, MatrixLayer):
            held = [full for full in names_of(name, layer, method).values() if full in owned]  # tied: at its first use
            if any(found[full].embedding and len(found[full].uses) > 1 for full in held):
                continue  # one step cannot be that of an embedding and that of a matrix
            if held and not (layer.one_hot if exclude is None else _excluded(name, exclude)):
                _refuse_empty(name, layer)
                yield name, _cut(layer, options, name)
            continue
        for local, parameter in module.named_parameters(recurse=False):
            full, shape = full_name(name, local), tuple(parameter.shape)
            bare = plan is not None and full in plan.parameters and plan.parameters[full].matrix
            parts = layer.stacked(local, shape) or int(bare)
            if full not in owned or not parts or not min(shape):
                continue
            if not (found[full].embedding if exclude is None else _excluded(full, exclude)):
                yield full, _cut(ParameterMatrix(module, shape, parts), options, full)


def _cut(layer: MatrixLayer, options: StepOptions, name: str) -> MatrixLayer:
    """A layer in the parts that it stacks, and in blocks."""
    parts = next((parts for key, parts in options.split.items() if _is_named(name, key)), 1)
    if layer.d_out % parts:
        raise ValueError(f'split: layer "{name}" has {layer.d_out} outputs, which are no {parts} equal parts')
    layer = PartedLayer(layer, parts) if parts > 1 else layer
    blocked = options.block is not None and max(layer.d_out, layer.d_in) > options.block and not layer.one_hot
    return BlockedLayer(layer, options.block or 1) if blocked else layer


def _is_named(name: str, key: str) -> bool:
    """A layer by its whole name, or by the end of it."""
    return name == key or name.endswith(f".{key}")


def names_of(name: str, layer: MatrixLayer, method: Method) -> dict[str, str]:
    """By block, the names of a layer's parameters; one that is a layer by itself has its own name."""
    uncut = layer.layer if isinstance(layer, BlockedLayer) else layer
    uncut = uncut.layer if isinstance(uncut, PartedLayer) else uncut
    if isinstance(uncut, ParameterMatrix):
        return {WEIGHT: name}
    return {block: full_name(name, block) for block in blocks_of(method)}


def _check_excluded(model: nn.Module, exclude: Collection[str] | None, parameters: Collection[str] = ()) -> None:
    modules = [clean_name(name) for name, _ in unwrap(model).named_modules()]
    for name in exclude or ():
        if name not in modules and name not in parameters:
            raise ValueError(f'exclude: the model has no module "{name}"; its modules: {", ".join(modules[1:])}')


def _check_split(model: nn.Module, split: Mapping[str, int], parameters: Collection[str]) -> None:
    modules = [clean_name(name) for name, _ in unwrap(model).named_modules()]
    for key in split:
        if not any(_is_named(name, key) for name in (*modules, *parameters)):
            raise ValueError(f'split: the model has no layer "{key}"; its modules: {", ".join(modules[1:])}')


def _refuse_empty(name: str, layer: MatrixLayer) -> None:
    if not min(layer.d_in, layer.d_out):
        raise ValueError(
            f'layer "{name}" is empty, {layer.d_out} x {layer.d_in}; remove it, or leave it to the fallback rule: '
            f'exclude=("{name}",)'
        )


def _output_layers(model: nn.Module, plan: Parametrization | None) -> Collection[str]:
    """Layers from a growing to a fixed side; without a plan the last layer of the model, in its own order."""
    if plan is not None:
        return {name.rpartition(".")[0] for name, parameter in plan.parameters.items() if parameter.role is Role.OUTPUT}
    known = [clean_name(name) for name, module in unwrap(model).named_modules() if _is_matrix(module)]
    return known[-1:]


def _is_matrix(module: nn.Module) -> bool:
    layer = layer_of(module)
    return isinstance(layer, MatrixLayer) and not layer.one_hot


def _natural(layer: MatrixLayer, block: str) -> float:
    """The Frobenius norm of matrices whose singular values are all (d_out / d_in)^1/2, or of ones in an embedding."""
    layer = layer.layer if isinstance(layer, BlockedLayer) else layer
    if block == BIAS:
        return math.sqrt(layer.groups * layer.d_out)
    if layer.one_hot:
        return math.sqrt(layer.d_out * layer.d_in)
    return math.sqrt(layer.groups * min(layer.d_out, layer.d_in) * layer.d_out / layer.d_in)


def full_name(layer: str, block: str) -> str:
    return f"{layer}.{block}" if layer else block


def _refuse_growing_groups(name: str, layer: MatrixLayer, growth: Growth, method: Method) -> None:
    """The law is about factors of a whole layer. A depthwise convolution's are of one channel each, and others grow."""
    out_side = any(statistic.delta for statistic, _ in method.factors)
    if layer.called and layer.groups > 1 and growth.r_in == 1 and growth.r_out > 1 and out_side:
        raise ValueError(
            f'layer "{name}" has {layer.groups} groups, and their number grows with the width; {method.title} takes '
            "each group by itself, for which muP has no exponents. Leave it to the fallback rule: "
            f'exclude=("{name}",)' + (", which then has to name output layers too" * method.matrices_only)
        )


def _more_blocks(layer: MatrixLayer, block: str, plan: Parametrization | None, name: str) -> tuple[float, float]:
    """How many times as many blocks the inputs and outputs of a layer have as at the base width."""
    if not isinstance(layer, BlockedLayer) or plan is None or plan.scheme == SP:
        return 1.0, 1.0
    growth, whole = plan.parameters[name].growth, layer.layer
    b_out = layer.cuts[0] / cuts_of(whole.d_out / float(growth.r_out), layer.size)
    b_in = layer.cuts[1] / cuts_of(whole.d_in / float(growth.r_in), layer.size)
    return (b_in if block == WEIGHT else 1.0), b_out


def _sides(
    plan: Parametrization | None, name: str, scales: Mapping[str, Any], more_blocks: tuple[float, float]
) -> Sides:
    if plan is None:
        return Sides({}, {})
    growth, (b_in, b_out) = plan.parameters[name].growth, more_blocks
    r_in, r_out = float(growth.r_in) / b_in, float(growth.r_out) / b_out
    damping = {factor: scale / (b_in * b_out) for factor, scale in scales[name].damping.items()}
    return Sides({"A": r_in, "R": r_in, "B": r_out, "L": r_out}, damping)


def growth_of(layer: LayerEntry, plan: Parametrization | None) -> tuple[float, float]:
    """How much a layer's input and output have grown since the base width; under SP nothing follows from that: 1, 1."""
    if plan is None or plan.scheme == SP:
        return 1.0, 1.0
    growth = layer.sides[WEIGHT].growth
    return growth["A"], growth["B"]


def warn_of_one_sided(
    method: str, layers: Iterable[LayerEntry], plan: Parametrization | None, max_size: int, remedy: str
) -> None:
    """Name layers with a side that is too long for a factor here and not at the base width: their law changes."""
    named = []
    for layer in layers:
        sizes = zip((layer.layer.d_in, layer.layer.d_out), growth_of(layer, plan), strict=True)
        if not layer.layer.one_hot and any(d > max_size >= d / r for d, r in sizes):
            named.append(f'"{layer.name}" [{layer.layer.d_out}, {layer.layer.d_in}]')
    if named:
        warnings.warn(
            f"{method}: {', '.join(named[:3])}{' and more' * (len(named) > 3)}: a side is longer than "
            f"max_size={max_size} and has no factor of its own here, but has one at the base width. Learning rates do "
            f"not carry over: {remedy}",
            UserWarning,
            stacklevel=4,
        )


def _excluded(name: str, exclude: Collection[str]) -> bool:
    """A layer by its own name, or by that of a module it is in."""
    return any(name == entry or name.startswith(f"{entry}.") for entry in exclude)
