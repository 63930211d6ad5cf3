"""Initial weights that torch does not draw by default, and what residual branches are multiplied by."""

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


def branch_multiplier(depth: int, base_depth: int | None) -> float:
    """What each residual branch is multiplied by: base_depth / depth, or 1 if no base depth is given."""
    for name, number in {"depth": depth, "base_depth": base_depth}.items():
        if number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{name}={number!r}: expected a whole number")
        if number < 1:
            raise ValueError(f"{name}={number}: expected at least one block")
    return 1.0 if base_depth is None else base_depth / depth
