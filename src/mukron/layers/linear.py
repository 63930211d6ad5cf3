"""Linear layers with any leading dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from mukron.layers.base import BIAS, WEIGHT, Fans, MatrixLayer, Shape, register, vector


@register(nn.Linear)
class LinearLayer(MatrixLayer):
    """x [samples, ..., d_in]: the dimensions between samples and features are positions."""

    plain_rows = True

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module)
        self.d_in, self.d_out = module.in_features, module.out_features

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return linear_fans(name, shape)

    def inputs(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            x = x.unsqueeze(0)
        return x.reshape(1, x.shape[0], -1, x.shape[-1])

    signals = inputs  # type: ignore[assignment]

    def row_count(self, x: Tensor) -> int:
        return x.numel() // self.d_in

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0)

    def block(self, name: str, values: Tensor) -> Tensor:
        return values.unsqueeze(0) if name == WEIGHT else values[None, :, None]

    def values(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0) if name == WEIGHT else matrix[0, :, 0]


@register("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")
class TransposedLinearLayer(LinearLayer):
    """A linear layer whose weight is stored as [in, out], such as those of GPT-2 in Hugging Face's transformers."""

    def __init__(self, module: nn.Module) -> None:
        MatrixLayer.__init__(self, module)
        self.d_in, self.d_out = getattr(module, WEIGHT).shape

    def fans(self, name: str, shape: Shape) -> Fans | None:
        return Fans(shape[0], shape[1]) if name == WEIGHT else linear_fans(name, shape)

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT

    def block(self, name: str, values: Tensor) -> Tensor:
        return self.matrix(values) if name == WEIGHT else super().block(name, values)

    def values(self, name: str, matrix: Tensor) -> Tensor:
        return self.weight(matrix) if name == WEIGHT else super().values(name, matrix)


def linear_fans(name: str, shape: Shape) -> Fans | None:
    """The fans of a weight [out, in] and its bias."""
    if name == BIAS:
        return vector(shape)
    return Fans(shape[1], shape[0]) if name == WEIGHT else None
