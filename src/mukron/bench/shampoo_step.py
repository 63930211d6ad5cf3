"""Shampoo by every solver it knows, refreshed at every step and at every tenth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor, nn

from mukron.bench.agreement import shampoo
from mukron.bench.methods import ADAMW, SGD, Method, Trainer, by
from mukron.bench.peers import EVERY, SHAMPOO_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp
from mukron.optim import Shampoo
from mukron.optim.shampoo import SOLVERS

REFRESHES = 300  # before a kept basis is measured: a run has thousands
DAMPING = 1e-6  # of the largest eigenvalue: Shampoo's own


def _shampoo(solver: str, every: int, fused: bool = False) -> Method:
    def make(model: nn.Module, lr: float) -> Shampoo:
        return Shampoo(
            model,
            lr=lr,
            momentum=0.9,
            damping=DAMPING,
            solver=solver,
            fused=fused,
            factor_every=every,
            inverse_every=every,
        )

    name = f"Shampoo ({solver})" + (", fused" if fused else "") + (f", every {every}" if every > 1 else "")
    kept = solver == "tracked"
    note = (
        f"after {REFRESHES} refreshes; in the first tens most renew their bases, at the price of eigh" if kept else ""
    )
    truth = shampoo(lambda s: DAMPING * s[0].square())
    return Method(name, by(make), period=every, truth=truth, note=note, prime=_refreshed if kept else None)


def _refreshed(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """So many refreshes later: every step adds to the factors, few make roots of them, and no weight is moved."""
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Shampoo)
    settings, (group,) = optimizer.settings, optimizer.param_groups
    optimizer.settings, lr = replace(settings, factor_every=1, inverse_every=REFRESHES // 5), group["lr"]
    group["lr"] = 0.0
    for x, y in islice(batches, REFRESHES):
        trainer(x, y)
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)
    optimizer.settings, group["lr"] = settings, lr


PLAIN = tuple(_shampoo(solver, every) for solver in SOLVERS for every in (1, EVERY))
OURS = (*PLAIN, *(_shampoo("tracked", every, fused=True) for every in (1, EVERY)))
SHAMPOO_STEP = Bench("shampoo-step", mlp(), (SGD, ADAMW, *OURS), SHAMPOO_PEERS)
