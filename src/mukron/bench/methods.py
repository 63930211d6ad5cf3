"""What trains: this library's optimizers and torch's own, each with the truth of its first update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import record_function

from mukron.bench.agreement import Truth, adamw, foof, kfac, sgd
from mukron.optim import FOOF, KFAC

LR = 1e-3  # a real one, at which all of them stay finite


@dataclass
class Trainer:
    """One training step, as a user writes it."""

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
        """Times of steps that went wrong mean nothing."""
        if not bool(torch.stack(losses).isfinite().all()):
            raise RuntimeError("the loss is no longer finite; its time would mean nothing")
        if getattr(self.optimizer, "skipped", 0):
            raise RuntimeError("a step was skipped; its time would mean nothing")


@dataclass(frozen=True)
class Method:
    """A way to train.

    make: from a network and a learning rate, what makes a step.
    period: how many steps it takes until the work repeats.
    truth: its first update in float64; without one ``note`` says why.
    prime: brings it to where it is measured, from a trainer and its batches; None: that is the beginning.
    package: the peer's name on PyPI.
    """

    name: str
    make: Callable[[nn.Module, float], Trainer]
    period: int = 1
    truth: Truth | None = None
    note: str = ""
    prime: Callable[[Trainer, Iterator[tuple[Tensor, Tensor]]], None] | None = None
    package: str | None = None


def by(optimizer: Callable[[nn.Module, float], Optimizer]) -> Callable[[nn.Module, float], Trainer]:
    return lambda model, lr: Trainer(model, optimizer(model, lr))


SGD = Method("SGD", by(lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9)), truth=sgd)
ADAMW = Method("AdamW", by(lambda model, lr: torch.optim.AdamW(model.parameters(), lr)), truth=adamw)
KFAC_MC = Method("K-FAC (mc)", by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9)), truth=kfac("mc"))
KFAC_EMPIRICAL = Method(
    "K-FAC (empirical)",
    by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fisher="empirical")),
    truth=kfac("empirical"),
)
KFAC_MC_FUSED = Method(
    "K-FAC (mc), fused", by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fused=True)), truth=kfac("mc")
)
KFAC_EMPIRICAL_FUSED = Method(
    "K-FAC (empirical), fused",
    by(lambda model, lr: KFAC(model, lr=lr, momentum=0.9, fisher="empirical", fused=True)),
    truth=kfac("empirical"),
)
FOOF_ = Method("FOOF", by(lambda model, lr: FOOF(model, lr=lr, momentum=0.9)), truth=foof)
