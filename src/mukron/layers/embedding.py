"""Embeddings: linear layers of one-hot inputs, whose factor A is diagonal and holds the frequencies of the tokens."""

from __future__ import annotations

from torch import Tensor, nn

from mukron.layers.base import WEIGHT, Fans, Layer, MatrixLayer, Shape, register


def _fans(name: str, shape: Shape) -> Fans | None:
    """One row is picked; nothing is summed over the vocabulary."""
    return Fans(1, shape[1]) if name == WEIGHT else None


@register(nn.Embedding)
class EmbeddingLayer(MatrixLayer):
    """The weight [vocabulary, dimension] is the transpose of a linear layer's."""

    one_hot = True

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self.d_in, self.d_out = module.num_embeddings, module.embedding_dim

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return _fans(name, shape)

    def inputs(self, x: Tensor) -> Tensor:
        return x.reshape(1, x.shape[0] if x.ndim else 1, -1)

    def along(self, x: Tensor, v: Tensor) -> Tensor:
        return v[self.inputs(x)].flatten(1, 2)

    def signals(self, delta: Tensor) -> Tensor:
        if delta.ndim == 1:
            delta = delta.unsqueeze(0)
        return delta.reshape(1, delta.shape[0], -1, delta.shape[-1])

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT


@register(nn.EmbeddingBag)
class EmbeddingBagLayer(Layer):
    """Sums rows of its weight; trained by the fallback rule."""

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return _fans(name, shape)
