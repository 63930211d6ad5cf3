"""Multilayer perceptron without biases, as in the paper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from mukron.models.initial import draw_normal


class Erf(nn.Module):
    """The error function, whose infinitely wide network has a kernel in closed form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "erf": Erf,
    "identity": nn.Identity,
}


class MLP(nn.Sequential):
    """Flatten, then ``depth`` linear layers: inputs -> width -> ... -> width -> classes.

    sigma: initial weights are normal with this deviation times fan-in^-1/2; torch's own, uniform ones if not given.
    """

    def __init__(
        self,
        width: int,
        inputs: int = 784,
        classes: int = 10,
        depth: int = 3,
        activation: str = "relu",
        sigma: float | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        if depth < 2:
            raise ValueError(f"an MLP needs an input and an output layer, got depth {depth}")
        sizes = [inputs, *[width] * (depth - 1), classes]
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{layer}"] = nn.Linear(fan_in, fan_out, bias=False)
            if layer < depth:
                layers[f"{activation}{layer}"] = ACTIVATIONS[activation]()
        super().__init__(layers)
        draw_normal(self, sigma)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x
