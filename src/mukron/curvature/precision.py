"""Statistics of a layer in another precision: in float64, and with the errors that float32 may have made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mukron.curvature.passes import Accumulator, LayerStatistics
from mukron.curvature.stacking import Halves, Jacobian


def double(statistics: LayerStatistics) -> LayerStatistics:
    """The same statistics in float64; rows that are shared stay shared."""
    return _mapped(statistics, Tensor.double)


def perturbed(statistics: LayerStatistics, size: float) -> LayerStatistics:
    """The same statistics with relative errors of that size, the same ones each time."""
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(X: Tensor) -> Tensor:
        generator = generators.setdefault(X.device, torch.Generator(X.device).manual_seed(0))
        return X + size * X * torch.randn(X.shape, generator=generator, dtype=X.dtype, device=X.device)

    return _mapped(statistics, perturb)


def _mapped(statistics: LayerStatistics, change: Callable[[Tensor], Tensor]) -> LayerStatistics:
    made: dict[int, Tensor] = {}

    def once(X: Tensor) -> Tensor:
        return made.setdefault(id(X), change(X))

    def accumulator(sums: Any) -> Any:
        if not isinstance(sums, Accumulator):
            return sums
        total = Accumulator(sums.d, sums.other, sums.form)
        total.rows, total.counts = [once(X) for X in sums.rows], sums.counts
        total.parts = [M.double() for M in sums.parts]  # their rows are gone
        return total

    changed = replace(
        statistics,
        A=accumulator(statistics.A),
        B=accumulator(statistics.B),
        halves=[Halves(once(half.D), once(half.H), half.fused) for half in statistics.halves],
        jacobians=[
            Jacobian(change(j.inputs), change(j.signals), change(j.errors), j.counts) for j in statistics.jacobians
        ],
    )
    changed.join()
    return changed
