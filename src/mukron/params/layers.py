"""Fan-in and fan-out of a parameter, told by the module that owns it.

A shape alone does not say which side is which: a transposed convolution stores them the other way round, an
embedding's rows are picked and not summed, a depthwise convolution sums over no channel however many there are. Each
known module type has one function here, which knows that type's own parameters; its subclasses inherit it.

A layer of your own joins in by::

    from mukron.params import Fans, fans

    @fans.register(MyLinear)
    def _(module, name, shape):
        return Fans(fan_in=shape[1], fan_out=shape[0]) if name == "weight" else None

Returning None leaves the parameter without a known owner: it must be declared, ``base_shapes(..., roles={...})``.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Shape = tuple[int, ...]


class Fans(NamedTuple):
    """How many numbers are summed into one unit of the layer's output, and how many units there are."""

    fan_in: int
    fan_out: int
    vector: bool = False  # a bias or gain: one number a unit, no sum
    fallback: bool = False  # second-order methods leave it to their fallback rule
    inputs: int = 1  # how many inputs are multiplied before the sum


@singledispatch
def fans(module: nn.Module, name: str, shape: Shape) -> Fans | None:
    """The fans of ``module``'s own parameter ``name``, or None if its type is not known."""
    return None


def _vector(shape: Shape, fallback: bool = False) -> Fans:
    return Fans(1, math.prod(shape), vector=True, fallback=fallback)


@fans.register
def _linear(module: nn.Linear, name: str, shape: Shape) -> Fans | None:
    if name == "bias":
        return _vector(shape)
    return Fans(shape[1], shape[0]) if name == "weight" else None


@fans.register
def _attention_output(module: NonDynamicallyQuantizableLinear, name: str, shape: Shape) -> Fans | None:
    known = _linear(module, name, shape)
    return known and known._replace(fallback=True)  # MultiheadAttention uses its weight without calling it


@fans.register(nn.RNNBase)
@fans.register(nn.RNNCellBase)
def _recurrent(module: nn.Module, name: str, shape: Shape) -> Fans | None:
    if name.startswith("bias_"):
        return _vector(shape, fallback=True)
    # weight_ih, weight_hh, weight_hr, each [gates x hidden, input]
    return Fans(shape[1], shape[0], fallback=True) if name.startswith("weight_") else None


@fans.register
def _bilinear(module: nn.Bilinear, name: str, shape: Shape) -> Fans | None:
    if name == "bias":
        return _vector(shape, fallback=True)
    return Fans(shape[1] * shape[2], shape[0], fallback=True, inputs=2) if name == "weight" else None


@fans.register
def _conv(module: _ConvNd, name: str, shape: Shape) -> Fans | None:
    if name == "bias":
        return _vector(shape, fallback=module.transposed)
    if name != "weight":
        return None
    if module.transposed:  # [in, out / groups, *kernel]
        return Fans(shape[0] // module.groups * math.prod(shape[2:]), shape[1] * module.groups, fallback=True)
    return Fans(math.prod(shape[1:]), shape[0])  # [out, in / groups, *kernel]


@fans.register(nn.Embedding)
@fans.register(nn.EmbeddingBag)
def _embedding(module: nn.Module, name: str, shape: Shape) -> Fans | None:
    if name != "weight":
        return None
    # The input is one-hot: one row is picked, none are summed over the vocabulary.
    return Fans(1, shape[1], fallback=isinstance(module, nn.EmbeddingBag))


@fans.register(_NormBase)  # batch and instance norm
@fans.register(nn.LayerNorm)
@fans.register(nn.GroupNorm)
@fans.register(nn.RMSNorm)
@fans.register(nn.PReLU)
def _gain(module: nn.Module, name: str, shape: Shape) -> Fans | None:
    return _vector(shape, fallback=True) if name in ("weight", "bias") else None


@fans.register
def _attention(module: nn.MultiheadAttention, name: str, shape: Shape) -> Fans | None:
    if name in ("in_proj_bias", "bias_k", "bias_v"):
        return _vector(shape, fallback=True)
    if not name.endswith("_proj_weight"):
        return None
    return Fans(shape[1], module.embed_dim, fallback=True)  # in_proj_weight stacks q, k and v: [3 embed, embed]
