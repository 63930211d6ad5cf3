"""ResNet-18 and ResNet-50. Width 1 has 16 channels in the first stage; width 4 is the usual network."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

STEMS = ("cifar", "imagenet")


class Block(nn.Module):
    """A residual block. The shortcut is a 1x1 convolution where the shape changes, and the identity elsewhere."""

    expansion: ClassVar[int]  # output channels divided by the channels inside the block

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
    """A block of two 3x3 convolutions."""

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
    """A block of a 3x3 convolution between two 1x1 convolutions, with four times the channels at its output."""

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
    """Four stages of blocks; each stage has twice the channels and half the image size of the one before."""

    block: ClassVar[type[Block]]
    depths: ClassVar[tuple[int, ...]]

    def __init__(
        self, width: int, channels: int = 3, classes: int = 10, stem: str = "cifar", output: float = 1.0
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"unknown stem {stem!r}; known: {', '.join(STEMS)}")
        large_images = stem == "imagenet"
        stages = [16 * width * 2**stage for stage in range(4)]
        channels_in = stages[0]
        self.stem = nn.Conv2d(channels, channels_in, *((7, 2, 3) if large_images else (3, 1, 1)), bias=False)
        self.bn = nn.BatchNorm2d(channels_in)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large_images else nn.Identity()
        blocks = []
        for stage, (size, depth) in enumerate(zip(stages, self.depths, strict=True)):
            for number in range(depth):
                blocks.append(self.block(channels_in, size, stride=2 if stage > 0 and number == 0 else 1))
                channels_in = self.block.expansion * size
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)
        with torch.no_grad():
            self.head.weight.mul_(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a batch.

        Args:
            x: Images [samples, channels, height, width].

        Returns:
            Logits [samples, classes].
        """
        x = self.blocks(self.pool(F.relu(self.bn(self.stem(x)))))
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return output


class ResNet18(ResNet):
    """ResNet-18: four stages of two basic blocks each, with batch norm.

    Args:
        width: The width: 1 is a network with 16 channels in the first stage, 4 is the usual ResNet-18.
        channels: The channels of an image.
        classes: The number of outputs.
        stem: ``"cifar"`` for small images, one 3x3 convolution; ``"imagenet"`` for large ones, a 7x7 convolution and
            max-pooling, each of which halves the size.
        output: A factor that multiplies the initial weights of the last layer.

    Raises:
        ValueError: The stem is unknown.

    Example:
        >>> import torch
        >>> from mukron.models import ResNet18
        >>> ResNet18(1)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    block, depths = BasicBlock, (2, 2, 2, 2)


class ResNet50(ResNet):
    """ResNet-50: four stages of three, four, six and three bottleneck blocks, with batch norm.

    Args:
        width: The width: 1 is a network with 16 channels in the first stage, 4 is the usual ResNet-50.
        channels: The channels of an image.
        classes: The number of outputs.
        stem: ``"cifar"`` for small images, one 3x3 convolution; ``"imagenet"`` for large ones, a 7x7 convolution and
            max-pooling, each of which halves the size.
        output: A factor that multiplies the initial weights of the last layer.

    Raises:
        ValueError: The stem is unknown.

    Example:
        >>> import torch
        >>> from mukron.models import ResNet50
        >>> ResNet50(1)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    block, depths = Bottleneck, (3, 4, 6, 3)
