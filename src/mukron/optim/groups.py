"""Parameter groups as an optimizer keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mukron.arguments import check_number
from mukron.damping import Adaptive
from mukron.optim.guards import damping_rule
from mukron.optim.momentum import Momentum, momentum_entries
from mukron.optim.options import usual_fallback_lr
from mukron.optim.plan import warn_of_damping

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder


def completed_group(optimizer: SecondOrder, param_group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group with its damping, momentum and first learning rate as numbers, which schedulers look for."""
    group = dict(param_group)
    damping = group.get("damping", optimizer.defaults["damping"])
    rule, adaptive = damping_rule(optimizer, damping), damping.plain() if isinstance(damping, Adaptive) else None
    warn_of_damping(optimizer, rule)
    group |= {"damping": rule and rule.rho, "damping_rule": {} if rule is None else rule.plain(), "adaptive": adaptive}
    if "momentum_on" not in group:
        group |= _own_momentum(optimizer, group)
    if not isinstance(group.get("lr", 0.0), Tensor):
        check_number("lr", group.get("lr", 0.0))
    group["reference_lr"] = lr = float(group.get("lr", optimizer.defaults["lr"]))
    if group.get("fallback_lr", optimizer.defaults["fallback_lr"]) is None:
        group["reference_lr"] = lr = lr or 1.0  # a schedule may begin at zero; the two keep their proportion
        group["fallback_lr"] = usual_fallback_lr(optimizer.method, optimizer.options, lr, optimizer.spec.bounded_lr)
    return group


def _own_momentum(optimizer: SecondOrder, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's own momentum and nesterov, which mean what they mean at the top level; none if it gives neither."""
    usual = optimizer.defaults
    momentum = group.get("momentum", usual["momentum"])
    inherited = bool(usual["nesterov"] and momentum) and not isinstance(momentum, Momentum)
    nesterov = group.get("nesterov", inherited)
    if "momentum" not in group and nesterov == usual["nesterov"]:
        return {}
    bounded = optimizer.options.trust is not None
    return momentum_entries(momentum, nesterov, optimizer.momentum_kind, bounded)
