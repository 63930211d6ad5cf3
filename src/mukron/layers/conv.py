"""Convolutions in one, two and three dimensions: each output pixel is a position, its patch the input there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.layers.base import BIAS, WEIGHT, Fans, MatrixLayer, Shape, register, vector

PORTION = 2**24  # numbers of a convolution's patches that are held at a time


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(MatrixLayer):
    """Any stride, padding ("same" and circular too), dilation and groups."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(module)
        self.groups = module.groups
        self.d_out = module.out_channels // module.groups
        self.d_in = module.in_channels // module.groups * math.prod(module.kernel_size)

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name == BIAS:
            return vector(shape)
        return Fans(math.prod(shape[1:]), shape[0]) if name == WEIGHT else None  # [out, in / groups, *kernel]

    @property
    def tf32(self) -> bool:  # type: ignore[override]
        try:
            return bool(self.module.weight.is_cuda and torch.backends.cudnn.allow_tf32)
        except RuntimeError:  # it was set in one of torch's other ways
            return False

    def inputs(self, x: Tensor) -> Tensor:
        x = self._patches(x, first=0)  # [groups, samples, *positions, channels of the group, *kernel]
        return x.reshape(self.groups, x.shape[1], -1, self.d_in)

    def _padded(self, x: Tensor) -> Tensor:
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(_batched(x, len(conv.kernel_size)), list(conv._reversed_padding_repeated_twice), mode=mode)

    def _patches(self, x: Tensor, first: int) -> Tensor:
        """A view of the padded input with patches along the axes from ``first`` on, kernel last."""
        conv, x = self.module, self._padded(x)
        sizes = list(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True))
        for axis, (kernel, stride, dilation) in enumerate(sizes[first:], start=2 + first):
            x = x.unfold(axis, (kernel - 1) * dilation + 1, stride)
            x = x if dilation == 1 else x[..., ::dilation]
        samples, channels, *others = x.shape
        x = x.view(samples, self.groups, channels // self.groups, *others)
        positions = range(3, 3 + len(sizes))
        return x.permute(1, 0, *positions, 2, *range(3 + len(sizes), x.ndim))

    def portions(self, x: Tensor) -> Sequence[Tensor]:
        return self._in_parts(x, self.row_count(x) * self.d_in)

    def _in_parts(self, x: Tensor, numbers: int) -> Sequence[Tensor]:
        """Of the input, such that so many numbers of a group's patches are made a portion at a time."""
        x = _batched(x, len(self.module.kernel_size))
        numbers *= self.groups
        return [x] if numbers <= PORTION else torch.split(x, max(1, len(x) * PORTION // numbers))

    def gram(self, x: Tensor) -> Tensor:
        if not self._slides(x):
            return super().gram(x)
        parts = self._in_parts(x, self.row_count(x) * self.d_in // self.module.kernel_size[0])
        first, steps = self._sliding(parts[0])
        for part in parts[1:]:
            more, further = self._sliding(part)
            first += more
            steps += further
        return self._assembled(first, steps)

    def _slides(self, x: Tensor) -> bool:
        """Whether patches overlap along the first axis so much that few of their products are new."""
        conv, size = self.module, self._padded_size(x, 0)
        K = conv.kernel_size[0]
        return conv.stride[0] == conv.dilation[0] == 1 and K > 1 and size >= 3 * K

    def _sliding(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What makes the Gram matrix A of all patches, from lines of the input and at a K-th of the price.

        R[y] are the rows of line y of the padded input, with patches along the other axes alone. A patch that starts at
        line y has R[y + k] as its part k, so that with n positions along this axis

            A[k, k'] = sum of R[y + k]^T R[y + k'] over y = 0 .. n - 1,
            A[k + 1, k' + 1] = A[k, k'] - R[k]^T R[k'] + R[k + n]^T R[k' + n]:

        down a diagonal the sum loses its first term and gains one. Returned are the blocks A[0, :], side by side, and
        the differences down the diagonals, [groups, (K - 1) e, (K - 1) e] with e = d_in / K.
        """
        K = self.module.kernel_size[0]
        x = self._patches(x, first=1).transpose(1, 2)  # [groups, lines, samples, *others, channels, *kernel]
        lines, e = x.shape[1], self.d_in // K
        n = lines - K + 1
        R = x.reshape(self.groups, lines, -1, e).contiguous()
        rows = [R[:, k : k + n].view(self.groups, -1, e) for k in range(K)]
        first = torch.cat([torch.bmm(rows[0].mT, row) for row in rows], dim=2)
        lost, gained = (R[:, y : y + K - 1].transpose(1, 2).flatten(2) for y in (0, n))
        return first, torch.bmm(gained.mT, gained).sub_(torch.bmm(lost.mT, lost))

    def _assembled(self, first: Tensor, steps: Tensor) -> Tensor:
        K, e = self.module.kernel_size[0], self.d_in // self.module.kernel_size[0]
        upper = first.new_zeros(self.groups, self.d_in, self.d_in)
        row = first  # from its diagonal block on
        for k in range(K):
            upper[:, k * e : (k + 1) * e, k * e :] = row
            if k + 1 < K:
                row = row[..., :-e] + steps[:, k * e : (k + 1) * e, k * e :]
        whole = upper.triu_().add_(upper.triu(1).mT)
        # from (line, channel, rest) of the kernel to (channel, line, rest)
        rest = math.prod(self.module.kernel_size[1:])
        split = whole.view(self.groups, K, e // rest, rest, K, e // rest, rest)
        return split.transpose(1, 2).transpose(4, 5).reshape(self.groups, self.d_in, self.d_in)

    def signals(self, delta: Tensor) -> Tensor:
        delta = _batched(delta, len(self.module.kernel_size))
        return delta.reshape(delta.shape[0], self.groups, self.d_out, -1).permute(1, 0, 3, 2)

    def row_count(self, x: Tensor) -> int:
        conv, dimensions = self.module, len(self.module.kernel_size)
        count = 1 if x.ndim == dimensions + 1 else x.shape[0]
        for axis, kernel in enumerate(conv.kernel_size):
            reach = conv.dilation[axis] * (kernel - 1) + 1
            count *= (self._padded_size(x, axis) - reach) // conv.stride[axis] + 1
        return count

    def _padded_size(self, x: Tensor, axis: int) -> int:
        padding = self.module._reversed_padding_repeated_twice[::-1]  # [before, after] of each dimension, backwards
        return x.shape[axis - len(self.module.kernel_size)] + padding[2 * axis] + padding[2 * axis + 1]

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.d_out, self.d_in)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.module.weight.shape)


def _batched(x: Tensor, dimensions: int) -> Tensor:
    return x if x.ndim == dimensions + 2 else x.unsqueeze(0)

