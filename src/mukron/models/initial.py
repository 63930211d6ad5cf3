"""Initial weights other than torch's own."""

from __future__ import annotations

from torch import nn


def draw_normal(model: nn.Module, sigma: float | None) -> None:
    """Weights of linear layers and convolutions with mean 0 and deviation sigma fan-in^-1/2; their biases zero.

    Nothing is drawn anew if sigma is None.
    """
    if sigma is None:
        return
    if not sigma > 0:
        raise ValueError(f"sigma: a deviation, more than 0; got {sigma:g}")
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.normal_(layer.weight, std=sigma * layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
