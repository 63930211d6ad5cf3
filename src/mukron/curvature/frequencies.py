"""The factor A of an embedding, whose inputs are indices: a diagonal."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mukron.layers import MatrixLayer
from mukron.linalg import DiagonalFactor, Factor, total_count

if TYPE_CHECKING:
    from mukron.curvature.ignored import Ignored
    from mukron.curvature.passes import LayerStatistics


class Frequencies:
    """diag(how often each index came), divided by a count: the factor A of an embedding."""

    def __init__(
        self, indices: Tensor, weights: Tensor | None, d: int, count: float | Tensor, dtype: torch.dtype
    ) -> None:
        flat = None if weights is None else weights.flatten()
        self.parts = [torch.bincount(indices.flatten(), flat, minlength=d).to(dtype).unsqueeze(0)]  # by pass
        self.counts: tuple[float | Tensor, ...] = (count,)  # likewise

    @property
    def sums(self) -> Tensor:
        """Over all passes."""
        if len(self.parts) > 1:
            self.parts = [reduce(torch.add, self.parts)]
        return self.parts[0]

    def empty(self) -> Frequencies:
        """The same count, of sums that are kept elsewhere."""
        rest = object.__new__(Frequencies)
        rest.parts, rest.counts = [self.parts[0].new_zeros(())], self.counts
        return rest

    def merged(self, other: Frequencies) -> Frequencies:
        total = object.__new__(Frequencies)
        total.parts, total.counts = self.parts + other.parts, self.counts + other.counts
        return total

    def factor(self, weight: float | Tensor = 1.0) -> Factor:
        return DiagonalFactor(self.sums * (weight / total_count(self.counts)))


def add_indices(
    statistics: LayerStatistics,
    layer: MatrixLayer,
    indices: Tensor,
    samples: int,
    ignored: Ignored | None,
    sharing: str,
) -> None:
    """Make what is wanted of an embedding's inputs [groups, samples, positions]."""
    weights = None if ignored is None else ignored.frequencies(indices)
    statistics.samples, statistics.rows = samples, indices.numel()
    if ignored is not None:
        statistics.samples = ignored.samples_of(indices.shape[1:3])
        if sharing == "expand":
            statistics.rows = ignored.rows(indices.numel(), indices.shape[1:3], of_samples=False)
        else:  # of each sample all positions
            statistics.rows = statistics.samples * (indices.numel() / samples)
    statistics.A = Frequencies(indices, weights, layer.d_in, statistics.samples, dtype_of(layer))


def dtype_of(layer: MatrixLayer) -> torch.dtype:
    """Of the statistics of a layer whose inputs are indices: float32 at least."""
    return torch.promote_types(next(layer.module.parameters()).dtype, torch.float32)
