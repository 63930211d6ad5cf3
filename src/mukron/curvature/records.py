"""What a step uses of a pass beside the statistics of its layers: of its own passes, and of those of other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mukron.curvature.ignored import Ignored
    from mukron.curvature.passes import LayerPass


@dataclass
class PassRecord:
    """What a step uses of a pass beside its layers' statistics.

    Attributes:
        samples: Of the batch.
        used_samples, used_positions: Those that count.
        positions: Whether the output has positions.
        checked: Uses of weights were checked in it.
        weighed: Sums that show the loss's scale (``scale.weigh``); None: not measured.
        unbalanced: The sizes of the loss's derivatives by the output, summed over classes, and of all; None: not known.
        class_dim: Where the classes are in an output with positions; None: not known.
        classes_elsewhere: The dimension that the loss's classes are in, if it is not the one that was said.
    """

    samples: int
    used_samples: float | Tensor
    used_positions: float | Tensor
    positions: bool
    checked: bool
    weighed: Tensor | None = None
    unbalanced: Tensor | None = None
    class_dim: int | None = None
    classes_elsewhere: int | None = None


class Recorded:
    """A pass: what a step uses of it beside its layers, and what is left if its gradients are thrown away."""

    samples: int
    checked: bool
    layers: dict[str, LayerPass]
    ignored: Ignored | None
    errors: Tensor | None
    weighed: Tensor | None
    class_dim: int | None
    classes_elsewhere: int | None

    @property
    def positions(self) -> bool:
        return self.ignored is not None

    @property
    def used_samples(self) -> float | Tensor:
        return float(self.samples) if self.ignored is None else self.ignored.used_samples

    @property
    def used_positions(self) -> float | Tensor:
        return float(self.samples) if self.ignored is None else self.ignored.weights.sum(dtype=torch.float64)

    @property
    def unbalanced(self) -> Tensor | None:
        e = self.errors
        return None if e is None or self.positions else torch.stack([e.sum(1).abs().sum(), e.abs().sum()])

    def record(self) -> PassRecord:
        """All of it, without the pass."""
        names = PassRecord.__dataclass_fields__
        unbalanced = self.unbalanced if self.checked else None
        values = {name: getattr(self, name) for name in names if name != "unbalanced"}
        return PassRecord(**values, unbalanced=unbalanced)

    def restart(self) -> None:
        """Its gradients were thrown away, and it is differentiated once more: inputs and signals are as they were."""
        self.errors = None
        for layer in self.layers.values():
            layer.delta, layer.of_delta, layer.along, layer.reached = None, None, None, False
