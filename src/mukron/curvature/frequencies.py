"""The factor A of an embedding, whose inputs are indices: a diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.linalg import DiagonalFactor, Factor


class Frequencies:
    """diag(how often each index came), divided by a count: the factor A of an embedding."""

    def __init__(self, indices: Tensor, weights: Tensor | None, d: int, count: int, dtype: torch.dtype) -> None:
        flat = None if weights is None else weights.flatten()
        self.sums = torch.bincount(indices.flatten(), flat, minlength=d).to(dtype).unsqueeze(0)
        self.count = count

    def merged(self, other: Frequencies) -> Frequencies:
        total = object.__new__(Frequencies)
        total.sums, total.count = self.sums + other.sums, self.count + other.count
        return total

    def factor(self, weight: float | Tensor = 1.0) -> Factor:
        return DiagonalFactor(self.sums * (weight / self.count))
