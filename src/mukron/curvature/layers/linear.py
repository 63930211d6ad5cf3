"""Linear layers with any leading dimensions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mukron.curvature.layers.base import Layout, layout


class LinearLayout(Layout):
    """x [samples, ..., d_in]: what stands between samples and features are positions."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module)
        self.d_in, self.d_out = module.in_features, module.out_features

    def inputs(self, x: Tensor) -> Tensor:
        return _positions(x)

    def signals(self, delta: Tensor) -> Tensor:
        return _positions(delta)

    def row_count(self, x: Tensor) -> int:
        return x.numel() // self.d_in

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0)


def _positions(x: Tensor) -> Tensor:
    if x.ndim == 1:
        x = x.unsqueeze(0)
    return x.reshape(1, x.shape[0], -1, x.shape[-1])


@layout.register
def _linear(module: nn.Linear) -> Layout:
    return LinearLayout(module)


@layout.register
def _attention_output(module: NonDynamicallyQuantizableLinear) -> None:
    """MultiheadAttention uses its weight without calling it: there is no forward pass to listen to."""
