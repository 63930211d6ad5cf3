"""What is trained in the stability matrix: a network, its data, its batch size and the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.bench.networks import CharGPT, ZeroGateResNet
from mukron.bench.stability.text import ALPHABET, text_dataset
from mukron.data import Split, load
from mukron.models import CNN

TEXT = "text"  # the data set that is made here
CONTEXT, CHARACTERS = 32, 50_000  # of the GPT's windows, and of its text
SMOKE_STEPS, SMOKE_BATCH, SMOKE_SAMPLES = 6, 16, 64


@dataclass(frozen=True)
class StabilityProblem:
    """A problem of the stability matrix.

    Attributes:
        name: The name on the command line.
        title: What is trained, in words.
        data: The data set: a name of ``mukron.data``, or "text".
        network: Builds the network from its width.
        width: The width.
        smoke_width: The width for a quick trial.
        batch: Batch size.
        steps: The number of steps.
        options: What the optimizer must know of the network, for optimizers that have such an argument.

    Example:
        >>> problem = STABILITY_PROBLEMS["gpt"]
        >>> problem.batch, dict(problem.options)
        (32, {'class_dim': -1})
        >>> problem.for_smoke().steps
        6
    """

    name: str
    title: str
    data: str
    network: Callable[[int], nn.Module]
    width: int
    smoke_width: int
    batch: int
    steps: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)

    def for_smoke(self) -> StabilityProblem:
        """The same problem, narrow and short."""
        return replace(self, width=self.smoke_width, batch=SMOKE_BATCH, steps=SMOKE_STEPS)

    def load(self, folder: Path | None, device: str, samples: int | None = None) -> Split:
        """Load the training data as inputs of the network. Nothing is downloaded.

        Args:
            folder: The data folder. None: that of ``mukron.data.data_folder``.
            device: Where the data are to lie.
            samples: Draw this many samples. None: all.

        Raises:
            DataError: The data are not here.
        """
        if self.data == TEXT:
            dataset = text_dataset(CHARACTERS, CONTEXT).subset(samples)
        else:
            dataset = load(self.data, folder, download=False, samples=samples)
        return Split(dataset.prepare(dataset.train.inputs), dataset.train.targets).to(device)

    def build(self, seed: int, device: str) -> nn.Module:
        """Build the network, with the same initial weights on every device.

        Args:
            seed: The seed of torch's global generator, which is set.
            device: Where the network is to lie.
        """
        torch.manual_seed(seed)
        return self.network(self.width).to(device)


def batches(data: Split, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches without end: every epoch in another order, without the incomplete batch at its end.

    Args:
        data: The samples.
        size: Batch size; if there are fewer samples, all of them.
        seed: The seed of the order, which is the same on every device.

    Yields:
        Inputs and targets.

    Example:
        >>> data = Split(torch.arange(5), torch.arange(5))
        >>> [len(next(batches(data, size, seed=0))[0]) for size in (2, 5, 8)]
        [2, 5, 5]
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(data))
    while True:
        order = torch.randperm(len(data), generator=generator).to(data.targets.device)
        for start in range(0, len(data) - size + 1, size):
            chosen = order[start : start + size]
            yield data.inputs[chosen], data.targets[chosen]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, averaged over samples and, where there are any, over positions.

    Args:
        model: The network; classes are the last dimension of its output.
        inputs: The batch.
        targets: Class numbers.

    Returns:
        The loss.

    Example:
        >>> round(float(loss_of(nn.Identity(), torch.zeros(3, 5, 2), torch.ones(3, 5).long())), 4)
        0.6931
    """
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def mlp(width: int, inputs: int = 64, classes: int = 10) -> nn.Module:
    """Build an MLP with biases and two hidden layers.

    Args:
        width: The size of both hidden layers.
        inputs: The numbers of a sample, which is flattened.
        classes: The number of outputs.

    Returns:
        The network.

    Example:
        >>> mlp(256)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


def _mnist_mlp(width: int) -> nn.Module:
    return mlp(width, inputs=784)


_PROBLEMS = (
    StabilityProblem("digits", "digits, MLP 64-256-256-10, batch 64", "digits", mlp, 256, 16, 64),
    StabilityProblem("mnist-64", "MNIST, MLP 784-256-256-10, batch 64", "mnist", _mnist_mlp, 256, 16, 64),
    StabilityProblem("mnist-256", "MNIST, MLP 784-256-256-10, batch 256", "mnist", _mnist_mlp, 256, 16, 256),
    StabilityProblem(
        "cnn", "digits, CNN with 16 and 32 channels, batch 64", "digits", lambda width: CNN(width, size=8), 16, 4, 64
    ),
    StabilityProblem(
        "resnet",
        "digits, ResNet with 16 and 32 channels, last norm of each block at zero, batch 64",
        *("digits", ZeroGateResNet, 16, 4, 64),
    ),
    StabilityProblem(
        "gpt",
        "synthetic text, GPT of 2 layers, width 64, 4 heads, 32 sequences of 32 characters",
        *(TEXT, lambda width: CharGPT(width, len(ALPHABET), CONTEXT), 64, 16, 32),
        options={"class_dim": -1},
    ),
)
STABILITY_PROBLEMS = {problem.name: problem for problem in _PROBLEMS}
