"""A multilayer perceptron with residual blocks, whose depth can grow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mukron.models.initial import branch_multiplier, draw_normal
from mukron.models.mlp import ACTIVATIONS


class ResidualBlock(nn.Module):
    """x + multiplier * out(activation(up(norm(x)))), without biases."""

    def __init__(self, width: int, activation: str, norm: bool, multiplier: float) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm = nn.LayerNorm(width, bias=False) if norm else nn.Identity()
        self.up, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.out(self.activation(self.up(self.norm(x))))
        return x + (branch if self.multiplier == 1 else branch * self.multiplier)


class ResidualMLP(nn.Module):
    """A multilayer perceptron with residual blocks: a linear layer, blocks of two layers each, and a linear head.

    Args:
        width: The size of the residual stream and of the layers inside of blocks.
        inputs: The numbers of a sample, which is flattened.
        classes: The number of outputs.
        depth: The number of residual blocks.
        base_depth: What each block adds to the residual stream is multiplied by base_depth / depth, as the laws of
            depth need it. By default it is not multiplied.
        activation: ``"relu"``, ``"tanh"``, ``"gelu"``, ``"erf"`` or ``"identity"``.
        norm: Whether there is a LayerNorm before every branch and before the head. Without it the residual stream
            grows exponentially with the depth unless ``base_depth`` is given.
        sigma: If given, initial weights are normal with the standard deviation sigma * fan-in^-1/2. By default they
            are drawn as torch draws them, from a uniform distribution.

    Raises:
        ValueError: The activation is unknown, or a depth is no whole number of at least 1.

    Example:
        >>> import torch
        >>> from mukron.models import ResidualMLP
        >>> model = ResidualMLP(64, depth=8, base_depth=2)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> model.blocks[0].multiplier
        0.25
    """

    def __init__(
        self,
        width: int,
        inputs: int = 784,
        classes: int = 10,
        depth: int = 4,
        base_depth: int | None = None,
        activation: str = "relu",
        norm: bool = True,
        sigma: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        multiplier = branch_multiplier(depth, base_depth)
        self.flatten = nn.Flatten()
        self.stem = nn.Linear(inputs, width, bias=False)
        self.blocks = nn.ModuleList(ResidualBlock(width, activation, norm, multiplier) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False) if norm else nn.Identity()
        self.head = nn.Linear(width, classes, bias=False)
        draw_normal(self, sigma)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a batch.

        Args:
            x: Samples [samples, ...] of ``inputs`` numbers each.

        Returns:
            Logits [samples, classes].
        """
        x = self.stem(self.flatten(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
