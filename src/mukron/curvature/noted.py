"""Which gradients there were as a backward pass ended: if they are thrown away, so is what was measured with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from mukron.curvature.ranks import local


@dataclass(frozen=True)
class Noted:
    """A parameter's gradient as it was.

    Attributes:
        parameter: The parameter.
        gradient: Its gradient; the address of one that is gone may be another tensor's.
        version: The gradient's version.
        view: The gradient itself if it is a view, part of a larger buffer whose owner may copy it to another one, as
            DistributedDataParallel does with ``gradient_as_bucket_view``; else None, for it takes memory.
    """

    parameter: nn.Parameter
    gradient: TensorWeakRef
    version: int
    view: Tensor | None

    @property
    def left(self) -> Tensor | None:
        """The gradient if it is still the parameter's, whatever its values."""
        G = self.parameter.grad
        return G if G is not None and (G is self.gradient() or self.moved) else None

    @property
    def moved(self) -> bool:
        """Whether the parameter's gradient is a copy of this one."""
        G, old = self.parameter.grad, self.view
        return G is not None and old is not None and G is not old and G.shape == old.shape and torch.equal(G, old)

    @property
    def untouched(self) -> bool:
        G = self.parameter.grad
        return G is not None and ((G is self.gradient() and G._version == self.version) or self.moved)


def thrown_away(noted: Sequence[Noted]) -> bool:
    """Whether all of them are gone: set to None, or to zeros. Gradients that came later do not count."""
    if not noted or any(one.untouched for one in noted):
        return False
    return not any(bool(local(G).any()) for one in noted if (G := one.left) is not None)
