"""The paper's three-layer convolutional network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mukron.models.initial import draw_normal


class CNN(nn.Module):
    """The paper's CNN: two 5x5 convolutions with max-pooling after each, and a linear layer.

    Args:
        width: The channels of the first convolution; the second has twice as many.
        channels: The channels of an image.
        size: The height and width of an image in pixels.
        classes: The number of outputs.
        sigma: If given, initial weights are normal with the standard deviation sigma * fan-in^-1/2 and biases are
            zero. By default they are drawn as torch draws them.

    Example:
        >>> import torch
        >>> from mukron.models import CNN
        >>> CNN(16)(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
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
        """Compute the logits of a batch.

        Args:
            x: Images [samples, channels, size, size].

        Returns:
            Logits [samples, classes].
        """
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        output: torch.Tensor = self.head(x.flatten(1))
        return output
