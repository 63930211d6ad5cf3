"""A damped Cholesky factorization that does not give up at the first failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

STREAMS = 8  # of a GPU, for matrices inverted side by side


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
        damped = add_to_diagonal(M.to(dtype=dtype or M.dtype, device=device or M.device), times * rho)
        lower, info = torch.linalg.cholesky_ex(damped)
        if not bool(info.any()) and bool(torch.isfinite(lower).all()):
            return Factorization(lower.to(M), times * rho, rung)
    raise FactorizationError(f"a {list(M.shape)} matrix could not be factorized at damping {rho.tolist()}")


def add_to_diagonal(M: Tensor, rho: Tensor) -> Tensor:
    """M + rho I as a new tensor: damping never adds up on a running statistic."""
    damped = M.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(rho.to(damped).unsqueeze(-1))
    return damped


@dataclass(frozen=True)
class Inverse:
    """(M + rho I)^-1, the damping it took, and the rung of the ladder ("" is the first)."""

    matrix: Tensor
    rho: Tensor
    rung: str = ""


Damped = tuple[Tensor, Tensor]  # M [groups, d, d] and rho [groups]


def attempt(damped: Sequence[Damped]) -> tuple[list[Tensor], list[Tensor]]:
    """(M + rho I)^-1 of all of them at once, and for each a number that is finite if it came out well.

    Nothing is read from the device: whoever uses the inverses has to look at the numbers.
    """
    if not damped:
        return [], []
    inverses, failed = _side_by_side([add_to_diagonal(M, rho) for M, rho in damped])
    numbers = [
        torch.where(fail, torch.nan, matrix.diagonal(dim1=-2, dim2=-1).sum())
        for matrix, fail in zip(inverses, failed, strict=True)
    ]
    return inverses, numbers


def invert(damped: Sequence[Damped]) -> list[Inverse | FactorizationError]:
    """The same, looked at; what did not come out well climbs the ladder alone."""
    inverses, numbers = attempt(damped)
    good = [bool(number.isfinite()) for number in numbers]
    return [
        Inverse(matrix, rho) if fine else _rescued(M, rho)
        for fine, matrix, (M, rho) in zip(good, inverses, damped, strict=True)
    ]


def _rescued(M: Tensor, rho: Tensor) -> Inverse | FactorizationError:
    try:
        found = factorize(M, rho)
    except FactorizationError as error:
        return error
    return Inverse(_from_lower(found.lower), found.rho, found.rung)


def _side_by_side(matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Inverses of positive definite matrices, and which factorizations failed.

    One alone leaves most of a GPU idle: there each has a stream of its own.
    """
    # Results are made on the stream that will use them; what a side stream allocates stays its own.
    inverses = [torch.empty_like(matrix) for matrix in matrices]
    failed = [torch.zeros((), dtype=torch.bool, device=matrix.device) for matrix in matrices]
    jobs = list(zip(matrices, inverses, failed, strict=True))
    if not matrices[0].is_cuda:
        for job in jobs:
            _inverse(*job)
        return inverses, failed
    here, streams = torch.cuda.current_stream(), _streams(matrices[0].device)[: len(jobs)]
    for stream in streams:
        stream.wait_stream(here)
    for number, job in enumerate(jobs):
        with torch.cuda.stream(streams[number % len(streams)]):
            _inverse(*job)
    for stream in streams:
        here.wait_stream(stream)
    return inverses, failed


@lru_cache(maxsize=8)
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _inverse(matrix: Tensor, out: Tensor, failed: Tensor) -> None:
    lower, info = torch.linalg.cholesky_ex(matrix)
    torch.any(info, out=failed)
    _from_lower(lower, out)


def _from_lower(lower: Tensor, out: Tensor | None = None) -> Tensor:
    """L^-T L^-1. On a GPU a triangular solve and a product take half the time of torch's own ``cholesky_inverse``."""
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower, out=out)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    half = torch.linalg.solve_triangular(lower, identity, upper=False)
    return torch.matmul(half.mT, half, out=out)
