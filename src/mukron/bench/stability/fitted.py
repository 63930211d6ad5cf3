"""Does a run that fits its data stay fitted? Small problems, many seeds, optimizers with all their defaults.

After fitting, signals that are drawn from a confident model shrink B faster than the gradient, and an unbounded step
may leave the fit again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from math import inf, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn

from mukron.bench.measure import product_precision
from mukron.bench.stability.problems import batches, loss_of, mlp
from mukron.bench.stability.runs import finite_or_none, make_optimizer, settings_arguments
from mukron.data import Split, load
from mukron.optim.spec import spec_of
from mukron.train.randomness import own_random_numbers
from mukron.typed import NullIsInfinite, read_as

FIT_BELOW, LEFT_ABOVE = 0.05, 0.5  # losses of all data
MEASURED_EVERY = 5  # steps from one measurement of that loss to the next
FITTED_SEEDS, FITTED_STEPS = 30, 2000


@dataclass(frozen=True)
class FittedProblem:
    """A small problem that a network can fit.

    Attributes:
        name: The name in tables.
        title: What is trained, in words.
        data: Makes the samples from a seed.
        network: Builds the network.
        batch: Batch size.

    Example:
        >>> FITTED_PROBLEMS["spirals"].batch
        64
    """

    name: str
    title: str
    data: Callable[[int], Split]
    network: Callable[[], nn.Module]
    batch: int


@dataclass(frozen=True)
class FittedRun:
    """One run on a small problem.

    Attributes:
        problem: The problem's name.
        method: The method's name.
        settings: "defaults", "plain" (``trust=None``), or a trust as ``Trust.of`` reads it.
        seed: The seed of the data, the initial weights and the batches.
        steps: The number of steps.

    Example:
        >>> FittedRun("toy", "kfac", "defaults", seed=0, steps=2000).steps
        2000
    """

    problem: str
    method: str
    settings: str
    seed: int
    steps: int


@dataclass(frozen=True)
class FittedOutcome:
    """When a run fitted its data and whether it left the fit again, by the loss of all data.

    Attributes:
        fitted: The step at which the loss was first below 0.05; None: never.
        left: The step after it at which the loss was first above 0.5; None: never.
        final: The last loss.

    Example:
        >>> FittedOutcome.of({0: 1.1, 5: 0.01, 10: 0.7, 15: 0.02})
        FittedOutcome(fitted=5, left=10, final=0.02)
    """

    fitted: int | None
    left: int | None
    final: NullIsInfinite

    @staticmethod
    def of(losses: Mapping[int, float]) -> FittedOutcome:
        """Summarize the losses of a run.

        Args:
            losses: Losses of all data by step, in rising order.
        """
        fitted = next((step for step, loss in losses.items() if loss < FIT_BELOW), None)
        after = {} if fitted is None else {step: loss for step, loss in losses.items() if step > fitted}
        left = next((step for step, loss in after.items() if not loss <= LEFT_ABOVE), None)
        final = [*losses.values()][-1]
        return FittedOutcome(fitted, left, final if isfinite(final) else inf)

    def to_dict(self) -> dict[str, Any]:
        """The fields as data for JSON."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> FittedOutcome:
        """Read what ``to_dict`` returned.

        Args:
            data: The fields by name.
        """
        outcome: FittedOutcome = read_as(FittedOutcome, data, "outcome")
        return outcome


def train_fitted(run: FittedRun, device: str) -> FittedOutcome:
    """Train with the class's own learning rate, and measure the loss of all data now and then.

    Args:
        run: The run.
        device: "cpu" or "cuda".

    Returns:
        When the data were fitted, and whether the fit was left.

    Example:
        >>> train_fitted(FittedRun("toy", "foof", "defaults", seed=0, steps=5), "cpu").fitted is None
        True
    """
    problem = FITTED_PROBLEMS[run.problem]
    losses: dict[int, float] = {}
    with own_random_numbers(torch.device(device)), product_precision("float32"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = problem.data(run.seed).to(device)
        torch.manual_seed(run.seed)
        model = problem.network().to(device)
        optimizer = make_optimizer(spec_of(run.method), model, settings_arguments(run.settings), {})
        for number, (inputs, targets) in enumerate(islice(batches(data, problem.batch, run.seed), run.steps), start=1):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number % MEASURED_EVERY == 0 or number == run.steps:
                with torch.no_grad():
                    losses[number] = float(loss_of(model, data.inputs, data.targets))
                if not isfinite(losses[number]):
                    break
    return FittedOutcome.of(losses)


def _toy(seed: int) -> Split:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
    return Split(inputs, inputs[:, :3].argmax(1))


def _spirals(seed: int) -> Split:
    """Two spirals of 256 points each, one and a half turns, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    radius = torch.rand(512, generator=generator).sqrt()
    targets = torch.arange(512) % 2
    angle = 3 * pi * radius + pi * targets
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    noise: Tensor = 0.02 * torch.randn(512, 2, generator=generator)
    return Split(2 * (points + noise), targets)


def _digits(seed: int) -> Split:
    dataset = load("digits")
    return Split(dataset.prepare(dataset.train.inputs), dataset.train.targets)


_FITTED = (
    FittedProblem(
        "toy", "argmax of 3 of 8 normal inputs, MLP 8-64-64-3, all 256 samples", _toy, lambda: mlp(64, 8, 3), 256
    ),
    FittedProblem("spirals", "two spirals, MLP 2-64-64-2, batch 64", _spirals, lambda: mlp(64, 2, 2), 64),
    FittedProblem("digits", "digits, MLP 64-256-256-10, batch 128", _digits, lambda: mlp(256), 128),
)
FITTED_PROBLEMS = {problem.name: problem for problem in _FITTED}
