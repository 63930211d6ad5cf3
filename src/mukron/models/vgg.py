"""VGG-19 with batch norm. Width 1 has 16 channels in the first stage; width 4 is the usual network."""

from __future__ import annotations

import torch
from torch import nn

STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))  # channels over the first stage's, convolutions


class VGG19(nn.Module):
    """Sixteen 3x3 convolutions in five stages with max-pooling after each, and a linear layer."""

    def __init__(self, width: int, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        last = channels
        for times, convolutions in STAGES:
            for _ in range(convolutions):
                size = 16 * width * times
                layers += [nn.Conv2d(last, size, 3, padding=1, bias=False), nn.BatchNorm2d(size), nn.ReLU()]
                last = size
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return output
