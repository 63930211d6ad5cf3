"""What a record says of a run besides its measurements: method, roles, and the exponents that theory predicts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mukron.damping import Rule
from mukron.diagnose.record import FROZEN, LEFT_OUT, OUTPUT, UNUSED, TrainingSetup
from mukron.optim import SecondOrder
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.params.inventory import clean_name, unwrap
from mukron.params.planned import own_kind
from mukron.theory import Role, feature_slopes, get_method, solve, update_exponent
from mukron.train.probes import Features, Probe

MOVES_ITSELF = (Role.INPUT, Role.VECTOR, Role.SCALAR)  # roles whose entries move by the same amount at every width


def describe_run(setup: TrainingSetup, readers: Sequence[Probe]) -> dict[str, Any]:
    """Return the fields of a record that are not measured; call it after a run, when unused parameters are known."""
    optimizer, plan = setup.optimizer, setup.plan
    method, damping, fallback, exclude = method_of(optimizer), "", "", None
    if isinstance(optimizer, SecondOrder):
        rule = optimizer.param_groups[0]["damping_rule"]
        damping = Rule.from_plain(rule).text() if rule else ""
        fallback, exclude = optimizer.options.fallback.name, optimizer.options.exclude
    about: dict[str, Any] = {"method": method, "scheme": "sp", "damping": damping, "roles": {}, "predicted": {}}
    about |= {"idle": _idle(setup.model, optimizer), "planned": _uses_plan(optimizer)}
    if plan is None:
        return about
    known = method and plan.output_exponent is None
    predicted = predictions(plan, method, fallback or method, exclude) if known else {}
    for name in elsewhere(plan, readers):
        predicted.pop(f"update/{name}", None)
    tied = {alias: name for name, entry in plan.parameters.items() for alias in entry.tied}
    return {**about, "scheme": plan.scheme.name, "roles": roles_of(plan), "predicted": predicted, "tied": tied}


def elsewhere(plan: Parametrization, readers: Sequence[Probe]) -> set[str]:
    """Return the parameters that are measured in another module's output, where their part follows no law."""
    indirect = {name for reader in readers if isinstance(reader, Features) for name in reader.indirect}
    return {name for name in indirect if name not in moving_themselves(plan)}


def moving_themselves(plan: Parametrization | None) -> set[str]:
    """Return the parameters whose own change can be judged where their part in an output cannot: a class token's."""
    entries = {} if plan is None else plan.parameters
    return {name for name, entry in entries.items() if entry.role in MOVES_ITSELF}


def _uses_plan(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, SecondOrder):
        return optimizer.parametrization is not None
    return any("role" in group for group in optimizer.param_groups)


def _idle(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return the parameters that are not trained, and the layers that have no other parameters."""
    parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
    groups = [group for group in optimizer.param_groups if float(group.get("lr", 1.0)) > 0]
    trained = {id(value) for group in groups for value in group["params"]}
    idle = {name: LEFT_OUT for name, value in parameters.items() if id(value) not in trained}
    idle |= {name: FROZEN for name, value in parameters.items() if not value.requires_grad}
    idle |= {name: UNUSED for name, value in parameters.items() if value.requires_grad and value.grad is None}
    for layer in {name.rpartition(".")[0] for name in idle}:
        states = {idle.get(name) for name in parameters if name.rpartition(".")[0] == layer}
        if len(states) == 1 and (state := states.pop()) is not None:
            idle[layer] = state
    return idle


def method_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's method in ``mukron.theory``; empty if it is not known there."""
    if isinstance(optimizer, SecondOrder):
        return optimizer.method.name
    known = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
    return known.get(own_kind(optimizer), "")


def roles_of(plan: Parametrization) -> dict[str, str]:
    """Return the roles of every parameter, and of every layer: that of its first parameter, the weight."""
    roles: dict[str, str] = {OUTPUT: Role.OUTPUT.value}
    for name, entry in plan.parameters.items():
        for alias in (name, *entry.tied):
            roles[alias] = entry.role.value
            roles.setdefault(alias.rpartition(".")[0], entry.role.value)
    return roles


def predictions(
    plan: Parametrization, method: str, fallback: str, exclude: tuple[Excluded, ...] | None = ()
) -> dict[str, float]:
    """Predict exponents by "quantity/layer", for damping proportional to its factor; a norm layer keeps those below."""
    roles = roles_of(plan)
    layers = {name: Role(role) for name, role in roles.items() if name not in plan.parameters}
    slopes = feature_slopes(method, solve(method, plan.scheme))
    predicted = {f"features/{name}": slopes.get(role, slopes[Role.HIDDEN]) for name, role in layers.items()}
    predicted[f"descent/{OUTPUT}"] = predicted[f"features/{OUTPUT}"]
    for name, entry in plan.parameters.items():
        rule = fallback if plan.falls_back(name, exclude, method) else method
        predicted[f"update/{name}"] = -update_exponent(rule, entry.role, solve(rule, plan.scheme))
    for statistic in get_method(method).damped:
        symbol = statistic.name
        for name, role in layers.items():
            size = statistic.size(role, plan.scheme.s).total
            dimension = {"A": role.fan_in, "R": role.fan_in, "B": role.fan_out, "L": role.fan_out}.get(symbol, 0)
            predicted |= {f"ratio/{name}.{symbol}": Fraction(0), f"largest/{name}.{symbol}": size}
            predicted[f"mean/{name}.{symbol}"] = size - dimension  # the trace over the number of eigenvalues
    return {key: float(value) for key, value in predicted.items()}
