"""How precise float32 products on a GPU are, and what products with a few vectors show of a matrix.

Torch's convolutions use TF32 unless told otherwise, its matrix products do not. What is made of a layer's gradient need
not be more precise than the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mukron.linalg.factors import LowRank

TF32_ROUNDING = 2.0**-10
DIRECTIONS = 3  # random directions beside the one of the last step: a new large direction is seen at once
ROUNDS, FIRST_ROUNDS = 3, 6


def matmul_precision() -> str | None:
    """As torch reports it; None: it was set in one of torch's other ways, after which torch refuses to say."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def rounding(dtype: torch.dtype, device: torch.device, tf32: bool = False) -> float:
    """The relative rounding of matrix products of that dtype on that device, for a layer that uses TF32 or not."""
    if dtype == torch.float32 and device.type == "cuda" and (tf32 or matmul_precision() != "highest"):
        return TF32_ROUNDING
    return torch.finfo(dtype).eps


@lru_cache(maxsize=64)
def probe(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random vector [d, 1], the same each time: what two matrices do to it shows whether they are the same."""
    generator = torch.Generator("cpu").manual_seed(d)
    return torch.randn(d, 1, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)


def products_of(tf32: bool) -> AbstractContextManager[None]:
    """Inside, float32 products are as precise as those of a layer that uses TF32 or not."""
    return _in_tf32() if tf32 else nullcontext()


@contextmanager
def _in_tf32() -> Iterator[None]:
    before = matmul_precision()
    if before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
