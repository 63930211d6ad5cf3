"""The multilayer perceptron (MLP) without biases, as in the paper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from mukron.models.initial import draw_normal


class Erf(nn.Module):
    """The error function. The kernel of an infinitely wide network with it is known in closed form."""

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
    """A multilayer perceptron without biases: inputs -> width -> ... -> width -> classes.

    The layers are called ``fc1``, ``fc2`` and so on.

    Args:
        width: The size of the hidden layers.
        inputs: The numbers of a sample, which is flattened.
        classes: The number of outputs.
        depth: The number of linear layers, at least 2.
        activation: ``"relu"``, ``"tanh"``, ``"gelu"``, ``"erf"`` or ``"identity"``.
        sigma: If given, initial weights are normal with the standard deviation sigma * fan-in^-1/2. By default they
            are drawn as torch draws them, from a uniform distribution.

    Raises:
        ValueError: The activation is unknown, or the depth is less than 2.

    Example:
        >>> import torch
        >>> from mukron.models import MLP
        >>> MLP(64)(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
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
        """Compute the logits of a batch.

        Args:
            x: Samples [samples, ...] of ``inputs`` numbers each.

        Returns:
            Logits [samples, classes].
        """
        for layer in self:
            x = layer(x)
        return x
