"""Myrtle-5, of the family of Shankar and others (2020): convolutions and average pooling alone."""

from __future__ import annotations

import torch
from torch import nn


class Myrtle5(nn.Module):
    """Four 3x3 convolutions of ``width`` channels with pooling between, the mean over positions, a linear layer.

    Initial weights are He's, as in the family's kernels: torch's usual ones would let signals die out on the way.
    """

    def __init__(self, width: int, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.conv4 = nn.Conv2d(width, width, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(width, classes)
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.conv2(self.conv1(x).relu()).relu())
        x = self.pool(self.conv3(x).relu())
        x = self.conv4(x).relu()
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))  # the rest of the pooling, at any size of image
        return output
