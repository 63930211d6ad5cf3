"""ResNet-18 and ResNet-50. Width 1 has 16 channels in the first stage; width 4 is the usual network."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

STEMS = ("cifar", "imagenet")


class Block(nn.Module):
    """A residual and a shortcut, which is a 1x1 convolution where the shape changes."""

    expansion: ClassVar[int]  # channels that leave the block over those it works with

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self._build(channels_in, channels, stride)
        channels_out = self.expansion * channels
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def _build(self, channels_in: int, channels: int, stride: int) -> None:
        raise NotImplementedError

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


class BasicBlock(Block):
    """Two 3x3 convolutions."""

    expansion = 1

    def _build(self, channels_in: int, channels: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return output


class Bottleneck(Block):
    """A 3x3 convolution between two 1x1 ones, which leaves four times the channels."""

    expansion = 4

    def _build(self, channels_in: int, channels: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        output: torch.Tensor = self.bn3(self.conv3(x))
        return output


class ResNet(nn.Module):
    """Four stages of blocks, each stage twice as wide and half as large as the one before.

    stem: "cifar", one 3x3 convolution for small images; "imagenet", a 7x7 one and max-pooling, each halving the size.
    output: what the initial weights of the last layer are multiplied by.
    """

    block: ClassVar[type[Block]]
    depths: ClassVar[tuple[int, ...]]

    def __init__(
        self, width: int, channels: int = 3, classes: int = 10, stem: str = "cifar", output: float = 1.0
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"unknown stem {stem!r}; known: {', '.join(STEMS)}")
        large = stem == "imagenet"
        stages = [16 * width * 2**stage for stage in range(4)]
        last = stages[0]
        self.stem = nn.Conv2d(channels, last, *((7, 2, 3) if large else (3, 1, 1)), bias=False)
        self.bn = nn.BatchNorm2d(last)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        blocks = []
        for stage, (size, depth) in enumerate(zip(stages, self.depths, strict=True)):
            for number in range(depth):
                blocks.append(self.block(last, size, stride=2 if stage > 0 and number == 0 else 1))
                last = self.block.expansion * size
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(last, classes)
        with torch.no_grad():
            self.head.weight.mul_(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(F.relu(self.bn(self.stem(x)))))
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return output


class ResNet18(ResNet):
    """Two basic blocks a stage."""

    block, depths = BasicBlock, (2, 2, 2, 2)


class ResNet50(ResNet):
    """Three, four, six and three bottlenecks."""

    block, depths = Bottleneck, (3, 4, 6, 3)
