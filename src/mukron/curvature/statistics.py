"""What was measured of one layer, and how passes add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mukron.curvature.accumulate import Accumulator, FrequencyAccumulator


class Jacobian(NamedTuple):
    """Every output's derivative by a layer's weight: the sum over positions of signals inputs^T."""

    inputs: Tensor  # [groups, samples, positions, d_in]
    signals: Tensor  # [groups, samples, outputs, positions, d_out]
    errors: Tensor  # [samples, outputs], the derivative of the user's loss by the outputs


class Halves(NamedTuple):
    """A pass's gradient of a layer's weight as it arises: G = D^T H."""

    D: Tensor  # [groups, rows, d_out], the loss's derivatives by the layer's outputs
    H: Tensor  # [groups, rows, d_in], its inputs
    fused: bool  # nobody else forms this gradient: it is not in the weight's ``grad``


@dataclass
class Gathered:
    """One layer's statistics."""

    A: Accumulator | FrequencyAccumulator | None = None
    B: Accumulator | None = None
    samples: int = 0
    rows: int = 0  # samples x positions
    halves: list[Halves] = field(default_factory=list)  # of the weight's gradient, one a pass, while rows are few
    jacobians: list[Jacobian] = field(default_factory=list)

    @property
    def positions(self) -> float:
        """How often a sample uses the weight, on average."""
        return self.rows / self.samples if self.samples else 1.0

    def merge(self, other: Gathered) -> None:
        """Add another pass; that one stays as it is."""
        self.A, self.B = _merged(self.A, other.A), _merged(self.B, other.B)
        self.samples += other.samples
        self.rows += other.rows
        self.halves += other.halves
        self.jacobians += other.jacobians


def _merged(ours: Any, theirs: Any) -> Any:
    if theirs is None:
        return ours
    total = ours if ours is not None else theirs.empty()
    total.merge(theirs)
    return total


def unfolded(X: Tensor, samples: int) -> Tensor:
    """[groups, samples, positions, d], also where the model put positions first or folded them into the samples."""
    if X.shape[1] == samples:
        return X
    if X.shape[2] == samples:
        return X.transpose(1, 2)
    rows = X.shape[1] * X.shape[2]
    return X.reshape(X.shape[0], samples, rows // samples, X.shape[3]) if rows % samples == 0 else X


def precise(x: Tensor) -> Tensor:
    """Statistics are float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@lru_cache(maxsize=64)
def probe(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random vector [d, 1], the same each time."""
    generator = torch.Generator("cpu").manual_seed(d)
    return torch.randn(d, 1, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
