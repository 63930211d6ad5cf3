"""Which parameters an optimizer trains, and which layers it preconditions: one record each, by name."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from torch import nn
from torch.nn import Parameter

from mukron.damping import Sides
from mukron.layers import BIAS, WEIGHT, BlockedLayer, MatrixLayer, PartedLayer, cuts_of
from mukron.optim.options import StepOptions
from mukron.optim.places import other_uses, places_of
from mukron.params import Parametrization, Scales
from mukron.params.inventory import inventory
from mukron.readers import shown
from mukron.theory import SP, Method, Role

UNSCALED = Scales(lr=1.0, damping={})  # without a plan
PROPOSED = 4  # how many names an error proposes


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter that the optimizer trains.

    Attributes:
        name: Its name in the model.
        parameter: The parameter itself.
        group: Its parameter group, as torch holds it.
        scale: The parametrization's multiplier of its learning rate.
        chosen: The part of that which was chosen for embeddings; bounds of a step leave it out.
        decay: That of learning rate times weight decay.
        eps: That of the eps of its method, if it has one.
        adams_eps: That of Adam's eps, where Adam is the fallback rule or is grafted.
        preconditioned: Whether it belongs to a layer that is preconditioned.
        layer: The name of that layer.
        natural: The Frobenius norm of a move whose singular values are all (d_out / d_in)^1/2, the usual size of a
            weight, before that multiplier; of a preconditioned matrix or bias.
    """

    name: str
    parameter: Parameter
    group: dict[str, Any]
    scale: float
    preconditioned: bool
    natural: float = math.inf
    layer: str = ""
    chosen: float = 1.0
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
        others: Other layers that use the same weight, by name: its curvature is that of all uses.
    """

    name: str
    layer: MatrixLayer
    blocks: Mapping[str, ParameterEntry]
    sides: Mapping[str, Sides]
    anchor: Parameter
    others: Mapping[str, MatrixLayer] = field(default_factory=dict)


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
    places = places_of(model, owned, options, method, plan, captures)
    layers = {name: layer for name, (layer, _) in places.items()}
    names = {name: of_blocks for name, (_, of_blocks) in places.items()}
    naturals = {full: _natural(layers[name], block) for name, of in names.items() for block, full in of.items()}
    layer_names = {full: name for name, of in names.items() for full in of.values()}
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
        natural = naturals.get(name, math.inf) * own.chosen / own.lr if own.lr > 0 else math.inf
        eps = [of_law.get(law, UNSCALED).eps for law in (method, "adamw")]
        eps[0] *= in_blocks.get(name, 1.0)
        settings = {"chosen": own.chosen, "decay": own.decay, "eps": eps[0], "adams_eps": eps[1]}
        of_layer = layer_names.get(name, "")
        entries[name] = ParameterEntry(name, parameter, group, own.lr, name in taken, natural, of_layer, **settings)
    _refuse_coupled_decay(groups, plan)
    damping = laws.get(method, {})
    others = other_uses(model, places) if captures else {}
    table = {}
    for name, layer in layers.items():
        blocks = {block: entries[full] for block, full in names[name].items() if full in entries}
        sides = {
            block: _sides(plan, entry.name, damping, _more_blocks(layer, block, plan, entry.name))
            for block, entry in blocks.items()
        }
        sides = {WEIGHT: next(iter(sides.values())), **sides}
        anchor = next(iter(blocks.values())).parameter
        table[name] = LayerEntry(name, layer, blocks, sides, anchor, others.get(name, {}))
    _refuse_growing_groups(table, plan, method, options)
    _refuse_uneven_parts(table, plan)
    return entries, table


def entry_of(entries: Mapping[str, ParameterEntry], name: str) -> ParameterEntry:
    """The record of a parameter by its name; an error names those that may be meant.

    These are the parameters of a layer or a container of that name, else those with a similar name.
    """
    if name in entries:
        return entries[name]
    meant = [known for known in entries if known.startswith(f"{name}.")]
    meant = meant or difflib.get_close_matches(str(name), entries, n=PROPOSED)
    proposed = meant or list(entries)
    more = f" or {len(proposed) - PROPOSED} more" if len(proposed) > PROPOSED else ""
    names = ", ".join(map(repr, proposed[:PROPOSED])) + more
    hint = f"; did you mean {names}?" if meant else f"; expected the name of a parameter, such as {names}"
    raise ValueError(f"the optimizer trains no parameter named {shown(name)}{hint}")


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


def _uncut(layer: MatrixLayer) -> MatrixLayer:
    return layer.layer if isinstance(layer, BlockedLayer) else layer


def _natural(layer: MatrixLayer, block: str) -> float:
    """The Frobenius norm of matrices whose singular values are all (d_out / d_in)^1/2, or of ones in an embedding."""
    layer = _uncut(layer)
    if block == BIAS:
        return math.sqrt(layer.groups * layer.d_out)
    if layer.one_hot:
        return math.sqrt(layer.d_out * layer.d_in)
    return math.sqrt(layer.groups * min(layer.d_out, layer.d_in) * layer.d_out / layer.d_in)


def _refuse_growing_groups(
    layers: Mapping[str, LayerEntry], plan: Parametrization | None, method: Method, options: StepOptions
) -> None:
    """The law is about factors of a whole layer. Those of groups whose number grows with the width are of parts."""
    growing = [name for name, layer in layers.items() if _has_growing_groups(layer, plan, method)]
    if plan is None or not growing:
        return
    left = dict.fromkeys(options.exclude or ())
    if options.exclude is None:  # what is left by default
        for name, parameter in plan.parameters.items():
            if parameter.embedding or (method.matrices_only and parameter.role is Role.OUTPUT):
                left |= dict.fromkeys(use.rpartition(".")[0] or use for use in (name, *parameter.tied))
    listed = ", ".join(f'"{name}"' for name in (*left, *growing)) + "," * (len(left) + len(growing) == 1)
    groups = ", ".join(f'"{name}" has {_uncut(layers[name].layer).groups} groups' for name in growing)
    raise ValueError(
        f"layer {groups}, and their number grows with the width; {method.title} takes each group by itself, for which "
        f"muP has no exponents. Leave it to the fallback rule: exclude=({listed})"
    )


def _has_growing_groups(entry: LayerEntry, plan: Parametrization | None, method: Method) -> bool:
    layer = _uncut(entry.layer)
    if plan is None or WEIGHT not in entry.blocks or not layer.called or layer.groups == 1:
        return False
    growth, out_side = plan.parameters[entry.blocks[WEIGHT].name].growth, any(f.delta for f, _ in method.factors)
    return growth.r_in == 1 and growth.r_out > 1 and out_side


def _refuse_uneven_parts(layers: Mapping[str, LayerEntry], plan: Parametrization | None) -> None:
    """Parts that the layer of the base width does not have follow no law."""
    for name, entry in layers.items():
        layer = _uncut(entry.layer)
        if plan is None or plan.scheme == SP or not isinstance(layer, PartedLayer):
            continue
        r_out = plan.parameters[next(iter(entry.blocks.values())).name].growth.r_out
        number, rows, outputs = layer.groups // layer.layer.groups, layer.d_out, layer.layer.d_out / r_out
        if outputs % (rows if layer.multiply else number):
            cut = f"no parts of {rows} rows" if layer.multiply else f"no {number} equal parts"
            hint = f'. If their number grows with the width, say how many rows each has: "rows:{rows}"'
            fits = not layer.multiply and not outputs % rows
            raise ValueError(
                f'split: layer "{name}" has {outputs} outputs at the base width, which are {cut}{hint if fits else ""}'
            )


def _more_blocks(layer: MatrixLayer, block: str, plan: Parametrization | None, name: str) -> tuple[float, float]:
    """How many times as many blocks the inputs and outputs of a layer have as at the base width.

    Parts of a fixed size are blocks of the outputs; those of a fixed number grow with the layer.
    """
    if plan is None or plan.scheme == SP:
        return 1.0, 1.0
    growth, whole = plan.parameters[name].growth, _uncut(layer)
    more_parts = growth.r_out if isinstance(whole, PartedLayer) and whole.multiply else Fraction(1)
    if not isinstance(layer, BlockedLayer):
        return 1.0, float(more_parts)
    b_out = layer.cuts[0] / cuts_of(whole.d_out / (growth.r_out / more_parts), layer.size)
    b_in = layer.cuts[1] / cuts_of(whole.d_in / growth.r_in, layer.size)
    return (b_in if block == WEIGHT else 1.0), b_out * float(more_parts)


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
    method: str, layers: Iterable[LayerEntry], plan: Parametrization | None, longest: tuple[float, float], remedy: str
) -> None:
    """Name layers that grow and have a side that is too long for a factor: their law is another one.

    longest: the longest input side and the longest output side that has a factor; infinite: none is to have one.
    """
    named = []
    for layer in layers:
        growth = growth_of(layer, plan)
        sizes = zip((layer.layer.d_in, layer.layer.d_out), longest, strict=True)
        if not layer.layer.one_hot and any(r != 1 for r in growth) and any(d > most for d, most in sizes):
            named.append(f'"{layer.name}" [{layer.layer.d_out}, {layer.layer.d_in}]')
    if named:
        warnings.warn(
            f"{method}: {', '.join(named[:3])}{' and more' * (len(named) > 3)}: a side is longer than "
            f"max_size={min(longest):g} and keeps its own coordinates. The law of a side without a factor is another "
            f"one, so learning rates do not carry over from the base width: {remedy}",
            UserWarning,
            stacklevel=4,
        )
