"""What a data set is once it is loaded: whole tensors, which move to the training device in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mukron.data.errors import DataError


@dataclass(frozen=True)
class Split:
    """Samples: uint8 images [N, C, H, W], int64 word contexts [N, neighbours] or floats; targets, int64 [N]."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs):,} samples, but {len(self.targets):,} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))

    def subset(self, samples: int, seed: int) -> Split:
        """Some samples, drawn without replacement; a smaller subset of the same seed lies within a larger one.

        All of them stay as they are.
        """
        if samples == len(self):
            return self
        chosen = torch.from_numpy(draw(len(self), samples, seed)).to(self.targets.device)
        return Split(self.inputs[chosen], self.targets[chosen])


@dataclass(frozen=True)
class Dataset:
    """A training and a test split; images know how they are normalized, texts know their words."""

    name: str
    train: Split
    test: Split
    classes: int
    vocabulary: tuple[str, ...] = ()  # for text: the words by number
    mean: tuple[float, ...] | None = None  # per channel, of the whole training split scaled to [0, 1]: a subset
    std: tuple[float, ...] | None = None  # is normalized like the whole

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def subset(self, samples: int | None = None, test_samples: int | None = None, seed: int = 0) -> Dataset:
        """Some samples of either split; all of them where no number is given."""
        return replace(
            self,
            train=self.train if samples is None else self.train.subset(samples, seed),
            test=self.test if test_samples is None else self.test.subset(test_samples, seed),
        )

    def prepare(
        self,
        inputs: Tensor,
        dtype: torch.dtype = torch.float32,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """A batch as the network takes it: images to [0, 1], augmented, normalized; others as they are."""
        if self.mean is None or self.std is None:
            if augment is not None:
                raise DataError(f"{self.name}: augmentations are for images whose mean and std are known")
            return inputs.to(dtype) if inputs.is_floating_point() else inputs
        x = inputs.to(torch.promote_types(dtype, torch.float32)) / 255  # at least float32, until all is done
        if augment is not None:
            x = augment(x)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((x - mean) / std).to(dtype)


def image_dataset(name: str, train: Split, test: Split, classes: int) -> Dataset:
    """Images with the mean and std of their training split."""
    mean, std = _moments(train.inputs)
    return Dataset(name, train, test, classes, mean=mean, std=std)


def as_dataset(name: str, value: Any) -> Dataset:
    """A user's own data: inputs and targets, or such a pair for training and one for testing, or a whole ``Dataset``.

    Of one pair there is nothing to test on, and no test numbers are recorded.
    Tensors or NumPy arrays; targets are class numbers of any integer type, or booleans (0 and 1). Images of uint8,
    [N, H, W] or [N, C, H, W], are normalized like the built-in ones; other inputs are taken as they are.
    """
    if isinstance(value, Dataset):
        return checked(replace(value, name=name))
    try:
        first, second = value
        single = isinstance(first, (Tensor, np.ndarray))
        pairs = [(first, second), (first[:0], second[:0])] if single else [tuple(first), tuple(second)]
        train, test = (Split(_images(_tensor(x)), _tensor(y)) for x, y in pairs)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: expected tensors (inputs, targets), or ((inputs, targets), (test inputs, test targets)): {error}"
        ) from error
    dataset = checked(Dataset(name, train, test, classes=0))
    if train.inputs.dtype == torch.uint8 and train.inputs.ndim == 4:
        return image_dataset(name, dataset.train, dataset.test, dataset.classes)
    return dataset


def checked(dataset: Dataset) -> Dataset:
    """The same with targets of int64, if it can be trained on. No classes: as many as the targets show."""
    name = dataset.name
    train, test = (Split(split.inputs, _class_numbers(name, split.targets)) for split in (dataset.train, dataset.test))
    if not len(train):
        raise DataError(f"{name}: there are no samples to train on")
    if len(test) and test.inputs.shape[1:] != train.inputs.shape[1:]:
        here, there = list(train.inputs.shape[1:]), list(test.inputs.shape[1:])
        raise DataError(f"{name}: a sample to train on is {here}, but one to test on is {there}")
    highest = max(int(split.targets.max()) for split in (train, test) if len(split))
    if dataset.classes and highest >= dataset.classes:
        raise DataError(f"{name}: target {highest}; those of {dataset.classes} classes go to {dataset.classes - 1}")
    return replace(dataset, train=train, test=test, classes=dataset.classes or highest + 1)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def _images(inputs: Tensor) -> Tensor:
    """Grey images get their one channel."""
    return inputs[:, None] if inputs.dtype == torch.uint8 and inputs.ndim == 3 else inputs


def _class_numbers(name: str, targets: Tensor) -> Tensor:
    if not targets.numel():
        return targets.new_zeros(0, dtype=torch.int64)
    if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
        raise DataError(f"{name}: targets are class numbers [N], got {list(targets.shape)} {targets.dtype}")
    numbers = targets.to(torch.int64)
    if numbers.min() < 0:
        raise DataError(f"{name}: targets are class numbers from 0 on, got {int(numbers.min())}")
    return numbers


def draw(total: int, samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Which samples a subset holds. NumPy's RandomState, whose stream is the same in every version of it."""
    if not 0 < samples <= total:
        raise DataError(f"a subset of {samples:,} samples was asked for; there are {total:,}")
    return np.random.RandomState(seed % 2**32).permutation(total)[:samples]


def centred_one_hot(labels: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets for the squared error: one-hot minus 1/classes, so that they sum to zero."""
    return torch.nn.functional.one_hot(labels, classes).to(dtype) - 1 / classes


def _moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and std by channel, from how often each of the 256 levels occurs."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(weights @ levels)
        variance = float(weights @ (levels - mean) ** 2)
        means.append(mean)
        stds.append(max(variance**0.5, 1 / 255))  # a channel that never changes stays finite
    return tuple(means), tuple(stds)
