"""Positions that the loss ignores, such as padding: they count in no factor.

    weights  [samples, positions of the output], 1 where the loss depends on the output, else 0

A layer with as many positions as the output has those weights. Any other layer has one weight a sample: 1 unless the
loss ignores all of it. Sums are over rows with weight 1, and are divided by the number of samples or rows that count,
in all passes of a step on all ranks together: it does not matter which part of a batch has the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ignored:
    """Which positions of a batch count."""

    def __init__(self, errors: Tensor, class_dim: int) -> None:
        """errors: the derivative of the loss by the model's output, zero for all classes where it is ignored."""
        used = errors.movedim(class_dim, -1).ne(0).any(-1)
        self.weights = used.reshape(len(errors), -1).to(torch.float32)
        self.samples, self.shape, self.class_dim = len(errors), errors.shape, class_dim
        self.used_samples = self.weights.amax(1).sum(dtype=torch.float64)

    def of_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        """Weights for rows [samples, positions] of a layer; None: they are not sorted by samples."""
        if shape[0] != self.samples:
            return None
        return self.weights if shape[1] == self.weights.shape[1] else self.weights.amax(1, keepdim=True)

    def of_inputs(self, H: Tensor) -> Tensor:
        """Rows [groups, samples, positions, d] that count, and zeros."""
        weights = self.of_rows(H.shape[1:3])
        return H if weights is None else H * weights.to(H.dtype)[None, :, :, None]

    def samples_of(self, shape: tuple[int, ...]) -> float | Tensor:
        """Samples that count, of a layer with rows [samples, positions] of that shape."""
        return self.used_samples if shape[0] == self.samples else float(self.samples)

    def means(self, H: Tensor) -> Tensor:
        """[groups, samples, d]: the mean over the positions of each sample that count, for rows from ``of_inputs``."""
        weights = self.of_rows(H.shape[1:3])
        if weights is None or weights.shape[1] != H.shape[2]:
            return H.mean(2)
        return H.sum(2) / weights.sum(1).clamp_min(1.0).to(H.dtype)[None, :, None]

    def rows(self, count: float | Tensor, shape: tuple[int, ...], of_samples: bool) -> float | Tensor:
        """Rows that count, of ``count`` rows of that shape, or samples where they are of these."""
        if of_samples:
            return self.samples_of(shape)
        weights = self.of_rows(shape)
        return count if weights is None else weights.sum(dtype=torch.float64) * (count / weights.numel())

    def frequencies(self, indices: Tensor) -> Tensor | None:
        """A weight for every index [groups, samples, positions] of an embedding's input."""
        weights = self.of_rows(indices.shape[1:3])
        return None if weights is None else weights.expand(indices.shape)

    def of_outputs(self) -> Tensor:
        """Whether each number of the output [samples, outputs] counts."""
        ones = self.weights.new_ones(()).expand(self.shape)
        return self.signals(ones, self.class_dim).reshape(self.samples, -1) > 0

    def signals(self, v: Tensor, class_dim: int) -> Tensor:
        """Fisher targets v of the output's shape, zero where it is ignored."""
        shape = v.movedim(class_dim, -1).shape[:-1]
        return v * self.weights.to(v.dtype).reshape(shape).unsqueeze(-1).movedim(-1, class_dim)
