"""Myrtle-5, of the family of Shankar and others (2020), which has only convolutions and average pooling."""

from __future__ import annotations

import torch
from torch import nn


class Myrtle5(nn.Module):
    """Myrtle-5: four 3x3 convolutions with pooling between them, the mean over positions, and a linear layer.

    Initial weights follow He's rule, as in the kernels of this family: with torch's default weights the signals would
    shrink from layer to layer.

    Args:
        width: The channels of every convolution.
        channels: The channels of an image.
        classes: The number of outputs.

    Example:
        >>> import torch
        >>> from mukron.models import Myrtle5
        >>> Myrtle5(16)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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
        """Compute the logits of a batch.

        Args:
            x: Images [samples, channels, height, width] of at least 4 x 4 pixels.

        Returns:
            Logits [samples, classes].
        """
        x = self.pool(self.conv2(self.conv1(x).relu()).relu())
        x = self.pool(self.conv3(x).relu())
        x = self.conv4(x).relu()
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))  # pools what is left, for any size of image
        return output
