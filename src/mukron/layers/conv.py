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
    """Any stride, padding ("same" and circular too), dilation and groups.

    Depthwise ones are left to the fallback rule: a group has one channel, whose factors say nothing of the others, and
    the number of groups grows with the width, for which there is no law.
    """

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(module)
        self.groups, self.depthwise = module.groups, module.groups == module.in_channels > 1
        self.d_out = module.out_channels // module.groups
        self.d_in = module.in_channels // module.groups * math.prod(module.kernel_size)

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name == BIAS:
            return vector(shape)
        return Fans(math.prod(shape[1:]), shape[0]) if name == WEIGHT else None  # [out, in / groups, *kernel]

    def preconditions(self, name: str) -> bool:
        return not self.depthwise and super().preconditions(name)

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
        middle, head, tail = self._sliding(parts[0])
        for part in parts[1:]:
            for total, addend in zip((middle, head, tail), self._sliding(part), strict=True):
                total.add_(addend)
        return self._assembled(middle, head, tail)

    def _slides(self, x: Tensor) -> bool:
        """Whether patches overlap along the first axis so much that few of their products are new."""
        conv, size = self.module, self._padded_size(x, 0)
        K = conv.kernel_size[0]
        return conv.stride[0] == conv.dilation[0] == 1 and K > 1 and size >= 3 * K

    def _sliding(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products that make up the Gram matrix A of all patches, at about a K-th of the price of A itself.

        R[j] are the rows of line j of the padded input, with patches along the other axes only. Part k of a patch that
        starts at line y is R[y + k], so with n positions along this axis and offsets o = 0 .. K - 1 - k

            A[k, k + o] = sum of R[j]^T R[j + o] over j = k .. n - 1 + k
                        = sum over j = k .. K - 2 - o     head: lines that only the first parts reach
                        + sum over j = K - 1 - o .. n - 1  middle: the same for every k
                        + sum over j = n .. n - 1 + k      tail: lines that only the last parts reach.

        Nothing is subtracted, so A is as accurate as the product of the patches themselves, whatever the size of the
        borders.

        Args:
            x: Input of the layer.

        Returns:
            The sums ``middle`` for o = 0 .. K - 1 side by side, [groups, e, K e] with e = d_in / K, and all products
            R[j]^T R[j'] within the first and within the last K - 1 lines, ``head`` and ``tail``, both
            [groups, (K - 1) e, (K - 1) e].
        """
        K = self.module.kernel_size[0]
        x = self._patches(x, first=1).transpose(1, 2)  # [groups, lines, samples, *others, channels, *kernel]
        lines, e = x.shape[1], self.d_in // K
        n = lines - K + 1
        R = x.reshape(self.groups, lines, -1, e).contiguous()

        def rows(start: int, stop: int) -> Tensor:
            return R[:, start:stop].view(self.groups, -1, e)

        middle = torch.cat([torch.bmm(rows(K - 1 - o, n).mT, rows(K - 1, n + o)) for o in range(K)], dim=2)
        head, tail = (R[:, j : j + K - 1].transpose(1, 2).flatten(2) for j in (0, n))
        return middle, torch.bmm(head.mT, head), torch.bmm(tail.mT, tail)

    def _assembled(self, middle: Tensor, head: Tensor, tail: Tensor) -> Tensor:
        """The Gram matrix, [groups, d_in, d_in], from the three sums of ``_sliding``."""
        K, e = self.module.kernel_size[0], self.d_in // self.module.kernel_size[0]
        upper = middle.new_zeros(self.groups, self.d_in, self.d_in)
        block_rows = [upper[:, k * e : (k + 1) * e, k * e :] for k in range(K)]  # A[k, k:], views of ``upper``
        tail_sum = middle  # the middle and the tail, which gains one term from each k to the next
        for k, row in enumerate(block_rows):
            row.copy_(tail_sum)
            if k + 1 < K:
                tail_sum = tail_sum[..., :-e] + tail[:, k * e : (k + 1) * e, k * e :]
        head_sum = middle[..., :0]  # the head, which gains one term from each k to the one before it
        for k in reversed(range(K - 1)):
            head_sum = F.pad(head_sum, (0, e)) + head[:, k * e : (k + 1) * e, k * e :]
            block_rows[k][..., :-e] += head_sum
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
