"""How precise float32 products on a GPU are.

Torch's convolutions use TF32 unless told otherwise, its matrix products do not. What is made of a layer's gradient need
not be more precise than the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

import torch

from mukron.curvature.layers.base import Layout
from mukron.linalg import matmul_precision

T = TypeVar("T")


def as_precise(layers: Iterable[tuple[Layout, T]]) -> Iterator[T]:
    """What stands beside each layer, in order; while it is out, products are as precise as the layer's own."""
    for tf32, some in groupby(layers, key=lambda pair: pair[0].tf32):
        with _products(tf32):
            yield from (each for _, each in some)


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    before = matmul_precision() if tf32 else None
    if before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
