"""How precise float32 products on a GPU are.

Torch's convolutions use TF32 unless told otherwise, its matrix products do not. What is made of a layer's gradient need
not be more precise than the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

TF32_ROUNDING = 2.0**-10


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
