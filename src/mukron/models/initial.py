"""Initial weights that torch does not draw by default."""

from __future__ import annotations

from torch import nn


def draw_normal(model: nn.Module, sigma: float | None) -> None:
    """Draw the weights of linear layers and convolutions from N(0, sigma^2 / fan-in), and set their biases to zero.

    If sigma is None, nothing is changed.
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
