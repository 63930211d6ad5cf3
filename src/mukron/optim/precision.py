"""Which layers are preconditioned in float64: damping so small that float32 loses too many digits."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mukron.curvature import Joint, LayerStatistics, perturbed
from mukron.layers import WEIGHT
from mukron.optim.direction import block_gradient, dense, whole_gradient
from mukron.optim.table import LayerEntry

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.transaction import Transaction

TOO_COARSE = 0.005  # of a step that float32 puts off by that part
EPS = torch.finfo(torch.float32).eps
ILL_CONDITIONED = 0.005  # rounding times condition number, from which on a layer is preconditioned in float64
ILL_CONDITIONED_DENSE = 0.001  # the same for a gradient that is not D^T H, whose own rounding counts too
ILL_CONDITIONED_WINDOW = 0.0001  # the same for rows of several batches, of which the gradient's are only some
ILL_CONDITIONED_PRODUCT = 5.0  # the same, of both sides' condition numbers, for such a gradient


def ill_conditioned(optimizer: SecondOrder, layer: LayerEntry) -> bool:
    """Whether the damping rule alone says that a layer's first step needs float64."""
    if layer.anchor.dtype == torch.float64:
        return False
    rule, growth = optimizer.rule_of(layer, WEIGHT), layer.sides[WEIGHT].growth
    sizes = {"B": layer.layer.d_out} if layer.layer.one_hot else {"A": layer.layer.d_in, "B": layer.layer.d_out}
    names = [statistic.name for statistic, _ in optimizer.method.factors if statistic.name in sizes]
    bounds = [rule.condition(sizes[name], growth.get(name, 1.0)) for name in names]
    return EPS * max([bound for bound in bounds if bound is not None], default=0.0) > ILL_CONDITIONED


def check_precision(optimizer: SecondOrder, step: Transaction) -> None:
    """Once a layer, where damping is so small that float64 is used: whether what float32 gave is too coarse for it.

    Rows and gradients that are off by a few roundings must not move the step by more than ``TOO_COARSE``.
    """
    size = 4 * torch.finfo(torch.float32).eps
    for layer in step.ready:
        statistics = step.statistics.get(layer.name)
        if layer.name not in step.double - optimizer.told or statistics is None:
            continue
        optimizer.told.add(layer.name)
        U, again = (
            _directions(step, layer, statistics, 0.0),
            _directions(step, layer, perturbed(statistics, size), size),
        )
        off = max(float((V - W).norm() / W.norm().clamp_min(1e-30)) for V, W in zip(again, U, strict=True))
        if not off < TOO_COARSE:
            warnings.warn(
                f'layer "{layer.name}": its damping is so small beside its factors that float32 inputs and derivatives '
                f"put the step off by {_part(off)}; raise the damping, or train in float64",
                RuntimeWarning,
                stacklevel=5,
            )


def _part(off: float) -> str:
    """How far a step is off, relative to its size, in words; beyond its own size the number says nothing more."""
    return f"about {off:.0%}" if off < 1 else "more than its own size"


def _directions(step: Transaction, layer: LayerEntry, statistics: LayerStatistics, size: float) -> list[Tensor]:
    """A layer's directions by block with other statistics, and gradients with relative errors of that size."""
    other = type(step)(step.optimizer, Joint({layer.name: statistics}, step.passes, step.along))
    other.active, other.double, other.altered, other.rescue = [layer], set(step.double), set(step.altered), True
    other.measure()
    other.prepare()
    moves = []
    for block, entry in layer.blocks.items():
        raw = whole_gradient(other, layer, block, entry)
        if raw is not None:
            G = block_gradient(other, layer, block, entry, raw)
            if isinstance(G, Tensor) and size:
                G = G + size * G * torch.randn(G.shape, generator=torch.Generator().manual_seed(0)).to(G)
            moves.append(dense(step.optimizer.precondition(layer, block, G, other)))
    return moves
