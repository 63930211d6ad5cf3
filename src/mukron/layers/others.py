"""Modules whose parameters muP scales and the fallback rule trains: norms, recurrent and bilinear layers."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from mukron.layers.base import BIAS, WEIGHT, Fans, Layer, Shape, register, vector


@register(_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)
class Gain(Layer):
    """Norms (batch and instance norm too) and learned slopes: one number per unit."""

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return vector(shape) if name in (WEIGHT, BIAS) else None


@register(nn.RNNBase, nn.RNNCellBase)
class Recurrent(Layer):
    """``weight_ih``, ``weight_hh`` and ``weight_hr``, each [gates x hidden, input]."""

    module: nn.RNNBase | nn.RNNCellBase

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name.startswith("bias_"):
            return vector(shape)
        return Fans(shape[1], shape[0]) if name.startswith("weight_") else None

    def stacked(self, name: str, shape: Shape) -> int:
        """Every gate has a matrix of its own; ``weight_hr`` projects what they give."""
        if not name.startswith("weight_"):
            return 0
        return 1 if name.startswith("weight_hr") else shape[0] // self.module.hidden_size


@register(nn.Bilinear)
class BilinearLayer(Layer):
    """Sums over the product of two inputs."""

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name == BIAS:
            return vector(shape)
        return Fans(shape[1] * shape[2], shape[0], inputs=2) if name == WEIGHT else None


@register(_ConvTransposeNd)
class TransposedConv(Layer):
    """The weight is [in, out / groups, *kernel]."""

    module: _ConvTransposeNd

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name == BIAS:
            return vector(shape)
        groups = self.module.groups
        fan_in = shape[0] // groups * math.prod(shape[2:])
        return Fans(fan_in, shape[1] * groups) if name == WEIGHT else None
