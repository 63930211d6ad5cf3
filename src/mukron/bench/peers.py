"""Other libraries' optimizers, one function each. A library is imported when its optimizer is built."""

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

from mukron.bench.agreement import kfac_update, shampoo_update
from mukron.bench.methods import REFRESH_EVERY, BenchMethod, Trainer

MAX_PRECONDITIONED_SIZE = 8192  # sides up to this size are preconditioned, as in mukron.Shampoo
CURVLINOPS_DAMPING = 0.1  # the same number for A and B of all layers
MATRIX_EPS = 1e-6  # the default of pytorch_optimizer's Shampoo


def _imported(module: str) -> Any:
    with warnings.catch_warnings():  # of the library's own imports
        warnings.simplefilter("ignore")
        return import_module(module)


class CurvlinopsTrainer(Trainer):
    """Trains with curvlinops: factors and inverses of the batch, then W <- W - lr (B + rho)^-1 G (A + rho)^-1."""

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
            inverse = curvlinops.KFACInverseLinearOperator(factors, damping=CURVLINOPS_DAMPING)
            updates = inverse @ [p.grad for p in parameters]
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.grad = update.detach()
            self.optimizer.step()
        return loss.detach()


def _curvlinops(model: nn.Module, lr: float) -> Trainer:
    _imported("curvlinops")
    return CurvlinopsTrainer(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9))


def _singd(model: nn.Module, lr: float) -> Trainer:
    return Trainer(model, _imported("singd.optim.optimizer").SINGD(model, lr=lr, T=1))


def _pytorch_optimizer(name: str, options: dict[str, Any], model: nn.Module, lr: float) -> Trainer:
    optimizer = getattr(_imported("pytorch_optimizer"), name)(model.parameters(), lr=lr, **options)
    return Trainer(model, optimizer)


def _heavyball(name: str, options: dict[str, Any], model: nn.Module, lr: float) -> Trainer:
    heavyball = _imported("heavyball")
    if not next(model.parameters()).is_cuda:
        heavyball.utils.compile_mode = None  # compiling for a CPU takes longer than the benchmark
    optimizer = getattr(heavyball, name)(model.parameters(), lr=lr, **options)
    return Trainer(model, optimizer)


MakeTrainer = Callable[[nn.Module, float], Trainer]


def _from_pytorch_optimizer(name: str, options: dict[str, Any]) -> MakeTrainer:
    return partial(_pytorch_optimizer, name, options)


_SCALABLE = {"start_preconditioning_step": 1, "preconditioning_compute_steps": REFRESH_EVERY}
_SOAP = {"precondition_frequency": REFRESH_EVERY, "max_precondition_dim": MAX_PRECONDITIONED_SIZE}
_HEAVY = {
    "precondition_frequency": REFRESH_EVERY,
    "max_precond_dim": MAX_PRECONDITIONED_SIZE,
    "use_precond_schedule": False,
}

KFAC_PEERS = (
    BenchMethod(
        "curvlinops K-FAC (empirical)",
        _curvlinops,
        reference_update=kfac_update("empirical", rho=lambda M: CURVLINOPS_DAMPING),
        note=f"damping {CURVLINOPS_DAMPING:g} on every factor",
        package="curvlinops-for-pytorch",
    ),
    BenchMethod("SINGD (dense)", _singd, note="an inverse-free iteration from the identity: no truth", package="singd"),
)
SHAMPOO_PEERS = (
    BenchMethod(
        "pytorch_optimizer Shampoo",
        _from_pytorch_optimizer("Shampoo", {"matrix_eps": MATRIX_EPS}),
        reference_update=shampoo_update(lambda s: MATRIX_EPS),
        package="pytorch_optimizer",
    ),
    BenchMethod(
        f"pytorch_optimizer ScalableShampoo, every {REFRESH_EVERY}",
        _from_pytorch_optimizer("ScalableShampoo", _SCALABLE),
        period=REFRESH_EVERY,
        note="blocks of 512, grafted: no truth",
        package="pytorch_optimizer",
    ),
    BenchMethod(
        f"pytorch_optimizer SOAP, every {REFRESH_EVERY}",
        _from_pytorch_optimizer("SOAP", _SOAP),
        period=REFRESH_EVERY,
        note="Adam in Shampoo's eigenbasis; its first step only sets that: no truth",
        package="pytorch_optimizer",
    ),
    BenchMethod(
        f"heavyball SOAP, every {REFRESH_EVERY}",
        partial(_heavyball, "SOAP", _HEAVY),
        period=REFRESH_EVERY,
        note="Adam in Shampoo's eigenbasis; compiled on a GPU alone: no truth",
        package="heavyball",
    ),
)


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package.

    Args:
        package: Its name on PyPI.

    Returns:
        The version, or None if the package is not installed.

    Example:
        >>> installed_version("no-such-package") is None
        True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def choose_peers(peers: Sequence[BenchMethod], against: str) -> tuple[tuple[BenchMethod, ...], tuple[str, ...]]:
    """Chooses the other libraries' optimizers to time.

    Args:
        peers: The candidates.
        against: "all" that are installed, "none", or names on PyPI separated by commas.

    Returns:
        The optimizers to time, and the names of the packages that are not installed.

    Raises:
        ValueError: If a named package is unknown to the benchmark or not installed.

    Example:
        >>> choose_peers(KFAC_PEERS, "none")
        ((), ())
    """
    packages = list(dict.fromkeys(peer.package for peer in peers if peer.package is not None))
    if against == "none":
        return (), ()
    missing = tuple(package for package in packages if installed_version(package) is None)
    if against == "all":
        return tuple(peer for peer in peers if peer.package not in missing), missing
    names = [name.strip() for name in against.split(",")]
    for name in names:
        if name not in packages:
            known = f"this benchmark knows {', '.join(packages)}" if packages else "this benchmark has no peers"
            raise ValueError(f"unknown peer {name!r}; {known}; or all, or none")
        if name in missing:
            raise ValueError(f"peer {name!r} is not installed: pip install 'mukron[peers]'")
    return tuple(peer for peer in peers if peer.package in names), ()
