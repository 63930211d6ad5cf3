"""Shampoo by every solver it knows, refreshed at every step and at every tenth."""

from __future__ import annotations

from torch import nn

from mukron.bench.agreement import shampoo
from mukron.bench.methods import ADAMW, SGD, Method, by
from mukron.bench.peers import EVERY, SHAMPOO_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp
from mukron.linalg import SOLVERS
from mukron.optim import Shampoo

DAMPING = 1e-6  # of the largest eigenvalue: Shampoo's own


def _known(solver: str) -> bool:
    try:
        Shampoo(nn.Linear(1, 1), solver=solver)
    except ValueError:  # one of the inverse alone
        return False
    return True


def _shampoo(solver: str, every: int) -> Method:
    def make(model: nn.Module, lr: float) -> Shampoo:
        options = {"damping": DAMPING, "solver": solver, "factor_every": every, "inverse_every": every}
        return Shampoo(model, lr=lr, momentum=0.9, **options)  # type: ignore[arg-type]

    name = f"Shampoo ({solver})" + (f", every {every}" if every > 1 else "")
    return Method(name, by(make), period=every, truth=shampoo(lambda s: DAMPING * s[0].square()))


OURS = tuple(_shampoo(solver, every) for solver in SOLVERS if _known(solver) for every in (1, EVERY))
SHAMPOO_STEP = Bench("shampoo-step", mlp(), (SGD, ADAMW, *OURS), SHAMPOO_PEERS)
