"""Put a network into a parametrization: roles from its base shapes, initial values from the scheme."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction

import torch
from torch import nn

from mukron.params.declared import declared_roles
from mukron.params.depth import Match, block_of, matches
from mukron.params.errors import ParametrizationError
from mukron.params.initial import (
    Spread,
    StdAtTwoWidths,
    correction,
    law_of_kind,
    laws_are_distinct,
    may_be_default,
)
from mukron.params.inventory import Found, inventory, on_meta, optimizer_without_plan, unwrap
from mukron.params.measured import InitialValues, initial_values, refuse_not_initial, refuse_unusable
from mukron.params.parameter_plan import ParameterPlan
from mukron.params.parametrization import ZERO, Parametrization, mark, plan_of
from mukron.params.resolve import Growth, Sizes, Unresolved, check_names, resolve_all
from mukron.params.scaled import Scaled, before_scaling, clearly_scaled
from mukron.params.shapes import BaseShapes
from mukron.readers import exact_number, shown
from mukron.theory import MUP, SP, Role, Scheme, get_scheme

UNIFORM_FAN_IN = ("Linear", "Conv1d", "Conv2d", "Conv3d")  # torch draws both weight and bias in +-fan_in^-1/2


def parametrize(
    model: nn.Module,
    shapes: BaseShapes,
    scheme: Scheme | str = MUP,
    *,
    output_exponent: float | Fraction | str | None = None,
    decay: float | Fraction | str = "constant",
    embedding_lr: float | Fraction | str = 0,
) -> Parametrization:
    """Rescale a freshly built model's initial weights for its width, in place, and return the plan.

    The model may have another number of residual blocks than the base shapes if these were made with ``depth=``.

    Call it before loading a checkpoint and before training, because it takes the weights for initial ones. Calling it
    again changes nothing. A model on the meta device gets a plan only: parametrize it again once it has values. All
    processes must parametrize a model that ``fully_shard`` has sharded; its weights become those of the whole model.

    Args:
        model: The network, as its constructor left it.
        shapes: The same network at the base width, from ``base_shapes``.
        scheme: "mup"; "ntk", the lazy limit, in which features do not move as the width grows; "uniform:R" for a scheme
            between them; or "sp", the standard parametrization, which leaves every weight as drawn and scales nothing.
        output_exponent: Exponent b of the output weights instead of the scheme's, or "zero" to start them at zero.
            Learning rates and damping remain the scheme's.
        decay: How the part of a weight that a step takes off, learning rate times weight decay, follows the width:
            "constant"; "1/width", in proportion to 1 / r_in, where r_in is the fan-in over that at the base width (1
            for embeddings and vectors); or an exponent k, r_in^-k.
        embedding_lr: An exponent k: embeddings' learning rates are multiplied by r_out^k beside the scheme's factor.

    Returns:
        The plan, bound to the model: for each parameter its role, growth and initial std, from which optimizers derive
        learning rates and damping.

    Raises:
        ParametrizationError: The network and the base shapes are not the same network at two widths, the weights are
            not initial values, or the model was parametrized in another way before.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import mukron
        >>> def network(width):
        ...     return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
        >>> model = network(256)
        >>> p = mukron.parametrize(model, mukron.base_shapes(network, width=64))
        >>> p.parameters["2.weight"].role.value
        'output'
        >>> optimizer = torch.optim.SGD(p.param_groups("sgd", lr=0.1))
    """
    if not isinstance(shapes, BaseShapes):
        advice = ""
        if isinstance(shapes, (str, os.PathLike)):
            advice = f"; to read them from a file: mukron.BaseShapes.load({os.fspath(shapes)!r})"
        raise ParametrizationError(
            f"expected the network's base shapes, mukron.base_shapes(...), got {shapes!r:.80}{advice}"
        )
    scheme, exponent = get_scheme(scheme), _exact(output_exponent)
    k_decay, k_embedding = decay_exponent(decay), exponent_of("embedding_lr", embedding_lr)
    if scheme == SP and exponent is not None:
        raise ParametrizationError(
            'scheme="sp" leaves the initial weights as drawn; for another output exponent use scheme="mup" or "ntk"'
        )
    found = inventory(model)
    if not found:
        raise ParametrizationError(f"{type(model).__name__} has no parameters")
    shapes, depths = _at_this_depth(shapes, found)
    plan = _plan(found, _growths(model, found, shapes, depths), shapes, scheme, exponent)
    plan = replace(plan, decay=k_decay, embedding_lr=k_embedding)
    if (applied := plan_of(model)) is not None:
        return _again(applied, plan).bind(model)
    _refuse_parametrized_parts(model)
    if scheme != SP and (optimizer := optimizer_without_plan(model)) is not None:
        warnings.warn(
            f"{optimizer} was created for this model before it was parametrized, and knows of no plan: create it "
            f"again, with the plan that this call returns, {optimizer}(model, plan, lr=...)",
            UserWarning,
            stacklevel=2,
        )
    _warn_of_unequal_growth(plan)
    scaled = None
    if not on_meta(found):
        values = initial_values(found, shapes)
        refuse_unusable(values)
        if scheme == SP:
            plan = _as_drawn(plan, values)
        else:
            scaled = _rescale(found, plan, shapes, values)
        mark(model, plan)
    return replace(plan.bind(model), _scaled=scaled)


def _at_this_depth(shapes: BaseShapes, found: Mapping[str, Found]) -> tuple[BaseShapes, dict[str, Fraction | None]]:
    """The base shapes by the names of this network, whose depth may be another, and L of each parameter in a block."""
    if not shapes.stacks:
        return shapes, {}
    base = {name: entry.base.shape for name, entry in shapes.parameters.items()}
    like = matches(base, {name: entry.shape for name, entry in found.items()}, shapes.stacks)
    places = {match.base: name for name, match in reversed(like.items())}
    parameters = {name: entry for name, entry in shapes.parameters.items() if block_of(name, shapes.stacks) is None}
    for name, match in like.items():
        entry = shapes.parameters[match.base]
        base_sizes, wider = _renamed(entry.base, match), entry.wider and _renamed(entry.wider, match)
        law = entry.law
        if law is not None and law.parameter is not None:  # of the same block, or of the first that is like its own
            own = match.here(law.parameter)
            source = own if own in like else places.get(law.parameter)
            law = None if source is None else replace(law, parameter=source)
        parameters[name] = replace(entry, base=base_sizes, wider=wider, law=law)
    return replace(shapes, parameters=parameters), {name: match.L for name, match in like.items()}


def _renamed(sizes: Sizes, match: Match) -> Sizes:
    return Sizes(sizes.shape, {match.here(use): fans for use, fans in sizes.uses.items()})


def _growths(
    model: nn.Module, found: Mapping[str, Found], shapes: BaseShapes, depths: Mapping[str, Fraction | None]
) -> dict[str, Growth]:
    declared = declared_roles(model, found)
    check_names(shapes.parameters, found, "in this network", "in the base shapes")
    here = {name: Sizes(entry.shape, entry.uses) for name, entry in found.items()}
    if all(entry.wider is None and entry.base.shape == here[name].shape for name, entry in shapes.parameters.items()):
        raise ParametrizationError(
            "the network has the base width itself, and the base shapes were made from one model, so nothing shows "
            "which dimensions grow; make them from a factory, built at two widths: base_shapes(factory, width=...)"
        )
    unresolved = {
        name: Unresolved(
            entry.base,
            entry.wider or here[name],
            here[name],
            entry.role or declared.roles.get(name),
            found[name].owner,
            found[name].bare,
            found[name].part_of,
        )
        for name, entry in shapes.parameters.items()
    }
    growths = resolve_all(unresolved, declared.wrong)
    return {name: replace(growth, L=depths.get(name)) for name, growth in growths.items()}


def _plan(
    found: Mapping[str, Found],
    growths: Mapping[str, Growth],
    shapes: BaseShapes,
    scheme: Scheme,
    exponent: Fraction | str | None,
) -> Parametrization:
    plan = Parametrization(scheme, {}, exponent, shapes.width)
    parameters = {}
    for name, entry in found.items():
        base, growth, b = shapes.parameters[name], growths[name], plan.initial_exponent(growths[name].role)
        planned = 0.0 if b is None else base.spread.std * math.pow(growth.r_in, -b)
        std = None if scheme == SP else planned  # None: as drawn
        tied = tuple(alias for alias in entry.uses if alias != name)
        bare = None in entry.uses.values() and len(entry.shape) == 2 and growth.role is Role.HIDDEN
        own = (not entry.preconditioned, entry.embedding, entry.matrix or bare, entry.ties_head)
        parameters[name] = ParameterPlan(growth, entry.shape, base.base.shape, base.spread.std, std, tied, *own)
    return replace(plan, parameters=parameters)


def _as_drawn(plan: Parametrization, values: Mapping[str, InitialValues]) -> Parametrization:
    """The plan of weights that stay as they are, with their measured std."""
    parameters = {name: replace(entry, std=values[name].std) for name, entry in plan.parameters.items()}
    return replace(plan, parameters=parameters)


@torch.no_grad()
def _rescale(
    found: Mapping[str, Found], plan: Parametrization, shapes: BaseShapes, values: Mapping[str, InitialValues]
) -> Scaled | None:
    """Take each parameter's drawn std to the planned one, once all have been checked. Returns what they were before."""
    ratios = {ratio for entry in plan.parameters.values() for ratio in (entry.growth.r_in, entry.growth.r_out)}
    for name in plan.parameters:
        refuse_not_initial(name, values[name], shapes.parameters[name].spread)
    spreads = {name: values[name].drawn(entry.spread) for name, entry in shapes.parameters.items()}
    laws = _laws(found, plan, shapes, spreads, values, ratios)
    factors = {}
    for name, entry in plan.parameters.items():
        here, base, b = values[name], spreads[name], plan.initial_exponent(entry.role)
        if b is None:
            factors[name] = 0.0
        elif base is not None and (base.numbers > 1 or name in laws):
            undo = _undo_depth(entry.growth, shapes.parameters[name].depth_exponent)
            std = undo * here.distance(base.center)
            own = correction(std, here.numbers, base, entry.growth.r_in, b, ratios, laws.get(name))
            factors[name] = undo * own
    clear = {
        name: values[name].rms
        for name, factor in factors.items()
        if clearly_scaled(values[name].numbers, factor) and not shapes.parameters[name].spread.center
    }
    before = before_scaling(found, clear)
    for name, factor in factors.items():
        base = spreads[name]
        center = base.center if base is not None and factor else 0.0
        if factor != 1:
            found[name].parameter.sub_(center).mul_(factor).add_(center)
    return before


def _undo_depth(growth: Growth, exponent: Fraction | None) -> float:
    """L^k, for an initializer with std ~ L^-k inside of a block: weights there start alike at every depth."""
    return 1.0 if growth.L is None or not exponent else math.pow(growth.L, exponent)


def _laws(
    found: Mapping[str, Found],
    plan: Parametrization,
    shapes: BaseShapes,
    spreads: Mapping[str, Spread | None],
    values: Mapping[str, InitialValues],
    ratios: set[Fraction],
) -> dict[str, tuple[Fraction, Fraction]]:
    """Growth R and exponent k of the initializer's law std ~ R^-k, for each parameter for which it is known.

    The base shapes know it if their factory could be drawn at two widths. Otherwise, tensors whose own std is too noisy
    follow the larger tensors of their kind: parameters of the same name in modules of the same type.
    """
    laws = {}
    kinds: dict[tuple[str, str], dict[str, StdAtTwoWidths]] = {}
    for name, entry in found.items():
        spread, law = spreads[name], shapes.parameters[name].law
        if spread is None or not entry.parameter.numel():
            continue
        if law is not None:
            growth = plan.parameters[law.parameter].growth if law.parameter is not None else None
            ratio = Fraction(1) if growth is None else growth.r_in if law.side == "r_in" else growth.r_out
            laws[name] = ratio, law.exponent
            continue
        evidence = _evidence(name, found, plan, shapes, spread, values[name])
        if evidence.std > 0:
            kinds.setdefault((entry.owner, name.rpartition(".")[2]), {})[name] = evidence
    for kind in kinds.values():
        for name, evidence in kind.items():
            if not laws_are_distinct(evidence.numbers, evidence.base, ratios):
                law_and_growth = law_of_kind(evidence, list(kind.values()))
                if law_and_growth is not None:
                    laws[name] = law_and_growth
    return laws


def _evidence(
    name: str,
    found: Mapping[str, Found],
    plan: Parametrization,
    shapes: BaseShapes,
    base: Spread,
    here: InitialValues,
) -> StdAtTwoWidths:
    """What one parameter shows of its initializer; a bias takes the fans of its layer's weight."""
    entry = found[name]
    module, _, local = name.rpartition(".")
    layer = [other for other in plan.parameters if other.rpartition(".")[0] == module]
    growths = [plan.parameters[other].growth for other in layer]
    weight = f"{module}.weight" if module else "weight"
    default = False
    if local in ("weight", "bias") and weight in layer and entry.owner in UNIFORM_FAN_IN:
        fans, base_fans = found[weight].uses[weight], shapes.parameters[weight].base.uses.get(weight)
        if fans is not None and base_fans is not None:
            std = here.distance(0.0)
            default = may_be_default(here.largest, std, here.numbers, base, fans.fan_in, base_fans.fan_in)
    return StdAtTwoWidths(
        base,
        std=here.distance(base.center),
        numbers=here.numbers,
        r_in=max(growth.r_in for growth in growths),
        r_out=max(growth.r_out for growth in growths),
        default=default,
    )


def _refuse_parametrized_parts(model: nn.Module) -> None:
    for name, module in unwrap(model).named_modules():
        if plan_of(module) is not None:
            raise ParametrizationError(
                f'part "{name}" of this model is already parametrized on its own; build it anew, parametrize the whole'
            )


def _warn_of_unequal_growth(plan: Parametrization) -> None:
    """The theory lets all layers grow alike (M_l = alpha_l M, Appendix A.1); beyond that its exponents do not hold."""
    ratios = {
        Fraction(here, base): name
        for name, entry in plan.parameters.items()
        if entry.role is not Role.SCALAR
        for here, base in zip(entry.shape, entry.base_shape, strict=True)
        if here != base
    }
    if ratios and max(ratios) > 2 * min(ratios):
        low, high = min(ratios), max(ratios)
        warnings.warn(
            f'layers grow by different ratios: "{ratios[low]}" by {float(low):.3g} and "{ratios[high]}" by '
            f"{float(high):.3g}. The theory lets all widths grow alike; beyond that its exponents do not hold",
            UserWarning,
            stacklevel=3,
        )


def _again(applied: Parametrization, wanted: Parametrization) -> Parametrization:
    try:
        wanted.check(applied)
    except ParametrizationError as error:
        raise ParametrizationError(
            f"this model is already parametrized, differently: {error}. Build the model anew to change that"
        ) from None
    return applied


def _exact(exponent: float | Fraction | str | None) -> Fraction | str | None:
    if exponent is None or exponent == ZERO:
        return exponent
    try:
        exact = exact_number(exponent)
    except ValueError:
        exact = None
    if exact is None or exact < 0:
        raise ParametrizationError(f'output_exponent must be a number not below 0, or "zero", got {shown(exponent)}')
    return exact


DECAYS = {"constant": Fraction(0), "1/width": Fraction(1)}  # laws of weight decay that have a name


def decay_exponent(decay: float | Fraction | str) -> Fraction:
    """The exponent k of a law of weight decay: r_in^-k."""
    named = DECAYS.get(decay) if isinstance(decay, str) else None
    return exponent_of("decay", decay, DECAYS) if named is None else named


def exponent_of(name: str, value: float | Fraction | str, named: Iterable[str] = ()) -> Fraction:
    """An exact exponent; ``name`` and what else is known, ``named``, are for the error."""
    try:
        return exact_number(value)
    except ValueError:
        expected = " or ".join([*(f'"{text}"' for text in named), 'an exponent, as a number or as exact text ("1/2")'])
        raise ParametrizationError(f"{name} must be {expected}; got {shown(value)}") from None
