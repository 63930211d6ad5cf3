"""Train a few steps at several widths and seeds, and record what the probes measure."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mukron.diagnose.descent import Descent
from mukron.diagnose.description import describe_run, moving_themselves
from mukron.diagnose.record import OUTPUT, Measurement, Record, TrainingSetup
from mukron.params import plain_width
from mukron.params.inventory import clean_name, unwrap
from mukron.train.calls import call
from mukron.train.probes import PROBES, Features, Probe
from mukron.train.randomness import own_random_numbers

CHECKED = ("features", "distance", "spectra")
FEWEST_SEEDS, MOST_SEEDS = 3, 8  # where the number of seeds is left open
LARGEST_CHANGE = 0.2  # of a layer's output relative to its size, for the laws of the first steps
CALIBRATIONS = 4
TINY = 0.01  # of the usual size of layers' outputs: what is smaller starts near zero

Start = Callable[[float, int], TrainingSetup]
Report = Callable[[int, int, str], None]


def built_optimizer(build: Callable[[nn.Module, Any], Optimizer], model: nn.Module, plan: Any) -> Optimizer:
    """The optimizer of a network, from the function that a check was given.

    Raises:
        TypeError: It is no function, or makes something else, such as the groups alone.
    """
    built = build(model, plan) if callable(build) else build
    if isinstance(built, Optimizer) and callable(build):
        return built
    said = "made" if callable(build) else "is"
    raise TypeError(
        "optimizer is a function of the network and its plan that makes an optimizer, as in lambda model, plan: "
        f'torch.optim.SGD(plan.param_groups("sgd", lr=0.1)); it {said} a {type(built).__name__}'
    )


def loss_of_outputs(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss; the usual one refuses what is no tensor, as models of transformers return, and says what to do."""
    if loss is not cross_entropy:
        return loss

    def checked(output: Any, targets: Any) -> Tensor:
        if isinstance(output, Tensor):
            return cross_entropy(output, targets)
        raise TypeError(
            f"the network returned a {type(output).__name__}, and the usual loss takes a tensor; say what the loss is, "
            "as in loss=lambda returned, targets: F.cross_entropy(returned.logits, targets)"
        )

    return checked


def record_runs(
    start: Start,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    widths: Sequence[float],
    seeds: Sequence[int] | None,
    steps: int,
    probes: Sequence[str] = CHECKED,
    clear: Callable[[Record], bool] | None = None,
    progress: Report | None = None,
) -> Record:
    """Train on one batch at several widths and seeds, and record what the probes measure after every step.

    Args:
        start: Builds a network of a width with a seed, and its optimizer.
        batch: Inputs and targets, the same at every step.
        loss: The loss of outputs and targets.
        widths: The widths, at least two.
        seeds: The seeds, at least one. None: three at first, then one more at a time until ``clear``, at most eight.
        steps: The number of steps of every run.
        probes: The names of the probes in ``mukron.train.probes``.
        clear: Says whether a record needs no more seeds.
        progress: Called with the number of runs that are done, the number of all runs as far as it is known, and what
            is run next with an estimate of the time that is left.

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
    planned = list(range(FEWEST_SEEDS) if seeds is None else map(int, seeds))
    clock = _Clock(widths, progress)

    def record_seed(seed: int) -> Record:
        rows: list[Measurement] = []
        broken: dict[str, str] = {}
        for width in reversed(widths):  # the widest first: its time is most of the whole, and known at once
            with clock.timed(width, seed, len(planned)):
                with warnings.catch_warnings():
                    if clock.done:  # the first run has given the same warnings
                        warnings.simplefilter("ignore", UserWarning)
                    setup = start(width, seed)
                readers: list[Probe] = [PROBES[name](setup.model, setup.optimizer, batch[0]) for name in probes]
                readers.append(Descent(setup, batch, loss))
                values_by_step, failure = _train(setup, batch, loss, steps, readers)
            about = describe_run(setup, readers)
            rows += [
                Measurement(width, seed, step, *_quantity_and_layer(key), value)
                for step, values in values_by_step
                for key, value in values.items()
            ]
            if failure:
                broken[f"width {width:g}, seed {seed}"] = failure
        rows.sort(key=lambda row: row.width)
        return Record(tuple(_with_ratios(rows)), widths, steps, broken=broken, **about)

    with own_random_numbers(batch_device(batch)):
        record = record_seed(planned[0])
        for seed in planned[1:]:
            record = record.joined(record_seed(seed))
        while seeds is None and len(planned) < MOST_SEEDS and not (clear is None or record.broken or clear(record)):
            planned.append(planned[-1] + 1)
            record = record.joined(record_seed(planned[-1]))
    clock.end()
    return record


def suitable_rate(
    start: Callable[[float], TrainingSetup],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    lr: float,
    steps: int,
) -> float:
    """Lower a learning rate until the first steps are small: the laws are those of small steps.

    Args:
        start: Builds the network and its optimizer for a learning rate.
        batch: Inputs and targets.
        loss: The loss of outputs and targets.
        lr: The learning rate to begin with.
        steps: The number of steps.

    Returns:
        A learning rate of at most ``lr`` at which no layer's output changes by more than a fifth of its size.

    Example:
        >>> def start(lr):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     return TrainingSetup(model, None, torch.optim.SGD(model.parameters(), lr=lr))
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> suitable_rate(start, batch, torch.nn.functional.mse_loss, lr=1.0, steps=1) < 0.1
        True
    """
    with own_random_numbers(batch_device(batch)):
        for _ in range(CALIBRATIONS):
            setup = start(lr)
            probe = Features(setup.model, setup.optimizer, batch[0])
            values, failure = _train(setup, batch, loss, steps, [probe])
            change = math.inf if failure else _relative_change(values[-1][1], probe.sizes)
            if change <= LARGEST_CHANGE:
                break
            lr = float(f"{lr * max(LARGEST_CHANGE / (1.5 * change), 1e-2):.1g}")
    return lr


def _relative_change(changes: Mapping[str, float], sizes: Mapping[str, float]) -> float:
    """Return the largest change of a layer's output over its initial size; infinite if it is no number.

    Layers that start near zero, such as a head or a scale of a branch, may change by many times their size.
    """
    usual = TINY * median(sizes.values())
    relative = [
        change / sizes[key]
        for key, change in changes.items()
        if key.startswith("features/") and sizes.get(key, 0.0) > usual
    ]
    return max(relative, default=0.0) if all(map(math.isfinite, relative)) else math.inf


class _Clock:
    """Reports progress with an estimate of the time left, from how long the runs of each width took."""

    def __init__(self, widths: Sequence[float], progress: Report | None) -> None:
        self.widths, self.progress = widths, progress
        self.seconds: dict[float, float] = {}
        self.done = 0

    @contextmanager
    def timed(self, width: float, seed: int, seeds: int) -> Iterator[None]:
        """Report that a run begins, of ``seeds`` for each width, and take its time."""
        total = len(self.widths) * seeds
        left = self._left(total)
        if self.progress is not None:
            about = f", about {left:.0f} s left" if left >= 1 else ""
            self.progress(self.done, total, f"width {width:g}, seed {seed}{about}")
        begin = time.perf_counter()
        yield
        self.seconds[width] = time.perf_counter() - begin
        self.done += 1

    def _left(self, total: int) -> float:
        if not self.seconds:
            return 0.0
        widest = self.widths[-1]
        cost = {width: self.seconds.get(width, self.seconds[widest] * width / widest) for width in self.widths}
        rounds, begun = divmod(total - self.done, len(self.widths))
        return rounds * sum(cost.values()) + sum(cost[width] for width in self.widths[:begun])

    def end(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.done, "done")


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
        gradients = _gradients(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # repeated factorizations: the probes show their effect
            optimizer.step()
        if getattr(optimizer, "skipped", 0):
            return values_by_step, f"step {step} was skipped: gradients or curvature were not finite"
        values_by_step.append((step, {**_read(setup, readers), **gradients}))
    return values_by_step, ""


def _gradients(model: nn.Module) -> dict[str, float]:
    """Return the root mean square of every parameter's gradient, and its smallest entry over that of all entries."""
    parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
    numbers = {}
    for name, value in parameters.items():
        if value.grad is not None and value.numel():
            numbers[f"gradient/{name}"] = _rms(value.grad)
            numbers[f"evenness/{name}"] = float(value.detach().abs().min()) / max(_rms(value.detach()), 1e-300)
    return numbers


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _read(setup: TrainingSetup, readers: Sequence[Probe]) -> dict[str, float]:
    """Return the numbers of all probes; a token or position that no module owns is judged by its own change."""
    values = {key: value for reader in readers for key, value in reader.read().items()}
    themselves = moving_themselves(setup.plan)
    for reader in readers:
        if isinstance(reader, Features):
            own = {f"update/{name}": change for name, change in reader.own_changes().items() if name in themselves}
            values |= {key: change for key, change in own.items() if key in values}
    return values


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


def _check(widths: Sequence[float], seeds: Sequence[int] | None, steps: int) -> None:
    if len(set(widths)) < 2:
        raise ValueError(f"an exponent needs at least two widths, got {list(widths)}; four from 1 to 8 times are good")
    if seeds is not None and not seeds:
        raise ValueError("at least one seed is needed, three are good")
    if steps < 1:
        raise ValueError(f"steps counts steps: at least 1, got {steps}")


def batch_device(batch: tuple[Any, Any]) -> torch.device:
    """Return the device of the first tensor in the inputs.

    Raises:
        TypeError: The batch is no pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            "batch is a pair, (inputs, targets), whose inputs may be a dictionary of the network's arguments, as in "
            f'({{"input_ids": tokens}}, labels); got a {type(batch).__name__}'
        )
    inputs = batch[0]
    values = [inputs] if isinstance(inputs, Tensor) else list(inputs.values() if isinstance(inputs, dict) else inputs)
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
