"""The tasks of benchmarks: a network by width, and batches to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from mukron.models import MLP, ResNet18
from mukron.train.randomness import own_random_numbers

POOL_SIZE = 16  # batches drawn beforehand and used in turn, so that no method gains from seeing one batch only
LABEL_NOISE = 0.5  # relative to the size of the teacher's outputs
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """A network by width, with normal inputs and labels from a fixed random linear teacher with noise.

    Attributes:
        title: The network, in words.
        network: Builds it, from its width.
        inputs: The shape of one input.
        classes: The number of classes.
        reference_size: The largest width and batch size at which updates are compared with float64.

    Example:
        >>> task = mlp_task()
        >>> x, y = task.pool(4, "cpu")[0]
        >>> task.build(8, "cpu")(x).shape
        torch.Size([4, 10])
    """

    title: str
    network: Callable[[int], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    reference_size: tuple[int, int]

    def build(self, width: int, device: str) -> nn.Module:
        """Builds the network, from the same random numbers each time.

        Args:
            width: Its width.
            device: "cpu" or "cuda".

        Returns:
            The network on the device.
        """
        with own_random_numbers(torch.device(device)), torch.device(device):
            torch.manual_seed(0)
            return self.network(width)

    def pool(self, batch: int, device: str) -> Batches:
        """Draws ``POOL_SIZE`` batches, the same ones each time.

        Args:
            batch: Batch size.
            device: "cpu" or "cuda".

        Returns:
            Pairs of inputs and labels.
        """
        with own_random_numbers(torch.device(device)), torch.device(device):
            torch.manual_seed(1)
            teacher = torch.randn(prod(self.inputs), self.classes) / prod(self.inputs) ** 0.5
            return [self._batch(batch, teacher) for _ in range(POOL_SIZE)]

    def _batch(self, batch: int, teacher: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, *self.inputs)
        outputs = x.flatten(1) @ teacher
        return x, (outputs + LABEL_NOISE * torch.randn_like(outputs)).argmax(1)


def mlp_task() -> Task:
    """Returns the task of the 784-M-M-10 MLP.

    Example:
        >>> mlp_task().inputs
        (784,)
    """
    return Task("784-M-M-10 MLP", MLP, (784,), 10, reference_size=(1024, 1024))


def resnet_task(classes: int = 10) -> Task:
    """Returns the task of ResNet-18 on 32 x 32 images.

    Args:
        classes: The number of classes.

    Returns:
        The task.

    Example:
        >>> resnet_task(100).classes
        100
    """
    title = f"ResNet-18, 32 x 32 images, {classes} classes"
    return Task(title, lambda width: ResNet18(width, classes=classes), (3, 32, 32), classes, reference_size=(1, 32))
