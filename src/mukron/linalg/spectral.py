"""Singular values by products alone: the largest one by power iteration, and all of them brought near one.

Both take stacks of matrices [groups, d_out, d_in].
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mukron.linalg.factors import LowRank

DIRECTIONS = 3  # random directions beside the one of the last step: a new large direction is seen at once
ROUNDS, FIRST_ROUNDS = 3, 6
COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of Jordan and others 2024: steep at zero, within 0.7 to 1.2 after five rounds


def spectral_norm(U: Tensor | LowRank, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest singular value of U [groups, d_out, d_in] as [groups, 1, 1], and its right vector.

    The value is that of the best of several directions, so never too large. It is some percent too small where many
    singular values are nearly as large.

    Args:
        U: A matrix, or D^T H.
        start: The vector [groups, d_in] of the last step, nearly the same matrix; None: there is none.
    """
    reference = U if isinstance(U, Tensor) else U.H
    groups, d_in = reference.shape[0], reference.shape[-1]
    V = _directions(d_in, reference.dtype, reference.device).expand(groups, -1, -1)
    if start is not None:
        V = torch.cat([start.to(reference.dtype).unsqueeze(-1), V], dim=-1)
    size = V.new_zeros(groups, V.shape[-1])
    for _ in range(FIRST_ROUNDS if start is None else ROUNDS):
        Y = U @ V if isinstance(U, Tensor) else U.D.mT @ (U.H @ V)
        Y = Y / _length(Y)
        V = U.mT @ Y if isinstance(U, Tensor) else U.H.mT @ (U.D @ Y)
        length = _length(V)
        V, size = V / length, length.squeeze(-2)
    best = size.argmax(-1, keepdim=True)
    vector = V.gather(-1, best.unsqueeze(-2).expand(-1, d_in, 1)).squeeze(-1)
    return size.gather(-1, best).unsqueeze(-1), vector


def _length(X: Tensor) -> Tensor:
    """Of each column, never zero; in float64, since squares of a move that blew up overflow float32."""
    length: Tensor = torch.linalg.vector_norm(X, dim=-2, keepdim=True, dtype=torch.float64)
    return length.to(X.dtype).clamp_min(1e-30)


@lru_cache(maxsize=256)
def _directions(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(d)
    return torch.randn(d, DIRECTIONS, generator=generator, dtype=torch.float64).to(device, dtype)


def orthogonalized(G: Tensor, eps: float, rounds: int = 5, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    """G = U S V^T becomes nearly U V^T, by the Newton-Schulz iteration: matrix products alone.

        X <- G / |G|,   then rounds of   X <- a X + (b Y + c Y^2) X   with Y = X X^T

    Each round applies a s + b s^3 + c s^5 to every singular value s. After five they lie between 0.7 and 1.2, if they
    were above a thousandth of |G|.

    Args:
        G: Matrices [groups, d_out, d_in].
        eps: The least Frobenius norm to divide by.
        rounds: The number of rounds.
        dtype: The precision of the products; None: that of G.

    Returns:
        Matrices of the same shape and dtype.

    Example:
        >>> X = orthogonalized(torch.diag(torch.tensor([3.0, 2.0, 1.0])).unsqueeze(0), eps=1e-7, dtype=None)
        >>> [0.7 < value < 1.2 for value in torch.linalg.svdvals(X)[0].tolist()]
        [True, True, True]
    """
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=torch.float64)  # squares may overflow float32
    X = (G / norm.clamp_min(eps).to(G.dtype)).to(dtype or G.dtype)
    tall = G.shape[-2] > G.shape[-1]
    X = X.mT if tall else X  # Y is of the shorter side
    a, b, c = COEFFICIENTS
    for _ in range(rounds):
        Y = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(Y, Y, Y, beta=b, alpha=c), X, beta=a)
    result: Tensor = (X.mT if tall else X).to(G.dtype)
    return result
