"""Shampoo by every solver it knows, refreshed at every step and at every tenth."""

from __future__ import annotations

from torch import nn

from mukron.bench.agreement import shampoo
from mukron.bench.methods import ADAMW, SGD, Method, by
from mukron.bench.peers import EVERY, SHAMPOO_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp
from mukron.optim import Shampoo
from mukron.optim.shampoo import SOLVERS

STEPS = 30  # before a kept basis is worth measuring
DAMPING = 1e-6  # of the largest eigenvalue: Shampoo's own


def _shampoo(solver: str, every: int) -> Method:
    def make(model: nn.Module, lr: float) -> Shampoo:
        options = {"damping": DAMPING, "solver": solver, "factor_every": every, "inverse_every": every}
        return Shampoo(model, lr=lr, momentum=0.9, **options)  # type: ignore[arg-type]

    name = f"Shampoo ({solver})" + (f", every {every}" if every > 1 else "")
    kept = solver == "tracked"
    note = f"measured from step {STEPS} on; the first ones renew their bases, at the price of eigh" if kept else ""
    warm_up = STEPS // every if kept else 2
    truth = shampoo(lambda s: DAMPING * s[0].square())
    return Method(name, by(make), period=every, truth=truth, note=note, warm_up=warm_up)


OURS = tuple(_shampoo(solver, every) for solver in SOLVERS for every in (1, EVERY))
SHAMPOO_STEP = Bench("shampoo-step", mlp(), (SGD, ADAMW, *OURS), SHAMPOO_PEERS)
