"""Other libraries' optimizers, one function each. They are imported when they are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from mukron.bench.agreement import kfac, shampoo
from mukron.bench.methods import Method, Trainer

EVERY = 10  # steps between two eigenbases of those that do not make them anew each step
LARGEST = 8192  # sides up to this size are preconditioned, as in mukron.Shampoo
CONSTANT = 0.1  # curvlinops' damping here: the same number for A and B of all layers
MATRIX_EPS = 1e-6  # pytorch_optimizer's own


def _imported(module: str) -> Any:
    with warnings.catch_warnings():  # of their own imports
        warnings.simplefilter("ignore")
        return import_module(module)


class CurvlinopsTrainer(Trainer):
    """Factors and inverses of the batch, then W <- W - lr (B + rho)^-1 G (A + rho)^-1."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        curvlinops = _imported("curvlinops")
        self.optimizer.zero_grad()
        with record_function("forward"):
            loss = F.cross_entropy(self.model(x), y)
        with record_function("backward"):
            torch.autograd.backward(loss)
        with record_function("step"):
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            factors = curvlinops.KFACLinearOperator(
                *(self.model, nn.CrossEntropyLoss(), parameters, [(x, y)]),
                **{"fisher_type": "empirical", "check_deterministic": False},
            )
            inverse = curvlinops.KFACInverseLinearOperator(factors, damping=CONSTANT)
            moves = inverse @ [p.grad for p in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.grad = move.detach()
            self.optimizer.step()
        return loss.detach()


def _curvlinops(model: nn.Module, lr: float) -> Trainer:
    _imported("curvlinops")
    return CurvlinopsTrainer(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9))


def _singd(model: nn.Module, lr: float) -> Trainer:
    made = _imported("singd.optim.optimizer").SINGD(model, lr=lr, T=1)
    return Trainer(model, made)


def _pytorch_optimizer(name: str, options: dict[str, Any], model: nn.Module, lr: float) -> Trainer:
    made = getattr(_imported("pytorch_optimizer"), name)(model.parameters(), lr=lr, **options)
    return Trainer(model, made)


def _heavyball(name: str, options: dict[str, Any], model: nn.Module, lr: float) -> Trainer:
    heavyball = _imported("heavyball")
    if not next(model.parameters()).is_cuda:
        heavyball.utils.compile_mode = None  # compiling for a CPU takes longer than all else here
    made = getattr(heavyball, name)(model.parameters(), lr=lr, **options)
    return Trainer(model, made)


Make = Callable[[nn.Module, float], Trainer]


def _theirs(name: str, options: dict[str, Any]) -> Make:
    return partial(_pytorch_optimizer, name, options)


_SCALABLE = {"start_preconditioning_step": 1, "preconditioning_compute_steps": EVERY}
_SOAP = {"precondition_frequency": EVERY, "max_precondition_dim": LARGEST}
_HEAVY = {"precondition_frequency": EVERY, "max_precond_dim": LARGEST, "use_precond_schedule": False}

KFAC_PEERS = (
    Method(
        "curvlinops K-FAC (empirical)",
        _curvlinops,
        truth=kfac("empirical", rho=lambda M: CONSTANT),
        note=f"damping {CONSTANT:g} on every factor",
        package="curvlinops-for-pytorch",
    ),
    Method("SINGD (dense)", _singd, note="an inverse-free iteration from the identity: no truth", package="singd"),
)
SHAMPOO_PEERS = (
    Method(
        "pytorch_optimizer Shampoo",
        _theirs("Shampoo", {"matrix_eps": MATRIX_EPS}),
        truth=shampoo(lambda s: MATRIX_EPS),
        package="pytorch_optimizer",
    ),
    Method(
        f"pytorch_optimizer ScalableShampoo, every {EVERY}",
        _theirs("ScalableShampoo", _SCALABLE),
        period=EVERY,
        note="blocks of 512, grafted: no truth",
        package="pytorch_optimizer",
    ),
    Method(
        f"pytorch_optimizer SOAP, every {EVERY}",
        _theirs("SOAP", _SOAP),
        period=EVERY,
        note="Adam in Shampoo's eigenbasis; its first step only sets that: no truth",
        package="pytorch_optimizer",
    ),
    Method(
        f"heavyball SOAP, every {EVERY}",
        partial(_heavyball, "SOAP", _HEAVY),
        period=EVERY,
        note="Adam in Shampoo's eigenbasis; compiled on a GPU alone: no truth",
        package="heavyball",
    ),
)


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def choose(peers: Sequence[Method], against: str) -> tuple[tuple[Method, ...], tuple[str, ...]]:
    """The peers to run, and the packages that are missing. against: "all" that are installed, "none", or packages."""
    packages = list(dict.fromkeys(peer.package for peer in peers if peer.package is not None))
    if against == "none":
        return (), ()
    missing = tuple(package for package in packages if installed(package) is None)
    if against == "all":
        return tuple(peer for peer in peers if peer.package not in missing), missing
    wanted = [name.strip() for name in against.split(",")]
    for name in wanted:
        if name not in packages:
            known = f"this benchmark knows {', '.join(packages)}" if packages else "this benchmark has no peers"
            raise ValueError(f"unknown peer {name!r}; {known}; or all, or none")
        if name in missing:
            raise ValueError(f"peer {name!r} is not installed: pip install 'mukron[peers]'")
    return tuple(peer for peer in peers if peer.package in wanted), ()
