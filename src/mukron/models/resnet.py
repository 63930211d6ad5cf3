"""ResNet-18 for small images. Width 1 has 16 channels in the first stage; width 4 is the usual network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two basic blocks, each stage twice as wide and half as large as the one before."""

    def __init__(self, width: int, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        stages = [16 * width * 2**stage for stage in range(4)]
        self.stem = nn.Conv2d(channels, stages[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(stages[0])
        blocks, last = [], stages[0]
        for stage, size in enumerate(stages):
            for block in range(2):
                blocks.append(BasicBlock(last, size, stride=2 if stage > 0 and block == 0 else 1))
                last = size
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return output
