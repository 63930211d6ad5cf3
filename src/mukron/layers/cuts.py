"""Layouts for methods that need gradients alone: single parameters, parts of a weight, and blocks of a matrix."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor, nn
from torch.nn import functional as F

from mukron.layers.base import WEIGHT, Fans, MatrixLayer, Shape


class GradientLayer(MatrixLayer):
    """A layout whose passes are not measured."""

    called = False

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return None  # the module's own layer type knows them

    def inputs(self, x: Tensor) -> Tensor:
        raise TypeError("this layout has no inputs: it is for methods that need gradients alone")

    def signals(self, delta: Tensor) -> Tensor:
        raise TypeError("this layout has no signals: it is for methods that need gradients alone")


class ParameterMatrix(GradientLayer):
    """A single parameter as matrices.

    Args:
        module: The module that owns it.
        shape: The parameter's shape, [parts x out, in, ...].
        parts: How many matrices it stacks along its first dimension: queries, keys and values, or gates.

    Example:
        >>> import torch
        >>> layer = ParameterMatrix(nn.MultiheadAttention(8, 2), (24, 8), parts=3)
        >>> layer.matrix(torch.zeros(24, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(self, module: nn.Module, shape: Shape, parts: int = 1) -> None:
        super().__init__(module)
        self.shape, self.groups = shape, parts
        self.d_out, self.d_in = shape[0] // parts, math.prod(shape[1:])

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.d_out, self.d_in)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.shape)


class PartedLayer(GradientLayer):
    """A layer whose weight stacks several matrices along its outputs, such as queries, keys and values.

    Args:
        layer: The layer.
        parts: Their number; it divides the layer's outputs.
        multiply: Whether a wider layer has more of them, of the same size, and not larger ones.

    Example:
        >>> import torch
        >>> from mukron.layers import layer_of
        >>> PartedLayer(layer_of(nn.Linear(8, 24)), parts=3).block("bias", torch.zeros(24)).shape
        torch.Size([3, 8, 1])
    """

    def __init__(self, layer: MatrixLayer, parts: int, multiply: bool = False) -> None:
        super().__init__(layer.module)
        self.layer, self.groups, self.tf32 = layer, parts * layer.groups, layer.tf32
        self.multiply = multiply
        self.d_out, self.d_in = layer.d_out // parts, layer.d_in

    def matrix(self, weight: Tensor) -> Tensor:
        return self.layer.matrix(weight).reshape(self.groups, self.d_out, self.d_in)

    def weight(self, matrix: Tensor) -> Tensor:
        return self.layer.weight(matrix.reshape(self.layer.groups, self.layer.d_out, self.d_in))


class BlockedLayer(GradientLayer):
    """A layer whose matrices are cut into blocks, each with factors of its own.

    A side is cut into as few equal parts as have at most ``size`` rows; zeros make up what is missing.

    Args:
        layer: The layer.
        size: The largest side of a block.

    Attributes:
        cuts: The number of blocks along the outputs and along the inputs.

    Example:
        >>> import torch
        >>> from mukron.layers import layer_of
        >>> layer = BlockedLayer(layer_of(nn.Linear(10, 7)), size=4)
        >>> layer.cuts, layer.matrix(torch.zeros(7, 10)).shape
        ((2, 3), torch.Size([6, 4, 4]))
    """

    def __init__(self, layer: MatrixLayer, size: int) -> None:
        super().__init__(layer.module)
        self.layer, self.size, self.tf32 = layer, size, layer.tf32
        self.cuts = cuts_of(layer.d_out, size), cuts_of(layer.d_in, size)
        self.d_out, self.d_in = (-(-d // cuts) for d, cuts in zip((layer.d_out, layer.d_in), self.cuts, strict=True))
        self.groups = layer.groups * math.prod(self.cuts)

    def matrix(self, weight: Tensor) -> Tensor:
        return self.cut(WEIGHT, self.layer.matrix(weight))

    def weight(self, matrix: Tensor) -> Tensor:
        return self.layer.weight(self.whole(WEIGHT, matrix))

    def block(self, name: str, values: Tensor) -> Tensor:
        return self.cut(name, self.layer.block(name, values))

    def values(self, name: str, matrix: Tensor) -> Tensor:
        return self.layer.values(name, self.whole(name, matrix))

    def cut(self, name: str, matrix: Tensor) -> Tensor:
        rows, columns, width = self._blocks(name)
        missing = (0, columns * width - matrix.shape[-1], 0, rows * self.d_out - matrix.shape[-2])
        padded = F.pad(matrix, missing) if any(missing) else matrix
        return padded.reshape(-1, rows, self.d_out, columns, width).transpose(2, 3).reshape(-1, self.d_out, width)

    def whole(self, name: str, matrix: Tensor) -> Tensor:
        rows, columns, width = self._blocks(name)
        joined = matrix.reshape(-1, rows, columns, self.d_out, width).transpose(2, 3)
        joined = joined.reshape(-1, rows * self.d_out, columns * width)
        return joined[..., : self.layer.d_out, : self.layer.d_in if name == WEIGHT else 1]

    def _blocks(self, name: str) -> tuple[int, int, int]:
        """The numbers of blocks along both sides, and the columns of one; a bias has one column."""
        return (*self.cuts, self.d_in) if name == WEIGHT else (self.cuts[0], 1, 1)


def cuts_of(d: Fraction | int, size: int) -> int:
    """Into how many blocks of at most that size a side is cut."""
    return math.ceil(d / size)
