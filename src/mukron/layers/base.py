"""What mukron knows of a layer type: one class a type, for muP (fans) and for curvature (a layout as matrices).

A class for a new type derives from one of two bases and registers itself:

* ``Layer``: its parameters have fans, so muP can scale them; they are trained by the fallback rule.
* ``MatrixLayer``: it has a layout too, so that second-order methods precondition its weight and bias.

The layout that everything else knows:

    inputs   H      [groups, samples, positions, d_in]    what the layer's weight multiplies
    signals  delta  [groups, samples, positions, d_out]   derivatives by the layer's output u = W h
    matrix   G      [groups, d_out, d_in]                 the weight, or its gradient

Positions share one weight within a sample: the tokens of a sequence, the pixels of an image. Groups are those of a
grouped convolution, each with its own factors; every other layer has one.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import iadd
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
WEIGHT, BIAS = "weight", "bias"


class Fans(NamedTuple):
    """The fan-in and fan-out of one parameter: how many numbers are summed into one output unit, and how many units.

    A shape alone does not say which side is which: a transposed convolution stores them the other way round, and an
    embedding picks a row instead of summing over its vocabulary.

    Attributes:
        fan_in: Numbers that are summed into one unit of the layer's output.
        fan_out: Units of the layer's output.
        vector: True for a bias or gain, which has one number per unit and no sum.
        inputs: How many inputs are multiplied before the sum (2 for a bilinear layer).

    Example:
        >>> Fans(fan_in=64, fan_out=10)
        Fans(fan_in=64, fan_out=10, vector=False, inputs=1)
    """

    fan_in: int
    fan_out: int
    vector: bool = False
    inputs: int = 1


def vector(shape: Shape) -> Fans:
    """The fans of a bias or gain.

    Args:
        shape: The parameter's shape.

    Returns:
        Fans with a fan-in of 1 and the number of entries as fan-out.

    Example:
        >>> vector((64,))
        Fans(fan_in=1, fan_out=64, vector=True, inputs=1)
    """
    return Fans(1, math.prod(shape), vector=True)


class Product(NamedTuple):
    """A linear map that a module applies by itself, by ``F.linear`` with a parameter, without a module of its own.

    Attributes:
        layer: Its layout.
        blocks: The names of its parameters in the module, by block: its weight and, if it has one, its bias.

    Example:
        >>> products = layer_of(nn.MultiheadAttention(8, 2)).products()
        >>> products["in_proj_weight"].blocks
        {'weight': 'in_proj_weight', 'bias': 'in_proj_bias'}
    """

    layer: MatrixLayer
    blocks: Mapping[str, str]


class Layer:
    """A module whose parameters muP can scale. Second-order methods leave them to the fallback rule.

    This base class stands for a module of unknown type, with bare parameters: it knows the fans of none of them.

    Args:
        module: The module itself.

    Attributes:
        depthwise: True for a convolution with one channel to a group, which second-order methods leave alone.

    Example:
        >>> class Slope(Layer):
        ...     def fans(self, name, shape):
        ...         return vector(shape) if name == "weight" else None
        >>> Slope(nn.PReLU(8)).fans("weight", (8,)).fan_out
        8
    """

    depthwise: bool = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def fans(self, name: str, shape: Shape) -> Fans | None:
        """The fans of the module's own parameter ``name``; None if they are not known, and must be declared.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            shape: The parameter's shape, here or at the base width.
        """
        return None

    def preconditions(self, name: str) -> bool:
        """Whether second-order methods precondition the parameter ``name``.

        Args:
            name: The parameter's name in the module, such as ``weight``.
        """
        return False

    def stacked(self, name: str, shape: Shape) -> int:
        """How many matrices [out, in] the parameter ``name`` stacks along its first dimension; 0: it is no matrix.

        Methods that need gradients alone precondition each of them.

        Args:
            name: The parameter's name in the module, such as ``in_proj_weight``.
            shape: The parameter's shape.
        """
        return 0

    def products(self) -> Mapping[str, Product]:
        """The linear maps that the module applies by itself, by the names of their weights.

        Second-order methods precondition them like layers. Their inputs and outputs are seen where the module's forward
        pass calls ``F.linear``.
        """
        return {}

    def uncalled(self) -> tuple[str, ...]:
        """The names of child modules whose weights the module gives to ``F.linear`` without calling the children."""
        return ()


class MatrixLayer(Layer, ABC):
    """A layer u = W h whose weight and bias second-order methods precondition.

    Subclasses set ``d_in``, ``d_out`` and, if they have any, ``groups`` in ``__init__``.

    Args:
        module: The module; subclasses read the sizes off it.

    Attributes:
        d_in: Size of the factor of the layer's inputs.
        d_out: Size of the factor of its output's derivatives.
        groups: Number of independent weight matrices.
        called: True if its module is called with the layer's input, so that hooks on it measure passes. False: its
            gradients alone are known, or another module gives its weight to ``F.linear``.
        plain_rows: True if the rows of ``inputs`` are those of the input itself, [..., d_in], and not patches of it.
        cancels: True if the signals of one sample's positions sum to zero: they cannot be reduced to their sum.
        one_hot: True if inputs are indices: A is diagonal, and ``inputs`` returns [groups, samples, positions].
        tf32: True if the layer's float32 products on a GPU use TF32 although torch's matrix products do not.

    Example:
        >>> layer = layer_of(nn.Linear(3, 2))
        >>> layer.inputs(torch.zeros(5, 4, 3)).shape
        torch.Size([1, 5, 4, 3])
    """

    d_in: int
    d_out: int
    groups: int = 1
    called: ClassVar[bool] = True
    plain_rows: ClassVar[bool] = False
    cancels: bool = False
    one_hot: ClassVar[bool] = False
    tf32: bool = False

    @abstractmethod
    def fans(self, name: str, shape: Shape) -> Fans | None:
        """The fans of ``weight`` and ``bias``.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            shape: The parameter's shape, here or at the base width.
        """

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """The layer's input as rows, [groups, samples, positions, d_in].

        Args:
            x: The layer's input, as its module takes it.
        """

    @abstractmethod
    def signals(self, delta: Tensor) -> Tensor:
        """A derivative by the layer's output as rows, [groups, samples, positions, d_out].

        Args:
            delta: The derivative, of the shape of the module's output.
        """

    @abstractmethod
    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, or a tensor of its shape, as matrices [groups, d_out, d_in]; a view where possible.

        Args:
            weight: The weight, its gradient or its step.
        """

    @abstractmethod
    def weight(self, matrix: Tensor) -> Tensor:
        """Turn matrices back into a tensor of the weight's shape: the inverse of ``matrix``.

        Args:
            matrix: Matrices [groups, d_out, d_in].
        """

    def preconditions(self, name: str) -> bool:
        """Whether second-order methods precondition the parameter: the weight and the bias.

        Args:
            name: The parameter's name in the module, such as ``weight``.
        """
        return name in (WEIGHT, BIAS)

    def block(self, name: str, values: Tensor) -> Tensor:
        """The weight or the bias as matrices; a bias has one column.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            values: The parameter, its gradient or its step.
        """
        return self.matrix(values) if name == WEIGHT else values.reshape(self.groups, self.d_out, 1)

    def values(self, name: str, matrix: Tensor) -> Tensor:
        """Turn matrices back into a tensor of the parameter's shape: the inverse of ``block``.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            matrix: Matrices [groups, d_out, d_in]; one column for a bias.
        """
        return self.weight(matrix) if name == WEIGHT else matrix.reshape(-1)

    def whole(self, name: str, matrix: Tensor) -> Tensor:
        """Matrices that were cut into blocks as the ones they are parts of; others as they are.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            matrix: Matrices [groups, d_out, d_in].
        """
        return matrix

    def cut(self, name: str, matrix: Tensor) -> Tensor:
        """The inverse of ``whole``.

        Args:
            name: The parameter's name in the module, such as ``weight``.
            matrix: Whole matrices.
        """
        return matrix

    def row_count(self, x: Tensor) -> int | None:
        """Samples times positions, from the shape of the layer's input; None if it cannot be known.

        Args:
            x: The layer's input, as its module takes it.
        """
        return None

    def portions(self, x: Tensor) -> Sequence[Tensor]:
        """The layer's input in parts along the samples, small enough for ``inputs`` to hold their rows at once.

        Args:
            x: The layer's input, as its module takes it.
        """
        return [x]

    def gram(self, x: Tensor) -> Tensor:
        """The sum of h h^T over all rows, [groups, d_in, d_in].

        Args:
            x: The layer's input, as its module takes it.
        """
        return reduce(iadd, (H.mT @ H for H in self._rows(x)))

    def along(self, x: Tensor, v: Tensor) -> Tensor:
        """H v for every row, [groups, rows, 1].

        Args:
            x: The layer's input, as its module takes it.
            v: A vector [groups, d_in, 1], or one for all groups.
        """
        return torch.cat([H @ v for H in self._rows(x)], dim=1)

    def _rows(self, x: Tensor) -> Iterator[Tensor]:
        return (self.inputs(part).flatten(1, 2) for part in self.portions(x))


LayerClass = TypeVar("LayerClass", bound=type[Layer])
_registry: dict[type[nn.Module] | str, type[Layer]] = {}


def register(*types: type[nn.Module] | str) -> Callable[[LayerClass], LayerClass]:
    """A class decorator: modules of these types, and of types derived from them, are described by the class.

    Args:
        *types: Module classes, or the qualified names of classes of other packages, which are not imported for it:
            "transformers.pytorch_utils.Conv1D".

    Returns:
        The decorator. It raises a TypeError for a class that has a layout but lacks a part of it.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(width))
        >>> @register(Scale)
        ... class ScaleLayer(Layer):
        ...     def fans(self, name, shape):
        ...         return vector(shape)
        >>> layer_of(Scale(4)).fans("gain", (4,))
        Fans(fan_in=1, fan_out=4, vector=True, inputs=1)
    """

    def decorate(cls: LayerClass) -> LayerClass:
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise TypeError(f"{cls.__name__} must also define {missing}: fans and layout of a layer belong together")
        _registry.update(dict.fromkeys(types, cls))
        return cls

    return decorate


def layer_of(module: nn.Module) -> Layer:
    """What is known of a module; a plain ``Layer``, which knows nothing, if its type is not registered.

    Args:
        module: Any module.

    Returns:
        The layer, of the class that is registered for the module's type or for the nearest type it derives from.

    Example:
        >>> type(layer_of(nn.Linear(3, 2))).__name__
        'LinearLayer'
        >>> layer_of(nn.ReLU()).preconditions("weight")
        False
    """
    for kind in type(module).__mro__:
        known = _registry.get(kind) or _registry.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known(module)
    return Layer(module)
