"""Which layers are preconditioned in float64: damping so small that float32 loses too many digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mukron.layers import WEIGHT
from mukron.optim.table import LayerEntry

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

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
    bounds = [rule.condition(sizes[name], growth.get(name, 1.0)) for name in optimizer.powers[WEIGHT] if name in sizes]
    return EPS * max([bound for bound in bounds if bound is not None], default=0.0) > ILL_CONDITIONED
