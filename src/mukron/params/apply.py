"""Put a network into a parametrization: roles from its base shapes, initial values from the scheme."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import nn

from mukron.params.errors import ParametrizationError
from mukron.params.initial import Spread, correction, std_of
from mukron.params.inventory import Found, inventory, on_meta, unwrap
from mukron.params.parametrization import ZERO, ParameterPlan, Parametrization
from mukron.params.resolve import Growth, Sizes, check_names, resolve
from mukron.params.shapes import BaseShapes
from mukron.theory import MUP, SP, Scheme, get_scheme

# The plan that was applied, as plain data on the model itself, for one purpose: a second call must change nothing.
MARK = "_mukron_parametrization"


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
    scheme, exponent = get_scheme(scheme), _exact(output_exponent)
    if scheme == SP and exponent is not None:
        raise ParametrizationError(
            'scheme="sp" leaves the initial weights as drawn; for another output exponent use scheme="mup" or "ntk"'
        )
    found = inventory(model)
    growths = _growths(found, shapes)
    drawn = {name: None if entry.parameter.is_meta else std_of(entry.parameter) for name, entry in found.items()}
    plan = _plan(found, growths, drawn, shapes, scheme, exponent)

    if (applied := unwrap(model).__dict__.get(MARK)) is not None:
        return _again(Parametrization.from_dict(applied), plan).bind(model)
    if not on_meta(found):
        if scheme != SP:
            _rescale(found, plan, drawn, shapes)
        unwrap(model).__dict__[MARK] = plan.to_dict()
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
    drawn: Mapping[str, float | None],
    shapes: BaseShapes,
    scheme: Scheme,
    exponent: Fraction | str | None,
) -> Parametrization:
    plan = Parametrization(scheme, {}, exponent, shapes.width)
    parameters = {}
    for name, entry in found.items():
        base, std = shapes.parameters[name], drawn[name]
        b = plan.initial_exponent(growths[name].role)
        if scheme != SP or std is None:
            std = 0.0 if b is None else base.spread.std * float(growths[name].r_in) ** -float(b)
        tied = tuple(alias for alias in entry.uses if alias != name)
        parameters[name] = ParameterPlan(growths[name], entry.shape, base.base.shape, base.spread.std, std, tied)
    return Parametrization(scheme, parameters, exponent, shapes.width)


@torch.no_grad()
def _rescale(
    found: Mapping[str, Found], plan: Parametrization, drawn: Mapping[str, float | None], shapes: BaseShapes
) -> None:
    """Multiply each parameter by what takes its drawn spread to the planned one, once all have been checked."""
    ratios = {ratio for entry in plan.parameters.values() for ratio in (entry.growth.r_in, entry.growth.r_out)}
    factors = {}
    for name, entry in plan.parameters.items():
        b, base, std = plan.initial_exponent(entry.role), shapes.parameters[name].spread, drawn[name]
        assert std is not None
        if (std == 0) != (base.std == 0):
            what, other = ("all equal", "vary") if std == 0 else ("vary", "are all equal")
            raise ParametrizationError(
                f'parameter "{name}": its values {what} here but {other} at the base width; these are not initial '
                "values of the same initializer. Call parametrize before load_state_dict and before training, and let "
                "the factory given to base_shapes do all of the initialization"
            )
        if b is None:
            factors[name] = 0.0
        elif std != 0:  # zeros and ones are left alone
            values = Spread(std, found[name].parameter.numel())
            factors[name] = correction(values, base, entry.growth.r_in, b, ratios)
    for name, factor in factors.items():
        if factor != 1:
            found[name].parameter.mul_(factor)


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
