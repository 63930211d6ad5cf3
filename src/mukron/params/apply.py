"""Put a network into a parametrization: roles from its base shapes, initial values from the scheme."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from mukron.params.errors import ParametrizationError
from mukron.params.initial import Spread, correction, distance, is_constant
from mukron.params.inventory import Found, inventory, on_meta, unwrap
from mukron.params.parametrization import ZERO, ParameterPlan, Parametrization, mark, plan_of
from mukron.params.resolve import Growth, Sizes, check_names, resolve
from mukron.params.shapes import BaseShapes
from mukron.theory import MUP, SP, Role, Scheme, get_scheme


def parametrize(
    model: nn.Module,
    shapes: BaseShapes,
    scheme: Scheme | str = MUP,
    *,
    output_exponent: float | Fraction | str | None = None,
) -> Parametrization:
    """Rescale a freshly built model's initial weights for its width, in place, and return the plan.

    scheme: "mup"; "ntk", the lazy end, where features stand still as the width grows; "uniform:R" between; or "sp",
        which leaves every weight as drawn and scales nothing.
    output_exponent: b of the output weights instead of the scheme's, or "zero" to start them at zero. Learning rates
        and damping stay the scheme's.

    Call it before loading a checkpoint and before training: it takes the weights for initial ones. Calling it again
    changes nothing. A model on the meta device gets a plan only: parametrize it again once it has numbers.
    """
    if not isinstance(shapes, BaseShapes):
        raise ParametrizationError(f"expected the network's base shapes, mukron.base_shapes(...), got {shapes!r:.80}")
    scheme, exponent = get_scheme(scheme), _exact(output_exponent)
    if scheme == SP and exponent is not None:
        raise ParametrizationError(
            'scheme="sp" leaves the initial weights as drawn; for another output exponent use scheme="mup" or "ntk"'
        )
    found = inventory(model)
    if not found:
        raise ParametrizationError(f"{type(model).__name__} has no parameters")
    plan = _plan(found, _growths(found, shapes), shapes, scheme, exponent)
    if (applied := plan_of(model)) is not None:
        return _again(applied, plan).bind(model)
    _refuse_parametrized_parts(model)
    _warn_of_unequal_growth(plan)
    if not on_meta(found):
        _refuse_shared_memory(found)
        if scheme != SP:
            _rescale(found, plan, shapes)
        mark(model, plan)
    return plan.bind(model)


def _growths(found: Mapping[str, Found], shapes: BaseShapes) -> dict[str, Growth]:
    check_names(shapes.parameters, found, "in this network", "in the base shapes")
    here = {name: Sizes(entry.shape, entry.uses) for name, entry in found.items()}
    if all(entry.wider is None and entry.base.shape == here[name].shape for name, entry in shapes.parameters.items()):
        raise ParametrizationError(
            "the network has the base width itself, and the base shapes were made from one model, so nothing shows "
            "which dimensions grow; make them from a factory, built at two widths: base_shapes(factory, width=...)"
        )
    return {
        name: resolve(name, entry.base, entry.wider or here[name], here[name], entry.role, found[name].owner)
        for name, entry in shapes.parameters.items()
    }


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
        if scheme == SP:
            std = None if entry.parameter.is_meta else distance(entry.parameter, base.spread.center)
        else:
            std = 0.0 if b is None else base.spread.std * math.pow(growth.r_in, -b)
        tied = tuple(alias for alias in entry.uses if alias != name)
        fallback = not entry.preconditioned
        parameters[name] = ParameterPlan(growth, entry.shape, base.base.shape, base.spread.std, std, tied, fallback)
    return replace(plan, parameters=parameters)


@torch.no_grad()
def _rescale(found: Mapping[str, Found], plan: Parametrization, shapes: BaseShapes) -> None:
    """Take each parameter's drawn spread to the planned one, once all have been checked."""
    ratios = {ratio for entry in plan.parameters.values() for ratio in (entry.growth.r_in, entry.growth.r_out)}
    factors = {}
    for name, entry in plan.parameters.items():
        values, base, b = found[name].parameter, shapes.parameters[name].spread, plan.initial_exponent(entry.role)
        _check_initial(name, values, base)
        if b is None:
            factors[name] = 0.0
        elif base.std != 0 and base.numbers > 1:  # zeros and ones are left alone
            std = distance(values, base.center)
            factors[name] = correction(std, values.numel(), base, entry.growth.r_in, b, ratios)
    for name, factor in factors.items():
        center = shapes.parameters[name].spread.center if factor else 0.0
        if factor != 1:
            found[name].parameter.sub_(center).mul_(factor).add_(center)


def _check_initial(name: str, values: Tensor, base: Spread) -> None:
    """Values that the base's initializer cannot have drawn are not initial ones."""
    if not bool(values.isfinite().all()):
        raise ParametrizationError(f'parameter "{name}": its values are not all finite')
    if base.numbers == 1:
        return  # one number tells nothing
    constant = is_constant(values) and values.numel() > 1
    if constant != (base.std == 0) and (constant or not is_constant(values)):
        here, there = ("are all equal", "vary") if constant else ("vary", "are all equal")
        raise ParametrizationError(
            f'parameter "{name}": its values {here} here but {there} at the base width; these are not initial '
            "values of the same initializer. Call parametrize before load_state_dict and before training, and let the "
            "factory given to base_shapes do all of the initialization"
        )


def _refuse_parametrized_parts(model: nn.Module) -> None:
    for name, module in unwrap(model).named_modules():
        if plan_of(module) is not None:
            raise ParametrizationError(
                f'part "{name}" of this model is already parametrized on its own; build it anew, parametrize the whole'
            )


def _refuse_shared_memory(found: Mapping[str, Found]) -> None:
    """Two parameters over the same numbers would be rescaled twice. (Tied ones are one parameter.)"""
    names: dict[int, str] = {}
    for name, entry in found.items():
        if entry.parameter.numel() and (first := names.setdefault(entry.parameter.data_ptr(), name)) != name:
            raise ParametrizationError(
                f'parameters "{first}" and "{name}" share their memory without being one parameter; tie them properly'
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
        exact = Fraction(str(exponent))
    except (ValueError, ZeroDivisionError):
        exact = None
    if exact is None or exact < 0:
        raise ParametrizationError(f'output_exponent must be a number not below 0, or "zero", got {exponent!r}')
    return exact
