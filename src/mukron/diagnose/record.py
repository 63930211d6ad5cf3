"""Train a few steps at several widths and seeds, and keep every number that the probes read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mukron.damping import Rule
from mukron.optim.base import SecondOrder
from mukron.params import Parametrization, plain_width
from mukron.params.inventory import clean_name, unwrap
from mukron.theory import Role, feature_slopes, get_method, solve, update_exponent
from mukron.train.probes import PROBES, Probe, call
from mukron.train.randomness import own_random_numbers

OUTPUT = "output"
FROZEN, UNUSED = "frozen", "unused"
CHECKED = ("features", "distance", "spectra")


class Row(NamedTuple):
    """One number: of a layer (or a factor of one, ``fc1.A``), at a width and seed, after so many steps."""

    width: float
    seed: int
    step: int
    quantity: str
    layer: str
    value: float


@dataclass(frozen=True)
class Started:
    """A network that is ready to train."""

    model: nn.Module
    plan: Parametrization | None
    optimizer: Optimizer
    forward: Callable[[Any], Any] | None = None  # from inputs to outputs, if not the model itself (autocast, compiled)
    clip_norm: float | None = None


@dataclass(frozen=True)
class Record:
    """What was measured, and what theory says of it."""

    rows: tuple[Row, ...]
    widths: tuple[float, ...]
    steps: int
    method: str  # by its name in ``mukron.theory``; "" if it is not known there
    scheme: str
    damping: str  # the rule; "" if there is none
    roles: Mapping[str, str]  # by layer and by parameter
    predicted: Mapping[str, float]  # the exponents that theory gives, by "quantity/layer"
    idle: Mapping[str, str] = field(default_factory=dict)  # parameters and layers that do not train, and why
    planned: bool = True  # whether the optimizer uses the plan
    setting: str = ""  # more for the title
    about: Mapping[str, Any] = field(default_factory=dict)  # what else there is to know: config, versions
    broken: Mapping[str, str] = field(default_factory=dict)  # "width 512, seed 0" -> what went wrong, and when

    def layers(self, quantity: str) -> list[str]:
        """In the order of the forward pass."""
        return list(dict.fromkeys(row.layer for row in self.rows if row.quantity == quantity))

    def select(self, quantity: str, layer: str, step: int | None = None) -> list[Row]:
        """After ``step`` steps; the last, if not given."""
        step = self.steps if step is None else step
        return [row for row in self.rows if (row.quantity, row.layer, row.step) == (quantity, layer, step)]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "widths": list(self.widths), "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        rows = tuple(Row._make([*about, math.nan if value is None else value]) for *about, value in data["rows"])
        return cls(**{**data, "rows": rows, "widths": tuple(data["widths"])})


def run(
    start: Callable[[float, int], Started],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    widths: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    probes: Sequence[str] = CHECKED,
    progress: Callable[[int, int, str], None] | None = None,
) -> Record:
    """``start(width, seed)`` builds; the same batch is learned for ``steps`` steps; probes are read after each."""
    widths = tuple(sorted({plain_width(width) for width in widths}))
    _check(widths, seeds, steps)
    rows: list[Row] = []
    broken: dict[str, str] = {}
    about: dict[str, Any] = {}
    runs = [(width, int(seed)) for width in widths for seed in seeds]
    with own_random_numbers(batch_device(batch)):
        for number, (width, seed) in enumerate(runs):
            if progress is not None:
                progress(number, len(runs), f"width {width:g}, seed {seed}")
            with warnings.catch_warnings():
                if number:  # what the first one says need not be said again
                    warnings.simplefilter("ignore", UserWarning)
                started = start(width, seed)
            readers = [PROBES[name](started.model, started.optimizer, batch[0]) for name in probes]
            found, trouble = _train(started, batch, loss, steps, readers)
            about = about_run(started, readers)
            rows += [
                Row(width, seed, step, *_parted(key), value) for step, read in found for key, value in read.items()
            ]
            if trouble:
                broken[f"width {width:g}, seed {seed}"] = trouble
    if progress is not None:
        progress(len(runs), len(runs), "done")
    return Record(tuple(_with_ratios(rows)), widths, steps, broken=broken, **about)


def _train(
    started: Started,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    readers: Sequence[Probe],
) -> tuple[list[tuple[int, dict[str, float]]], str]:
    model, optimizer = started.model, started.optimizer
    forward = started.forward or (lambda inputs: call(model, inputs))
    inputs, targets = batch
    found: list[tuple[int, dict[str, float]]] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        error = loss(forward(inputs), targets)
        if not torch.isfinite(error):
            return found, f"the loss is {float(error.detach())} after {step - 1} steps"
        torch.autograd.backward(error)
        if started.clip_norm is not None:
            clip_grad_norm_(model.parameters(), started.clip_norm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # rescued factorizations: seen in what the probes read
            optimizer.step()
        if getattr(optimizer, "skipped", 0):
            return found, f"step {step} was skipped: gradients or curvature were not finite"
        found.append((step, {key: number for reader in readers for key, number in reader.read().items()}))
    return found, ""


def about_run(started: Started, readers: Sequence[Probe]) -> dict[str, Any]:
    """What a record says beside its numbers. After a run: what got no gradient is known by then."""
    optimizer, plan = started.optimizer, started.plan
    method, damping, fallback = method_of(optimizer), "", ""
    if isinstance(optimizer, SecondOrder):
        damping = Rule.from_plain(optimizer.param_groups[0]["damping_rule"]).text()
        fallback = optimizer.settings.fallback
    about: dict[str, Any] = {"method": method, "scheme": "sp", "damping": damping, "roles": {}, "predicted": {}}
    about |= {"idle": _idle(started.model), "planned": _uses_plan(optimizer)}
    if plan is None:
        return about
    predicted = predictions(plan, method, fallback or method) if method and plan.output_exponent is None else {}
    for reader in readers:
        for name in getattr(reader, "indirect", ()):
            predicted.pop(f"update/{name}", None)  # what is seen elsewhere follows no law of its own
    return {**about, "scheme": plan.scheme.name, "roles": roles_of(plan), "predicted": predicted}


def _uses_plan(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, SecondOrder):
        return optimizer.parametrization is not None
    return any("role" in group for group in optimizer.param_groups)


def _idle(model: nn.Module) -> dict[str, str]:
    """Parameters that are not trained, and layers that hold no other."""
    parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
    idle = {name: FROZEN for name, value in parameters.items() if not value.requires_grad}
    idle |= {name: UNUSED for name, value in parameters.items() if value.requires_grad and value.grad is None}
    for layer in {name.rpartition(".")[0] for name in idle}:
        states = {idle.get(name) for name in parameters if name.rpartition(".")[0] == layer}
        if len(states) == 1 and (state := states.pop()) is not None:
            idle[layer] = state
    return idle


def method_of(optimizer: Optimizer) -> str:
    """Its name in ``mukron.theory``; "" for one that theory does not know."""
    if isinstance(optimizer, SecondOrder):
        return optimizer.method.name
    known = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    return known.get(type(optimizer), "")


def roles_of(plan: Parametrization) -> dict[str, str]:
    """Of every parameter, and of every layer: that of its first parameter, the weight."""
    roles: dict[str, str] = {OUTPUT: Role.OUTPUT.value}
    for name, entry in plan.parameters.items():
        for alias in (name, *entry.tied):
            roles[alias] = entry.role.value
            roles.setdefault(alias.rpartition(".")[0], entry.role.value)
    return roles


def predictions(plan: Parametrization, method: str, fallback: str) -> dict[str, float]:
    """Exponents by "quantity/layer", with damping in proportion to its factor. A norm layer passes on what arrives."""
    roles = roles_of(plan)
    layers = {name: Role(role) for name, role in roles.items() if name not in plan.parameters}
    own = solve(method, plan.scheme)
    slopes = feature_slopes(method, own)
    found = {f"features/{name}": slopes.get(role, slopes[Role.HIDDEN]) for name, role in layers.items()}
    for name, entry in plan.parameters.items():
        rule = fallback if entry.fallback else method
        found[f"update/{name}"] = -update_exponent(rule, entry.role, solve(rule, plan.scheme))
    for factor in get_method(method).damped:
        for name, role in layers.items():
            size = factor.size(role, plan.scheme.s).total
            spread = {"A": role.fan_in, "R": role.fan_in, "B": role.fan_out, "L": role.fan_out}.get(factor.name, 0)
            found |= {f"ratio/{name}.{factor.name}": Fraction(0), f"largest/{name}.{factor.name}": size}
            found[f"mean/{name}.{factor.name}"] = size - spread  # the trace, over all the eigenvalues there are
    return {key: float(value) for key, value in found.items()}


def _parted(key: str) -> tuple[str, str]:
    """ "features/fc1" -> ("features", "fc1"); the network's output counts among the features."""
    quantity, _, layer = key.partition("/")
    return ("features", OUTPUT) if quantity == OUTPUT else (quantity, layer)


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Damping over the largest eigenvalue, beside both."""
    largest = {row._replace(quantity="", value=0): row.value for row in rows if row.quantity == "largest"}
    ratios = [
        row._replace(quantity="ratio", value=row.value / size)
        for row in rows
        if row.quantity == "damping" and (size := largest[row._replace(quantity="", value=0)]) > 0
    ]
    return rows + ratios


def _check(widths: Sequence[float], seeds: Sequence[int], steps: int) -> None:
    if len(set(widths)) < 2:
        raise ValueError(f"an exponent needs at least two widths, got {list(widths)}; four from 1 to 8 times are good")
    if not seeds:
        raise ValueError("at least one seed is needed, three are good")
    if steps < 1:
        raise ValueError(f"steps counts steps: at least 1, got {steps}")


def batch_device(batch: tuple[Any, Any]) -> torch.device:
    """Of the first tensor in the inputs."""
    inputs = batch[0]
    found = [inputs] if isinstance(inputs, Tensor) else list(inputs.values() if isinstance(inputs, dict) else inputs)
    return next((each.device for each in found if isinstance(each, Tensor)), torch.device("cpu"))


__all__ = ["OUTPUT", "Record", "Row", "Started", "batch_device", "run"]
