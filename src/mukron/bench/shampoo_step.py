"""The benchmark of Shampoo on an MLP with every solver, refreshed at every step and at every tenth step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor, nn

from mukron.bench.agreement import shampoo_update
from mukron.bench.methods import (
    AT_OWN_RATE,
    REFRESH_EVERY,
    TORCH_ADAMW,
    TORCH_SGD,
    BenchMethod,
    Trainer,
    trained_by,
)
from mukron.bench.peers import SHAMPOO_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp_task
from mukron.optim import Shampoo
from mukron.optim.shampoo import ROOT_SOLVERS

REFRESHES = 300  # before a tracked basis is timed: a training run has thousands
SHAMPOO_DAMPING = 1e-6  # relative to the largest eigenvalue: the default of mukron.Shampoo


def _shampoo(solver: str, every: int, fused: bool = False) -> BenchMethod:
    def make(model: nn.Module, lr: float) -> Shampoo:
        return Shampoo(
            model,
            lr=lr,
            momentum=0.9,
            damping=SHAMPOO_DAMPING,
            solver=solver,
            fused=fused,
            factor_every=every,
            inverse_every=every,
            trust=None,
        )

    name = f"Shampoo ({solver})" + (", fused" if fused else "") + (f", every {every}" if every > 1 else "")
    tracked = solver == "tracked"
    note = (
        f"after {REFRESHES} refreshes; in the first tens most renew their bases, at the price of eigh"
        if tracked
        else ""
    )
    reference_update = shampoo_update(lambda s: SHAMPOO_DAMPING * s[0].square())
    return BenchMethod(
        name,
        trained_by(make),
        period=every,
        reference_update=reference_update,
        note=note,
        warm_start=_refresh_many_times if tracked else None,
    )


def _refresh_many_times(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Brings a tracked basis to the state after many refreshes: every step updates the factors, no weight changes."""
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Shampoo)
    options, (group,) = optimizer.options, optimizer.param_groups
    optimizer.options, lr = replace(options, factor_every=1, inverse_every=REFRESHES // 5), group["lr"]
    group["lr"] = 0.0
    for x, y in islice(batches, REFRESHES):
        trainer(x, y)
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)
    optimizer.options, group["lr"] = options, lr


UNFUSED = tuple(_shampoo(solver, every) for solver in ROOT_SOLVERS for every in (1, REFRESH_EVERY))
SHAMPOO_DEFAULTS = BenchMethod(
    "Shampoo, defaults",
    trained_by(lambda model, lr: Shampoo(model)),
    period=REFRESH_EVERY,
    note="mean over 10 steps after the first ten, one of which refreshes; factors are averaged and decomposed by eigh, "
    f"momentum is on the gradient, {AT_OWN_RATE}",
)
TRACKED_FUSED = tuple(_shampoo("tracked", every, fused=True) for every in (1, REFRESH_EVERY))
SHAMPOO_METHODS = (*UNFUSED, *TRACKED_FUSED, SHAMPOO_DEFAULTS)
SHAMPOO_STEP = Bench("shampoo-step", mlp_task(), (TORCH_SGD, TORCH_ADAMW, *SHAMPOO_METHODS), SHAMPOO_PEERS)
