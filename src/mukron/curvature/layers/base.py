"""How a layer type's tensors come into the one layout that everything else knows.

    inputs   H      [groups, samples, positions, d_in]    what the layer's weight multiplies
    signals  delta  [groups, samples, positions, d_out]   derivatives by the layer's output u = W h
    matrix   G      [groups, d_out, d_in]                 the weight, or its gradient

Positions are what shares one weight within a sample: a sequence's tokens, an image's pixels. Groups are those of a
grouped convolution, each with factors of its own; everything else has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce, singledispatch
from operator import iadd
from typing import ClassVar

import torch
from torch import Tensor, nn


class Layout:
    """One layer of a model, as matrices."""

    d_in: int
    d_out: int
    groups: int = 1
    one_hot: ClassVar[bool] = (
        False  # inputs are indices: A is diagonal, and ``inputs`` gives [groups, samples, positions]
    )

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def tf32(self) -> bool:
        """Whether the layer's own float32 products on a GPU are in TF32 though torch's matrix products are not."""
        return False

    def inputs(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def signals(self, delta: Tensor) -> Tensor:
        raise NotImplementedError

    def portions(self, x: Tensor) -> Sequence[Tensor]:
        """A layer's input in parts, samples first, of which ``inputs`` does not make too much at a time."""
        return [x]

    def gram(self, x: Tensor) -> Tensor:
        """The sum of h h^T over all rows, [groups, d_in, d_in]."""
        return reduce(iadd, (H.mT @ H for H in self._rows(x)))

    def along(self, x: Tensor, v: Tensor) -> Tensor:
        """H v for every row, [groups, rows, 1]."""
        return torch.cat([H @ v for H in self._rows(x)], dim=1)

    def _rows(self, x: Tensor) -> Iterator[Tensor]:
        return (self.inputs(part).flatten(1, 2) for part in self.portions(x))

    def row_count(self, x: Tensor) -> int | None:
        """Samples times positions, from the layer's input alone; None: not known."""
        return None

    def matrix(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def weight(self, matrix: Tensor) -> Tensor:
        """The inverse of ``matrix``."""
        raise NotImplementedError


@singledispatch
def layout(module: nn.Module) -> Layout | None:
    """The layout of a layer of a known type with a weight; None for everything else."""
    return None
