"""Attention of torch: its projections are linear maps that no module of their own is called for.

``nn.MultiheadAttention`` gives its weights to ``F.linear`` inside of its own forward pass:

    in_proj_weight                    [3 embed, embed]      queries, keys and values, if all inputs have one size
    q_proj_weight, k_..., v_...       [embed, size]         the same otherwise; ``in_proj_bias`` belongs to all three
    out_proj.weight                   [embed, embed]        the weight of a child that is not called

Queries, keys and values are matrices of their own, each with its inputs and signals. A vector that is added to all keys
of a sample changes nothing, since a softmax over the keys follows: the signals of keys sum to zero over positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mukron.layers.base import BIAS, WEIGHT, Fans, Layer, Product, Shape, register, vector
from mukron.layers.cuts import ParameterMatrix
from mukron.layers.linear import LinearLayer

IN_PROJECTION, IN_BIAS = "in_proj_weight", "in_proj_bias"
SEPARATE = {"q_proj_weight": False, "k_proj_weight": True, "v_proj_weight": False}  # with what cancels


class Projection(ParameterMatrix):
    """Linear maps whose weights one parameter stacks along its first dimension, each a group with its own passes.

    Args:
        module: The module that owns the parameter.
        shape: The parameter's shape, [parts x out, in].
        cancels: For each of the maps, whether the signals of one sample's positions sum to zero.

    Attributes:
        parts: The layouts of the maps.

    Example:
        >>> import torch
        >>> layer = Projection(nn.MultiheadAttention(8, 2), (24, 8), (False, True, False))
        >>> layer.parts[1].inputs(torch.zeros(5, 4, 8)).shape, layer.block("bias", torch.zeros(24)).shape
        (torch.Size([1, 5, 4, 8]), torch.Size([3, 8, 1]))
    """

    plain_rows = True

    def __init__(self, module: nn.Module, shape: Shape, cancels: Sequence[bool] = (False,)) -> None:
        super().__init__(module, shape, len(cancels))
        self.cancels = cancels[0]
        several = cancels if len(cancels) > 1 else ()
        self._parts = [Projection(module, (self.d_out, self.d_in), (own,)) for own in several]

    @property
    def parts(self) -> Sequence[Projection]:
        return self._parts or [self]

    def inputs(self, x: Tensor) -> Tensor:
        return x.reshape(1, x.shape[0], -1, x.shape[-1])

    signals = inputs  # type: ignore[assignment]

    def row_count(self, x: Tensor) -> int:
        return x.numel() // self.d_in


@register(nn.MultiheadAttention)
class Attention(Layer):
    """Projections of queries, keys and values. ``bias_k`` and ``bias_v`` are trained by the fallback rule."""

    module: nn.MultiheadAttention

    def fans(self, name: str, shape: Shape) -> Fans | None:
        if name in (IN_BIAS, "bias_k", "bias_v"):
            return vector(shape)
        return Fans(shape[1], self.module.embed_dim) if name.endswith("_proj_weight") else None

    def preconditions(self, name: str) -> bool:
        return any(name in product.blocks.values() for product in self.products().values())

    def products(self) -> Mapping[str, Product]:
        own = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters(recurse=False)}
        if IN_PROJECTION in own:
            blocks = {WEIGHT: IN_PROJECTION} | ({BIAS: IN_BIAS} if IN_BIAS in own else {})
            return {IN_PROJECTION: Product(Projection(self.module, own[IN_PROJECTION], [*SEPARATE.values()]), blocks)}
        return {
            name: Product(Projection(self.module, own[name], (cancels,)), {WEIGHT: name})
            for name, cancels in SEPARATE.items()
            if name in own
        }

    def uncalled(self) -> tuple[str, ...]:
        return ("out_proj",)


@register(NonDynamicallyQuantizableLinear)
class AttentionOutput(LinearLayer):
    """The output projection of MultiheadAttention, which uses its weight without calling it."""

    called = False

    def preconditions(self, name: str) -> bool:
        """Both or none: with a parametrized weight, no product with one of the layer's own parameters is seen.

        Args:
            name: The parameter's name in the module, such as ``weight``.
        """
        return super().preconditions(name) and self.module._parameters.get(WEIGHT) is not None
