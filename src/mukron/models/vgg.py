"""VGG-19 with batch norm. Width 1 has 16 channels in the first stage; width 4 is the usual network."""

from __future__ import annotations

import torch
from torch import nn

# Per stage: its channels divided by those of the first stage, and its number of convolutions.
STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))


class VGG19(nn.Module):
    """VGG-19 with batch norm: sixteen 3x3 convolutions in five stages with max-pooling after each, and a linear layer.

    Args:
        width: The width: 1 is a network with 16 channels in the first stage, 4 is the usual VGG-19.
        channels: The channels of an image.
        classes: The number of outputs.

    Example:
        >>> import torch
        >>> from mukron.models import VGG19
        >>> VGG19(1)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, width: int, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels_in = channels
        for multiple, convolutions in STAGES:
            for _ in range(convolutions):
                size = 16 * width * multiple
                layers += [nn.Conv2d(channels_in, size, 3, padding=1, bias=False), nn.BatchNorm2d(size), nn.ReLU()]
                channels_in = size
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a batch.

        Args:
            x: Images [samples, channels, height, width] of at least 32 x 32 pixels.

        Returns:
            Logits [samples, classes].
        """
        output: torch.Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return output
