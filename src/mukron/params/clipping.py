"""Clipping by the norm of all gradients, where that norm means the same at every width and depth.

    |g|_plan = (sum_p (|G_p| / u_p)^2)^1/2      u_p = e_p (n_p / n_p at the base)^1/2
    G        <- G min(1, max_norm / |g|_plan)    for all parameters: the direction of the whole gradient is kept

e_p is the growth of an entry of the gradient since the base width (``theory.gradients``), n_p the number of entries of
all blocks' parameters that are like p. At the base width all u_p are 1, and this is ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mukron.params.errors import ParametrizationError
from mukron.params.inventory import clean_name, unwrap
from mukron.params.resolve import listed
from mukron.params.sharded import is_sharded, part_here, reshard, whole
from mukron.theory import SP, gradient_size

if TYPE_CHECKING:
    from mukron.params.parametrization import Parametrization


def units(plan: Parametrization, norm_type: float = 2.0) -> dict[str, float]:
    """What the norm of each parameter's gradient is divided by: its growth since the base width and depth.

    Args:
        plan: The plan.
        norm_type: The order of the norm.

    Returns:
        By parameter; 1 throughout the standard parametrization, whose steps follow no law of the width.
    """
    if plan.scheme == SP:
        return dict.fromkeys(plan.parameters, 1.0)
    found = {}
    for name, entry in plan.parameters.items():
        size = entry.growth.factor(gradient_size(entry.role, plan.scheme))
        number = math.prod(entry.shape) / math.prod(entry.base_shape) * float(entry.growth.L or 1)
        found[name] = size * number ** (1 / norm_type)
    return found


@torch.no_grad()
def clip(
    plan: Parametrization,
    model: nn.Module,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Clip the gradients of a model; ``Parametrization.clip_grad_norm_`` describes it."""
    for argument, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, Real):  # infinite ones are good for both
            raise TypeError(f"{argument} must be a number, got {value!r:.80}")
    if not max_norm >= 0 or not norm_type > 0:
        raise ParametrizationError(
            f"max_norm must not be negative and norm_type must be positive, got {max_norm} and {norm_type}"
        )
    reshard(model)  # a parameter that was gathered for a forward pass is not the one that has the gradient
    measures, plain, spread = units(plan, norm_type), list[nn.Parameter](), list[Tensor]()
    alike = defaultdict[tuple[float, Any], list[Tensor]](list)
    own = {clean_name(name): parameter for name, parameter in unwrap(model).named_parameters()}
    for name, parameter in own.items():
        shape = tuple(parameter.shape)
        if name in measures and shape != plan.parameters[name].shape:
            raise ParametrizationError(
                f'parameter "{name}": {list(shape)} in this network, {list(plan.parameters[name].shape)} in the plan, '
                "whose units are for that size: clip a network of another width by its own plan"
            )
        if parameter.grad is None:
            continue
        if name not in measures:
            raise ParametrizationError(
                f'parameter "{name}" has a gradient and is not in the plan: pass the model that was parametrized as '
                "model=..."
            )
        alike[measures[name], getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
        if is_sharded(parameter.grad):
            spread.append(part_here(parameter.grad))
        else:
            plain.append(parameter)
    if missing := [name for name in plan.parameters if name not in own]:
        raise ParametrizationError(
            f"parameter {listed(missing)} exists in the plan but not in this network: pass the model that was "
            "parametrized, or another copy of it, as model=..."
        )
    norm = _norm(alike, norm_type, foreach)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients, in units of the plan, is {float(norm)}, so that they "
            "cannot be clipped. Look for the parameter whose gradient is not finite, or leave out "
            "error_if_nonfinite=True and skip such steps (a GradScaler does, and mukron's own optimizers do)"
        )
    clip_grads_with_norm_(plain, max_norm, norm, foreach)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
    for part in spread:
        part.mul_(factor.to(part.device))
    return norm


def _norm(alike: dict[tuple[float, Any], list[Tensor]], norm_type: float, foreach: bool | None) -> Tensor:
    """That of all gradients, each in its unit. alike: by unit and mesh."""
    norms = []
    for (unit, _), gradients in alike.items():
        norm = whole(get_total_norm(gradients, norm_type, foreach=foreach))
        norms.append(norm if unit == 1 else norm.to(torch.promote_types(norm.dtype, torch.float32)) / unit)
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return together
