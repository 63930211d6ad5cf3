"""A damped Cholesky factorization that does not give up at the first failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class FactorizationError(RuntimeError):
    """No rung of the ladder gave a factorization: the matrix is not finite, or far from positive semi-definite."""


@dataclass(frozen=True)
class Factorization:
    """The lower factor L of M + rho I, the damping it took, and the rung of the ladder it took ("" is the first)."""

    lower: Tensor
    rho: Tensor
    rung: str = ""


# In order: what is tried when the plain factorization fails. Each entry: name, damping times, dtype, device.
LADDER: tuple[tuple[str, float, torch.dtype | None, str | None], ...] = (
    ("", 1.0, None, None),
    ("10 x damping", 10.0, None, None),
    ("100 x damping", 100.0, None, None),
    ("float64", 1.0, torch.float64, None),
    ("float64 on the CPU", 1.0, torch.float64, "cpu"),
    ("float64 on the CPU, 10 x damping", 10.0, torch.float64, "cpu"),
)


def factorize(M: Tensor, rho: Tensor) -> Factorization:
    """Cholesky of M + rho I for positive semi-definite M [..., d, d] and damping rho [...]; climbs ``LADDER``."""
    for rung, times, dtype, device in LADDER:
        lower, good = attempt(M.to(dtype=dtype or M.dtype, device=device or M.device), times * rho)
        if bool(good.all()):
            return Factorization(lower.to(M), times * rho, rung)
    raise FactorizationError(f"a {list(M.shape)} matrix could not be factorized at damping {rho.tolist()}")


def attempt(M: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """The plain factorization alone: the lower factor of M + rho I, and of every group whether it is one."""
    lower, info = torch.linalg.cholesky_ex(add_to_diagonal(M, rho))
    # a row with a number that is not finite has such a number on the diagonal, or made the factorization fail
    return lower, (info == 0) & lower.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def add_to_diagonal(M: Tensor, rho: Tensor) -> Tensor:
    """M + rho I as a new tensor: damping never adds up on a running statistic."""
    damped = M.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(rho.to(damped).unsqueeze(-1))
    return damped


def inverse(factorization: Factorization) -> Tensor:
    """(M + rho I)^-1 as a matrix."""
    cholesky_inverse: Callable[[Tensor], Tensor] = torch.cholesky_inverse
    return cholesky_inverse(factorization.lower)


def attempt_inverse(M: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """(M + rho I)^-1 by the plain factorization, and of every group whether it is that. Nothing waits for a GPU."""
    lower, good = attempt(M, rho)
    lower.diagonal(dim1=-2, dim2=-1).masked_fill_(~good.unsqueeze(-1), 1.0)  # a zero there would be an error
    if not M.is_cuda:
        return inverse(Factorization(lower, rho)), good
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    root = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return root.mT @ root, good
