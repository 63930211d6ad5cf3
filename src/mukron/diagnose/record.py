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
from torch.optim import Optimizer

from mukron.damping import Rule
from mukron.optim.base import SecondOrder
from mukron.params import Parametrization
from mukron.theory import Role, feature_slopes, get_method, solve, update_exponent
from mukron.train.probes import PROBES, call

OUTPUT = "output"


class Row(NamedTuple):
    """One number: of a layer (or a factor of one, ``fc1.A``), at a width and seed, after so many steps."""

    width: float
    seed: int
    step: int
    quantity: str
    layer: str
    value: float


class Started(NamedTuple):
    """A network that is ready to train."""

    model: nn.Module
    plan: Parametrization | None
    optimizer: Optimizer


@dataclass(frozen=True)
class Record:
    """What was measured, and what theory says of it."""

    rows: tuple[Row, ...]
    method: str  # by its name in ``mukron.theory``; "" if it is not known there
    scheme: str
    damping: str  # the rule; "" if there is none
    roles: Mapping[str, str]  # by layer and by parameter
    predicted: Mapping[str, float]  # the exponents that theory gives, by "quantity/layer"
    broken: Mapping[str, str] = field(default_factory=dict)  # "width 512, seed 0" -> what went wrong, and when

    @property
    def widths(self) -> list[float]:
        return sorted({row.width for row in self.rows})

    @property
    def steps(self) -> list[int]:
        return sorted({row.step for row in self.rows})

    def layers(self, quantity: str) -> list[str]:
        """In the order of the forward pass."""
        return list(dict.fromkeys(row.layer for row in self.rows if row.quantity == quantity))

    def select(self, quantity: str, layer: str, step: int | None = None) -> list[Row]:
        """After ``step`` steps; the last, if not given."""
        step = self.steps[-1] if step is None else step
        return [row for row in self.rows if (row.quantity, row.layer, row.step) == (quantity, layer, step)]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        rows = tuple(Row._make([*about, math.nan if value is None else value]) for *about, value in data["rows"])
        return cls(**{**data, "rows": rows})


def run(
    start: Callable[[float, int], Started],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    widths: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    probes: Sequence[str] = tuple(PROBES),
    progress: Callable[[int, int, str], None] | None = None,
) -> Record:
    """``start(width, seed)`` builds; the same batch is learned for ``steps`` steps; probes are read after each."""
    _check(widths, seeds, steps)
    rows: list[Row] = []
    broken: dict[str, str] = {}
    about: dict[str, Any] = {"method": "", "scheme": "sp", "damping": "", "roles": {}, "predicted": {}}
    runs = [(width, seed) for width in sorted(widths) for seed in seeds]
    for number, (width, seed) in enumerate(runs):
        if progress is not None:
            progress(number, len(runs), f"width {width:g}, seed {seed}")
        started = start(width, seed)
        about = about_run(started)
        found, trouble = _train(started, batch, loss, steps, probes)
        rows += [Row(width, seed, step, *_parted(key), value) for step, read in found for key, value in read.items()]
        if trouble:
            broken[f"width {width:g}, seed {seed}"] = trouble
    if progress is not None:
        progress(len(runs), len(runs), "done")
    return Record(tuple(_with_ratios(rows)), broken=broken, **about)


def _train(
    started: Started, batch: tuple[Any, Any], loss: Callable[[Any, Any], Tensor], steps: int, names: Sequence[str]
) -> tuple[list[tuple[int, dict[str, float]]], str]:
    model, _, optimizer = started
    inputs, targets = batch
    probes = [PROBES[name](model, optimizer, inputs) for name in names]
    found: list[tuple[int, dict[str, float]]] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        error = loss(call(model, inputs), targets)
        value = float(error.detach())
        if not torch.isfinite(error):
            return found, f"the loss is {value} after {step - 1} steps"
        torch.autograd.backward(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # rescued factorizations: seen in what the probes read
            optimizer.step()
        if getattr(optimizer, "skipped", 0):
            return found, f"step {step} was skipped: gradients or curvature were not finite"
        found.append((step, {key: number for probe in probes for key, number in probe.read().items()}))
    return found, ""


def about_run(started: Started) -> dict[str, Any]:
    """What a record says beside its numbers."""
    optimizer, plan = started.optimizer, started.plan
    method, damping, fallback = method_of(optimizer), "", ""
    if isinstance(optimizer, SecondOrder):
        damping = Rule.from_plain(optimizer.param_groups[0]["damping_rule"]).text()
        fallback = optimizer.settings.fallback
    about = {"method": method, "scheme": "sp", "damping": damping, "roles": {}, "predicted": {}}
    if plan is None:
        return about
    predicted = predictions(plan, method, fallback or method) if method else {}
    return {**about, "scheme": plan.scheme.name, "roles": roles_of(plan), "predicted": predicted}


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


__all__ = ["OUTPUT", "Record", "Row", "Started", "run"]
