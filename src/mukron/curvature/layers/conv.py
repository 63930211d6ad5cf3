"""Convolutions in one, two and three dimensions: each output pixel is a position, its patch the input there."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.curvature.layers.base import Layout, layout


class ConvLayout(Layout):
    """Any stride, padding ("same" and circular too), dilation and groups."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(module)
        self.groups = module.groups
        self.d_out = module.out_channels // module.groups
        self.d_in = module.in_channels // module.groups * math.prod(module.kernel_size)

    @property
    def tf32(self) -> bool:
        return bool(self.module.weight.is_cuda and torch.backends.cudnn.allow_tf32)

    def inputs(self, x: Tensor) -> Tensor:
        conv, dimensions = self.module, len(self.module.kernel_size)
        x = _batched(x, dimensions)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, list(conv._reversed_padding_repeated_twice), mode=mode)
        sizes = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
        for axis, (kernel, stride, dilation) in enumerate(sizes, start=2):
            x = x.unfold(axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
        # [samples, channels, *positions, *kernel] -> [groups, samples, positions, channels of the group x kernel]
        samples, channels = x.shape[:2]
        x = x.reshape(samples, conv.groups, channels // conv.groups, -1, math.prod(conv.kernel_size))
        return x.permute(1, 0, 3, 2, 4).flatten(3)

    def signals(self, delta: Tensor) -> Tensor:
        delta = _batched(delta, len(self.module.kernel_size))
        return delta.reshape(delta.shape[0], self.groups, self.d_out, -1).permute(1, 0, 3, 2)

    def row_count(self, x: Tensor) -> int:
        conv, dimensions = self.module, len(self.module.kernel_size)
        count = 1 if x.ndim == dimensions + 1 else x.shape[0]
        padding = conv._reversed_padding_repeated_twice[::-1]  # [before, after] of each dimension, backwards
        for axis, (size, kernel) in enumerate(zip(x.shape[-dimensions:], conv.kernel_size, strict=True)):
            padded = size + padding[2 * axis] + padding[2 * axis + 1]
            count *= (padded - conv.dilation[axis] * (kernel - 1) - 1) // conv.stride[axis] + 1
        return count

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.d_out, self.d_in)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.module.weight.shape)


def _batched(x: Tensor, dimensions: int) -> Tensor:
    return x if x.ndim == dimensions + 2 else x.unsqueeze(0)


@layout.register(nn.Conv1d)
@layout.register(nn.Conv2d)
@layout.register(nn.Conv3d)
def _(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Layout:
    return ConvLayout(module)
