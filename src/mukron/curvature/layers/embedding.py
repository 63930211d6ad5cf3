"""Embeddings: a linear layer whose input is one-hot, so that A is diagonal and holds the tokens' frequencies."""

from __future__ import annotations

from torch import Tensor, nn

from mukron.curvature.layers.base import Layout, layout


class EmbeddingLayout(Layout):
    """The weight [vocabulary, dimension] is the transpose of a linear layer's."""

    one_hot = True

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self.d_in, self.d_out = module.num_embeddings, module.embedding_dim

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


@layout.register
def _(module: nn.Embedding) -> Layout:
    return EmbeddingLayout(module)
