"""Train a few steps at several widths and seeds, and record what the probes measure."""

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
from mukron.optim import SecondOrder
from mukron.params import Parametrization, plain_width
from mukron.params.inventory import clean_name, unwrap
from mukron.theory import Role, feature_slopes, get_method, solve, update_exponent
from mukron.train.probes import PROBES, Probe, call
from mukron.train.randomness import own_random_numbers

OUTPUT = "output"
FROZEN, UNUSED = "frozen", "unused"
CHECKED = ("features", "distance", "spectra")


class Measurement(NamedTuple):
    """One measured number.

    Attributes:
        width: The width of the network.
        seed: The seed of the run.
        step: The number of steps after which it was measured.
        quantity: What was measured, such as ``"features"``.
        layer: The layer, parameter or curvature factor (``"fc1.A"``) that it belongs to.
        value: The number.

    Example:
        >>> from mukron.diagnose import Measurement
        >>> Measurement(64, 0, 1, "features", "fc1", 0.5).value
        0.5
    """

    width: float
    seed: int
    step: int
    quantity: str
    layer: str
    value: float


@dataclass(frozen=True)
class TrainingSetup:
    """A network with its optimizer, ready to train.

    Attributes:
        model: The network.
        plan: Its parametrization; None if it has none.
        optimizer: The optimizer of its parameters.
        forward: The function from inputs to outputs, if it is not the model itself (under autocast, or compiled).
        clip_norm: The norm to which gradients are clipped; None to leave them as they are.

    Example:
        >>> import torch
        >>> from mukron.diagnose import TrainingSetup
        >>> model = torch.nn.Linear(2, 1)
        >>> setup = TrainingSetup(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> setup.clip_norm is None
        True
    """

    model: nn.Module
    plan: Parametrization | None
    optimizer: Optimizer
    forward: Callable[[Any], Any] | None = None
    clip_norm: float | None = None


@dataclass(frozen=True)
class Record:
    """What was measured in a coordinate check, and the exponents that theory predicts.

    Attributes:
        rows: The measurements.
        widths: The widths, in ascending order.
        steps: The number of steps of every run.
        method: The name of the method in ``mukron.theory``; empty if it is not known there.
        scheme: The name of the parametrization.
        damping: The damping rule; empty if there is none.
        roles: The roles by parameter and by layer.
        predicted: The exponents that theory predicts, by ``"quantity/layer"``.
        idle: The parameters and layers that are not trained, each with the reason: frozen or unused.
        planned: Whether the optimizer uses the parametrization.
        setting: An addition to the title.
        about: The configuration and the versions of packages.
        broken: The runs that failed, such as ``"width 512, seed 0"``, each with the reason.

    Example:
        >>> from mukron.diagnose import Measurement, Record
        >>> rows = tuple(Measurement(width, 0, 1, "features", "fc1", 0.5) for width in (64, 128))
        >>> record = Record(rows, (64, 128), 1, method="sgd", scheme="mup", damping="", roles={}, predicted={})
        >>> record.layers("features")
        ['fc1']
        >>> len(record.select("features", "fc1"))
        2
    """

    rows: tuple[Measurement, ...]
    widths: tuple[float, ...]
    steps: int
    method: str
    scheme: str
    damping: str
    roles: Mapping[str, str]
    predicted: Mapping[str, float]
    idle: Mapping[str, str] = field(default_factory=dict)
    planned: bool = True
    setting: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    def layers(self, quantity: str) -> list[str]:
        """List the layers of a quantity in the order of the forward pass.

        Args:
            quantity: The quantity, such as ``"features"``.

        Returns:
            The names of layers, parameters or curvature factors.
        """
        return list(dict.fromkeys(row.layer for row in self.rows if row.quantity == quantity))

    def select(self, quantity: str, layer: str, step: int | None = None) -> list[Measurement]:
        """Select the measurements of a quantity and a layer.

        Args:
            quantity: The quantity, such as ``"features"``.
            layer: The layer, parameter or curvature factor.
            step: The number of steps; by default the last.

        Returns:
            The measurements, one for each width and seed.
        """
        step = self.steps if step is None else step
        return [row for row in self.rows if (row.quantity, row.layer, row.step) == (quantity, layer, step)]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON."""
        return {**asdict(self), "widths": list(self.widths), "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Restore a record from plain data.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The record.
        """
        rows = tuple(Measurement._make([*key, math.nan if value is None else value]) for *key, value in data["rows"])
        return cls(**{**data, "rows": rows, "widths": tuple(data["widths"])})


def record_runs(
    start: Callable[[float, int], TrainingSetup],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    widths: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    probes: Sequence[str] = CHECKED,
    progress: Callable[[int, int, str], None] | None = None,
) -> Record:
    """Train on one batch at several widths and seeds, and record what the probes measure after every step.

    Args:
        start: Builds a network of a width with a seed, and its optimizer.
        batch: Inputs and targets, the same at every step.
        loss: The loss of outputs and targets.
        widths: The widths, at least two.
        seeds: The seeds, at least one.
        steps: The number of steps of every run.
        probes: The names of the probes in ``mukron.train.probes``.
        progress: Called with the number of runs that are done, the number of all runs, and the run that begins.

    Returns:
        The record of all runs. A run whose numbers are not finite ends early and is listed in ``Record.broken``.

    Raises:
        ValueError: There are fewer than two widths, no seeds or no steps.

    Example:
        >>> import torch
        >>> from mukron.diagnose import TrainingSetup, record_runs
        >>> def start(width, seed):
        ...     torch.manual_seed(seed)
        ...     model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
        ...     return TrainingSetup(model, None, torch.optim.SGD(model.parameters(), lr=0.01))
        >>> batch = torch.ones(4, 3), torch.zeros(4, 1)
        >>> record = record_runs(start, batch, torch.nn.functional.mse_loss, widths=(8, 16), seeds=[0], steps=1)
        >>> record.layers("features")
        ['0', '1', 'output']
    """
    widths = tuple(sorted({plain_width(width) for width in widths}))
    _check(widths, seeds, steps)
    rows: list[Measurement] = []
    broken: dict[str, str] = {}
    about: dict[str, Any] = {}
    runs = [(width, int(seed)) for width in widths for seed in seeds]
    with own_random_numbers(batch_device(batch)):
        for number, (width, seed) in enumerate(runs):
            if progress is not None:
                progress(number, len(runs), f"width {width:g}, seed {seed}")
            with warnings.catch_warnings():
                if number:  # the first run has given the same warnings
                    warnings.simplefilter("ignore", UserWarning)
                setup = start(width, seed)
            readers = [PROBES[name](setup.model, setup.optimizer, batch[0]) for name in probes]
            values_by_step, failure = _train(setup, batch, loss, steps, readers)
            about = describe_run(setup, readers)
            rows += [
                Measurement(width, seed, step, *_quantity_and_layer(key), value)
                for step, values in values_by_step
                for key, value in values.items()
            ]
            if failure:
                broken[f"width {width:g}, seed {seed}"] = failure
    if progress is not None:
        progress(len(runs), len(runs), "done")
    return Record(tuple(_with_ratios(rows)), widths, steps, broken=broken, **about)


def _train(
    setup: TrainingSetup,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    readers: Sequence[Probe],
) -> tuple[list[tuple[int, dict[str, float]]], str]:
    """Train, and return the probes' values after every step, and why the run failed if it did."""
    model, optimizer = setup.model, setup.optimizer
    forward = setup.forward or (lambda inputs: call(model, inputs))
    inputs, targets = batch
    values_by_step: list[tuple[int, dict[str, float]]] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        error = loss(forward(inputs), targets)
        if not torch.isfinite(error):
            return values_by_step, f"the loss is {float(error.detach())} after {step - 1} steps"
        torch.autograd.backward(error)
        if setup.clip_norm is not None:
            clip_grad_norm_(model.parameters(), setup.clip_norm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # repeated factorizations: the probes show their effect
            optimizer.step()
        if getattr(optimizer, "skipped", 0):
            return values_by_step, f"step {step} was skipped: gradients or curvature were not finite"
        values_by_step.append((step, {key: value for reader in readers for key, value in reader.read().items()}))
    return values_by_step, ""


def describe_run(setup: TrainingSetup, readers: Sequence[Probe]) -> dict[str, Any]:
    """Return the fields of a record that are not measured; call it after a run, when unused parameters are known."""
    optimizer, plan = setup.optimizer, setup.plan
    method, damping, fallback, exclude = method_of(optimizer), "", "", None
    if isinstance(optimizer, SecondOrder):
        rule = optimizer.param_groups[0]["damping_rule"]
        damping = Rule.from_plain(rule).text() if rule else ""
        fallback, exclude = optimizer.options.fallback.name, optimizer.options.exclude
    about: dict[str, Any] = {"method": method, "scheme": "sp", "damping": damping, "roles": {}, "predicted": {}}
    about |= {"idle": _idle(setup.model), "planned": _uses_plan(optimizer)}
    if plan is None:
        return about
    known = method and plan.output_exponent is None
    predicted = predictions(plan, method, fallback or method, exclude) if known else {}
    for reader in readers:
        for name in getattr(reader, "indirect", ()):
            predicted.pop(f"update/{name}", None)  # it is measured at another layer and follows no law
    return {**about, "scheme": plan.scheme.name, "roles": roles_of(plan), "predicted": predicted}


def _uses_plan(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, SecondOrder):
        return optimizer.parametrization is not None
    return any("role" in group for group in optimizer.param_groups)


def _idle(model: nn.Module) -> dict[str, str]:
    """Return the parameters that are not trained, and the layers that have no other parameters."""
    parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
    idle = {name: FROZEN for name, value in parameters.items() if not value.requires_grad}
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
    known = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    return known.get(type(optimizer), "")


def roles_of(plan: Parametrization) -> dict[str, str]:
    """Return the roles of every parameter, and of every layer: that of its first parameter, the weight."""
    roles: dict[str, str] = {OUTPUT: Role.OUTPUT.value}
    for name, entry in plan.parameters.items():
        for alias in (name, *entry.tied):
            roles[alias] = entry.role.value
            roles.setdefault(alias.rpartition(".")[0], entry.role.value)
    return roles


def predictions(
    plan: Parametrization, method: str, fallback: str, exclude: tuple[str, ...] | None = ()
) -> dict[str, float]:
    """Predict exponents by "quantity/layer", for damping proportional to its factor; a norm layer keeps those below."""
    roles = roles_of(plan)
    layers = {name: Role(role) for name, role in roles.items() if name not in plan.parameters}
    slopes = feature_slopes(method, solve(method, plan.scheme))
    predicted = {f"features/{name}": slopes.get(role, slopes[Role.HIDDEN]) for name, role in layers.items()}
    for name, entry in plan.parameters.items():
        rule = fallback if plan.falls_back(name, exclude) else method
        predicted[f"update/{name}"] = -update_exponent(rule, entry.role, solve(rule, plan.scheme))
    for statistic in get_method(method).damped:
        symbol = statistic.name
        for name, role in layers.items():
            size = statistic.size(role, plan.scheme.s).total
            dimension = {"A": role.fan_in, "R": role.fan_in, "B": role.fan_out, "L": role.fan_out}.get(symbol, 0)
            predicted |= {f"ratio/{name}.{symbol}": Fraction(0), f"largest/{name}.{symbol}": size}
            predicted[f"mean/{name}.{symbol}"] = size - dimension  # the trace over the number of eigenvalues
    return {key: float(value) for key, value in predicted.items()}


def _quantity_and_layer(key: str) -> tuple[str, str]:
    """Split a probe's key: "features/fc1" -> ("features", "fc1"); the network's output is one of the features."""
    quantity, _, layer = key.partition("/")
    return ("features", OUTPUT) if quantity == OUTPUT else (quantity, layer)


def _with_ratios(rows: list[Measurement]) -> list[Measurement]:
    """Add the ratios of the damping to the largest eigenvalue."""
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
    """Return the device of the first tensor in the inputs."""
    inputs = batch[0]
    values = [inputs] if isinstance(inputs, Tensor) else list(inputs.values() if isinstance(inputs, dict) else inputs)
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


__all__ = ["OUTPUT", "Measurement", "Record", "TrainingSetup", "batch_device", "record_runs"]
