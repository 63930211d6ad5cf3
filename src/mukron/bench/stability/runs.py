"""One run of the stability matrix: what is passed to the optimizer, and what is measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import inf, isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from mukron.bench.measure import product_precision
from mukron.bench.stability.problems import StabilityProblem, batches, loss_of
from mukron.data import Split
from mukron.memory import Memory
from mukron.optim import SecondOrder, Trust
from mukron.optim.spec import MethodSpec, spec_of
from mukron.train.randomness import own_random_numbers
from mukron.typed import NullIsInfinite, read_as

CLASS_DEFAULTS, PLAIN_STEP = "defaults", "plain"
# Arguments that methods were given later, with the value that means what they did before. Without it here benchmarks
# repeat the runs that are kept in docs.
ADDED = {"sides": "both", "communication": "auto"}  # the second moves data between ranks, and changes no step
HOPELESS = 1e6  # a run whose loss exceeds its initial loss so many times is stopped
LOOKS = 10  # steps from one look at the losses to the next: each look waits for the device


@dataclass(frozen=True)
class StabilityRun:
    """One run: all that distinguishes it from others.

    Attributes:
        problem: The problem's name.
        method: The method's name.
        settings: "defaults", "plain" (``trust=None``), or a trust as ``Trust.of`` reads it.
        memory: What factors remember, as text.
        momentum: The momentum, as a plain number.
        every: Steps from one refresh of the inverses to the next.
        power: The learning rate is 2 to this power.
        seed: The seed of the initial weights and of the batches.
        steps: The number of steps.

    Example:
        >>> run = StabilityRun("digits", "kfac", "plain", "ema:0.95", 0.9, every=10, power=-7, seed=0, steps=200)
        >>> arguments = run.arguments()
        >>> arguments["inverse_every"], arguments["factor_every"], arguments["lr"], arguments["trust"]
        (10, 1, 0.0078125, None)
    """

    problem: str
    method: str
    settings: str
    memory: str
    momentum: float
    every: int
    power: int
    seed: int
    steps: int

    def arguments(self) -> dict[str, Any]:
        """What is passed to the optimizer; all else is left to the class's own defaults.

        Factors are measured at every step where memory mixes batches. Otherwise only those of the step that refreshes
        the inverses would be used, and they are measured there alone.
        """
        memory = Memory.of(self.memory)
        return {
            "lr": 2.0**self.power,
            "memory": memory,
            "momentum": self.momentum,
            "inverse_every": self.every,
            "factor_every": 1 if memory.averages else self.every,
            **settings_arguments(self.settings),
        }


def settings_arguments(settings: str) -> dict[str, Any]:
    """Return the optimizer's arguments that settings stand for.

    Args:
        settings: "defaults", "plain", or a trust as ``Trust.of`` reads it.

    Returns:
        Arguments by name.

    Example:
        >>> settings_arguments("defaults"), settings_arguments("spectral:0.5")
        ({}, {'trust': Spectral(size=0.5, growth=2.0)})
    """
    if settings == CLASS_DEFAULTS:
        return {}
    return {"trust": None if settings == PLAIN_STEP else Trust.of(settings)}


def make_optimizer(
    spec: MethodSpec, model: nn.Module, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> SecondOrder:
    """Make an optimizer of a method's class.

    Args:
        spec: The method's record.
        model: The network.
        arguments: Arguments of the class.
        options: What a problem has to say of its network; only arguments that the class has are passed.

    Returns:
        The optimizer.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> type(make_optimizer(spec_of("foof"), model, {"lr": 0.1}, {"class_dim": -1})).__name__
        'FOOF'
    """
    known = {name: value for name, value in options.items() if name in spec.defaults}
    optimizer = spec.optimizer(model, **arguments, **known)  # type: ignore[arg-type]
    assert isinstance(optimizer, SecondOrder)
    return optimizer


def method_defaults(spec: MethodSpec, settings: str) -> dict[str, str]:
    """Return all that a method does with these settings where nothing else is passed.

    Args:
        spec: The method's record.
        settings: "defaults", "plain", or a trust as ``Trust.of`` reads it.

    Returns:
        Texts by name.

    Example:
        >>> method_defaults(spec_of("kfac"), "plain")["fisher"]
        'MonteCarlo(draws=1)'
    """
    meant = {name: value for name, value in spec.defaults.items() if value is not None}
    if not spec.layerwise:
        return {name: str(value) for name, value in meant.items()}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # some methods leave output layers to a fallback rule
    optimizer = make_optimizer(spec, model, settings_arguments(settings), {})
    (group,) = optimizer.param_groups
    meant |= {"step": optimizer.options} | {f"group {name}": value for name, value in group.items() if name != "params"}
    if optimizer.capture_options.signals:
        meant["fisher"] = optimizer.capture_options.fisher
    meant["trust"] = optimizer.options.trust
    return {name: str(value) for name, value in meant.items()}


def same_defaults(before: Mapping[str, str] | None, present: Mapping[str, str]) -> bool:
    """Return whether a method does what it did, as far as the problems here can show: none has tied weights.

    An argument that a method did not have then is passed over if its value means what was done without it.

    Args:
        before: What ``method_defaults`` returned then; None: it is not known.
        present: What it returns now.

    Example:
        >>> same_defaults({"step": "StepOptions(seed=0)"}, {"step": "StepOptions(leaves_tied=True, seed=0)"})
        True
        >>> same_defaults({"solver": "eigh"}, {"solver": "eigh", "sides": "both"})
        True
    """
    texts = [
        {name: text.replace("leaves_tied=True, ", "") for name, text in of.items() if ADDED.get(name) != text}
        for of in (before or {}, present)
    ]
    return texts[0] == texts[1]


@dataclass(frozen=True)
class StabilityOutcome:
    """What was measured in a run. A number that is not finite is infinite here and null in JSON.

    Attributes:
        initial: The loss of the first batch.
        largest: The largest loss of a batch.
        final: The mean loss of the last tenth of the batches; infinite if the run was stopped early.
        failed: The error that ended the run; empty if there was none.

    Example:
        >>> StabilityOutcome.of([2.0, 5.0, *[1.0] * 18], steps=20)
        StabilityOutcome(initial=2.0, largest=5.0, final=1.0, failed='')
        >>> StabilityOutcome.of([2.0, float("nan")], steps=20).largest
        inf
    """

    initial: NullIsInfinite
    largest: NullIsInfinite
    final: NullIsInfinite
    failed: str = ""

    @property
    def growth(self) -> float:
        """The largest loss over the initial loss."""
        return self.largest / self.initial if isfinite(self.initial) else inf

    @staticmethod
    def of(losses: Sequence[float], steps: int, failed: str = "") -> StabilityOutcome:
        """Summarize the losses of a run.

        Args:
            losses: The loss of every batch.
            steps: How many there were to be.
            failed: The error that ended the run.
        """
        known = [loss if isfinite(loss) else inf for loss in losses] or [inf]
        whole = len(known) == steps and not failed
        final = fmean(known[-max(1, steps // 10) :]) if whole else inf
        return StabilityOutcome(known[0], inf if failed else max(known), final, failed)

    def to_dict(self) -> dict[str, Any]:
        """The fields as data for JSON."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StabilityOutcome:
        """Read what ``to_dict`` returned.

        Args:
            data: The fields by name.
        """
        outcome: StabilityOutcome = read_as(StabilityOutcome, data, "outcome")
        return outcome


def finite_or_none(value: Any) -> Any:
    """Replace a number that JSON does not have."""
    return None if isinstance(value, float) and not isfinite(value) else value


def train_run(run: StabilityRun, problem: StabilityProblem, data: Split, device: str) -> StabilityOutcome:
    """Train, and measure the loss of every batch before its step.

    Args:
        run: The run.
        problem: Its problem.
        data: The problem's samples, on the device.
        device: "cpu" or "cuda".

    Returns:
        What was measured.

    Example:
        >>> from mukron.bench.stability.problems import STABILITY_PROBLEMS
        >>> problem = STABILITY_PROBLEMS["digits"].for_smoke()
        >>> run = StabilityRun("digits", "foof", "defaults", "batch", 0.0, every=1, power=-7, seed=0, steps=6)
        >>> train_run(run, problem, problem.load(None, "cpu", samples=64), "cpu").growth < 2
        True
    """
    losses: list[Tensor] = []
    failed = ""
    with own_random_numbers(torch.device(device)), product_precision("float32"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of skipped steps: their losses are in the table
        model = problem.build(run.seed, device)
        optimizer = make_optimizer(spec_of(run.method), model, run.arguments(), problem.options)
        try:
            for inputs, targets in islice(batches(data, problem.batch, run.seed), run.steps):
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) % LOOKS == 0 and _hopeless(losses):
                    break
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a factorization that failed, for one
            failed = str(error).partition("\n")[0]
    return StabilityOutcome.of(_numbers(losses), run.steps, failed)


def _numbers(losses: Iterable[Tensor]) -> list[float]:
    stacked = list(losses)
    numbers: list[float] = torch.stack(stacked).tolist() if stacked else []
    return numbers


def _hopeless(losses: Sequence[Tensor]) -> bool:
    initial, *recent = _numbers([losses[0], *losses[-LOOKS:]])
    return any(not isfinite(loss) or loss > HOPELESS * initial for loss in recent)
