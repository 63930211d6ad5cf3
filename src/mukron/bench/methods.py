"""The optimizers that are timed, this library's and torch's, each with its first update in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import record_function

from mukron.bench.agreement import ReferenceUpdate, adamw_update, foof_update, kfac_update, sgd_update
from mukron.optim import FOOF, KFAC

TIMING_LR = 1e-3  # a usual learning rate, at which the loss of every method stays finite
REFRESH_EVERY = 10  # steps between refreshes, for methods that do not refresh at every step
STEP_SETTINGS = (
    "methods of this library: the plain step without a bound (trust=None) with momentum 0.9, except where a name says "
    "defaults or bounded; 'defaults' is an optimizer that is given the model alone"
)
AT_OWN_RATE = "its learning rate is its default"


@dataclass
class Trainer:
    """Makes training steps as a user's training loop does.

    Attributes:
        model: The network.
        optimizer: What updates it.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> trainer.check([torch.tensor(float("nan"))])
        Traceback (most recent call last):
            ...
        RuntimeError: the loss is no longer finite; its time would mean nothing
    """

    model: nn.Module
    optimizer: Optimizer

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with record_function("forward"):
            loss = F.cross_entropy(self.model(x), y)
        with record_function("backward"):
            torch.autograd.backward(loss)
        with record_function("step"):
            self.optimizer.step()
        return loss.detach()

    def check(self, losses: list[Tensor]) -> None:
        """Checks that the timed steps did what they should: failed steps are faster.

        Args:
            losses: The losses of the steps.

        Raises:
            RuntimeError: If a loss is not finite or the optimizer skipped a step.
        """
        if not bool(torch.stack(losses).isfinite().all()):
            raise RuntimeError("the loss is no longer finite; its time would mean nothing")
        if getattr(self.optimizer, "skipped", 0):
            raise RuntimeError("a step was skipped; its time would mean nothing")


@dataclass(frozen=True)
class BenchMethod:
    """An optimizer with its options, as a benchmark times it.

    Attributes:
        name: Its name in tables and figures.
        make: From a network and a learning rate to a trainer.
        period: The number of steps after which the work repeats.
        reference_update: Its first update in float64; if None, ``note`` says why.
        note: A remark below the table.
        warm_start: Brings a trainer, with its batches, to the state that is timed; None times it from the start.
        package: For another library's optimizer, the library's name on PyPI.

    Example:
        >>> BenchMethod("Adam", trained_by(lambda model, lr: torch.optim.Adam(model.parameters(), lr))).period
        1
    """

    name: str
    make: Callable[[nn.Module, float], Trainer]
    period: int = 1
    reference_update: ReferenceUpdate | None = None
    note: str = ""
    warm_start: Callable[[Trainer, Iterator[tuple[Tensor, Tensor]]], None] | None = None
    package: str | None = None


def trained_by(optimizer: Callable[[nn.Module, float], Optimizer]) -> Callable[[nn.Module, float], Trainer]:
    """Turns a function that builds an optimizer into one that builds a trainer.

    Args:
        optimizer: From a network and a learning rate to an optimizer.

    Returns:
        From a network and a learning rate to a trainer.

    Example:
        >>> make = trained_by(lambda model, lr: torch.optim.SGD(model.parameters(), lr))
        >>> make(nn.Linear(3, 2), 0.1).optimizer.param_groups[0]["lr"]
        0.1
    """
    return lambda model, lr: Trainer(model, optimizer(model, lr))


TORCH_SGD = BenchMethod(
    "SGD",
    trained_by(lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9)),
    reference_update=sgd_update,
)
TORCH_ADAMW = BenchMethod(
    "AdamW", trained_by(lambda model, lr: torch.optim.AdamW(model.parameters(), lr)), reference_update=adamw_update
)
KFAC_MC = BenchMethod(
    "K-FAC (mc)",
    trained_by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, trust=None)),
    reference_update=kfac_update("mc"),
)
KFAC_EMPIRICAL = BenchMethod(
    "K-FAC (empirical)",
    trained_by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fisher="empirical", trust=None)),
    reference_update=kfac_update("empirical"),
)
KFAC_MC_FUSED = BenchMethod(
    "K-FAC (mc), fused",
    trained_by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fused=True, trust=None)),
    reference_update=kfac_update("mc"),
)
KFAC_EMPIRICAL_FUSED = BenchMethod(
    "K-FAC (empirical), fused",
    trained_by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fisher="empirical", fused=True, trust=None)),
    reference_update=kfac_update("empirical"),
)
KFAC_DEFAULTS = BenchMethod(
    "K-FAC, defaults",
    trained_by(lambda model, lr: KFAC(model)),
    period=REFRESH_EVERY,
    note="mean over 10 steps after the first ten, one of which refreshes; factors are averaged, momentum is on the "
    f"gradient, {AT_OWN_RATE}",
)
KFAC_BOUNDED = BenchMethod(
    "K-FAC, bounded",
    trained_by(lambda model, lr: KFAC(model, memory="batch", momentum=0.0, inverse_every=1)),
    note=f"memory='batch', momentum=0, inverse_every=1: the bounded step at its lowest price, {AT_OWN_RATE}",
)
FOOF_METHOD = BenchMethod(
    "FOOF", trained_by(lambda model, lr: FOOF(model, lr=lr, momentum=0.9, trust=None)), reference_update=foof_update
)
