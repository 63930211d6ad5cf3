"""The paper's three-layer convolutional network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mukron.models.initial import draw_normal


class CNN(nn.Module):
    """Two 5x5 convolutions of width and 2 x width channels, max-pooling after each, and a linear layer.

    sigma: initial weights are normal with this deviation times fan-in^-1/2, biases zero; torch's own if not given.
    """

    def __init__(
        self, width: int, channels: int = 1, size: int = 28, classes: int = 10, sigma: float | None = None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5, padding=2)
        self.head = nn.Linear(2 * width * (size // 4) ** 2, classes)
        draw_normal(self, sigma)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        output: torch.Tensor = self.head(x.flatten(1))
        return output
