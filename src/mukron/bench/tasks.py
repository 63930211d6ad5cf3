"""What is trained: a network by width, and batches to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from mukron.models import MLP, ResNet18
from mukron.train.randomness import own_random_numbers

POOL = 16  # batches that are made beforehand and come in turn: nothing profits from a frozen one
NOISE = 0.5  # of the teacher's outputs' own size
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """A network by width on normal inputs, whose labels a fixed random linear teacher gives, with noise.

    agree_at: the width and batch at which updates are compared with float64, if what is measured is larger.
    """

    title: str
    network: Callable[[int], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    agree_at: tuple[int, int]

    def build(self, width: int, device: str) -> nn.Module:
        """The network on its device, from the same random numbers each time."""
        with own_random_numbers(torch.device(device)), torch.device(device):
            torch.manual_seed(0)
            return self.network(width)

    def pool(self, batch: int, device: str) -> Batches:
        with own_random_numbers(torch.device(device)), torch.device(device):
            torch.manual_seed(1)
            teacher = torch.randn(prod(self.inputs), self.classes) / prod(self.inputs) ** 0.5
            return [self._batch(batch, teacher) for _ in range(POOL)]

    def _batch(self, batch: int, teacher: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, *self.inputs)
        outputs = x.flatten(1) @ teacher
        return x, (outputs + NOISE * torch.randn_like(outputs)).argmax(1)


def mlp() -> Task:
    return Task("784-M-M-10 MLP", MLP, (784,), 10, agree_at=(1024, 1024))


def resnet(classes: int = 10) -> Task:
    title = f"ResNet-18, 32 x 32 images, {classes} classes"
    return Task(title, lambda width: ResNet18(width, classes=classes), (3, 32, 32), classes, agree_at=(1, 32))
