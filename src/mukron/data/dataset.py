"""A data set in memory: whole tensors, which move to the training device at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mukron.data.errors import DataError

IGNORED = -100  # a target that does not count, as in torch's cross-entropy


@dataclass(frozen=True)
class Split:
    """Samples with their targets.

    Attributes:
        inputs: uint8 images [N, C, H, W], int64 words or tokens [N, positions], or floats [N, ...].
        targets: int64 class numbers [N], those of every position [N, positions], or floats [N] or [N, ..., outputs]
            (regression).

    Raises:
        DataError: There are not as many targets as samples.

    Example:
        >>> import torch
        >>> from mukron.data import Split
        >>> split = Split(torch.rand(5, 3), torch.tensor([0, 1, 0, 1, 0]))
        >>> len(split.subset(2, seed=0))
        2
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs):,} samples, but {len(self.targets):,} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Split:
        """Move the split to a device.

        Args:
            device: The device.

        Returns:
            The split on the device.
        """
        return Split(self.inputs.to(device), self.targets.to(device))

    def subset(self, samples: int, seed: int) -> Split:
        """Draw some samples without replacement. A smaller subset of the same seed is contained in a larger one.

        Args:
            samples: The number of samples. If it is that of the split, nothing is drawn and the order is kept.
            seed: The seed.

        Returns:
            The subset.

        Raises:
            DataError: There are not as many samples.
        """
        if samples == len(self):
            return self
        chosen = torch.from_numpy(draw(len(self), samples, seed)).to(self.targets.device)
        return Split(self.inputs[chosen], self.targets[chosen])


@dataclass(frozen=True)
class Dataset:
    """A data set in memory: a training and a test split, and how images are normalized.

    Attributes:
        name: The name of the data set.
        train: The training split.
        test: The test split, which may be empty.
        classes: The number of classes; of outputs, for regression.
        vocabulary: The words by number, for text; empty for other data.
        mean: The mean of each channel over the whole training split, scaled to [0, 1]; None if inputs are not
            normalized. A subset is normalized like the whole.
        std: The standard deviation of each channel; None if inputs are not normalized.
        tokens: For language data, what a token is: "bytes" of a text, or "numbers"; empty for other data.

    Example:
        >>> import torch
        >>> from mukron.data import Dataset, Split
        >>> train, test = Split(torch.rand(6, 3), torch.arange(6) % 2), Split(torch.rand(2, 3), torch.arange(2))
        >>> dataset = Dataset("example", train, test, classes=2)
        >>> dataset.input_shape
        (3,)
        >>> len(dataset.subset(samples=4).train)
        4
    """

    name: str
    train: Split
    test: Split
    classes: int
    vocabulary: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    tokens: str = ""

    @property
    def regression(self) -> bool:
        """Whether targets are real numbers."""
        return self.train.targets.is_floating_point()

    @property
    def token_numbers(self) -> bool:
        """Whether inputs are the numbers of tokens: whole numbers [N, positions], with a class for every position."""
        return _token_numbers(self.train)

    @property
    def positions(self) -> int:
        """How many targets a sample has: one, or one for each of its positions."""
        shape = self.train.targets.shape
        return prod(shape[1:-1] if self.regression else shape[1:])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Move both splits to a device.

        Args:
            device: The device.

        Returns:
            The data set on the device.
        """
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def subset(self, samples: int | None = None, test_samples: int | None = None, seed: int = 0) -> Dataset:
        """Draw some samples of each split.

        Args:
            samples: The number of training samples; by default all.
            test_samples: The number of test samples; by default all.
            seed: The seed.

        Returns:
            The data set with fewer samples.

        Raises:
            DataError: There are not as many samples.
        """
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
        """Turn a batch of samples into the input of a network.

        Images are scaled to [0, 1], augmented and normalized. Other floats are converted to the dtype, and word numbers
        are returned as they are.

        Args:
            inputs: The samples.
            dtype: The floating-point type of the result.
            augment: An augmentation, as ``augmentation`` makes it.

        Returns:
            The input of the network.

        Raises:
            DataError: An augmentation is given for data other than images.
        """
        if self.mean is None or self.std is None:
            if augment is not None:
                raise DataError(f"{self.name}: augmentations are for images whose mean and std are known")
            return inputs.to(dtype) if inputs.is_floating_point() else inputs
        x = inputs.to(torch.promote_types(dtype, torch.float32)) / 255  # at least float32 until the end
        if augment is not None:
            x = augment(x)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((x - mean) / std).to(dtype)


def image_dataset(name: str, train: Split, test: Split, classes: int) -> Dataset:
    """Make a data set of images, normalized by the mean and standard deviation of its training split."""
    mean, std = _moments(train.inputs)
    return Dataset(name, train, test, classes, mean=mean, std=std)


def as_dataset(name: str, value: Any) -> Dataset:
    """Make a data set of a user's tensors or NumPy arrays.

    Args:
        name: The name of the data set.
        value: ``(inputs, targets)``, ``((inputs, targets), (test_inputs, test_targets))`` or a ``Dataset``. Targets are
            class numbers of any integer type, or booleans (0 and 1), one for a sample or for each of its positions,
            where -100 is ignored; or real numbers, one or several for a sample. Images of uint8, [N, H, W] or
            [N, C, H, W], are normalized like the built-in ones; other inputs are taken as they are.

    Returns:
        The data set. Without test data its test split is empty, and training records no test metrics.

    Raises:
        DataError: The value has another form, the splits differ in the shape of a sample, or targets are neither
            class numbers nor real numbers.

    Example:
        >>> import torch
        >>> from mukron.data import as_dataset
        >>> dataset = as_dataset("example", (torch.rand(4, 3), torch.tensor([0, 1, 2, 1])))
        >>> dataset.classes, len(dataset.test)
        (3, 0)
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
    """Check a data set, and return it with int64 targets; classes=0 is replaced by the number that the targets show."""
    name = dataset.name
    train, test = _checked_split(name, dataset.train, "train"), _checked_split(name, dataset.test, "test")
    if not len(train):
        raise DataError(f"{name}: there are no samples to train on")
    if len(test) and test.inputs.shape[1:] != train.inputs.shape[1:]:
        train_shape, test_shape = list(train.inputs.shape[1:]), list(test.inputs.shape[1:])
        raise DataError(f"{name}: a sample to train on is {train_shape}, but one to test on is {test_shape}")
    if len(test) and test.targets.is_floating_point() != train.targets.is_floating_point():
        raise DataError(f"{name}: targets to train on are {train.targets.dtype}, those to test on {test.targets.dtype}")
    if len(test) and test.targets.shape[1:] != train.targets.shape[1:]:
        train_shape, test_shape = list(train.targets.shape[1:]), list(test.targets.shape[1:])
        raise DataError(f"{name}: the targets of a sample are {train_shape} to train on, but {test_shape} to test on")
    if train.targets.is_floating_point():
        return replace(
            dataset, train=train, test=test, classes=1 if train.targets.ndim == 1 else train.targets.shape[-1]
        )
    highest = max(int(split.targets.max()) for split in (train, test) if len(split))
    if dataset.classes and highest >= dataset.classes:
        raise DataError(f"{name}: target {highest}; those of {dataset.classes} classes go to {dataset.classes - 1}")
    return replace(dataset, train=train, test=test, classes=dataset.classes or highest + 1)


def _checked_split(name: str, split: Split, purpose: str) -> Split:
    targets = _targets(name, split.targets)
    if len(targets) and not targets.is_floating_point() and bool((targets == IGNORED).all()):
        raise DataError(
            f"{name}: all targets of the {len(targets):,} samples to {purpose} on are {IGNORED}, which is ignored; "
            "give at least one position a class number"
        )
    if _token_numbers(Split(split.inputs, targets)):
        return Split(split.inputs.to(torch.int64), targets)  # embeddings take no smaller numbers
    return Split(split.inputs, targets)


def _token_numbers(split: Split) -> bool:
    inputs, targets = split.inputs, split.targets
    whole = not (inputs.is_floating_point() or inputs.is_complex() or inputs.dtype == torch.bool)
    return whole and inputs.ndim == 2 and targets.ndim == 2 and not targets.is_floating_point()


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def _images(inputs: Tensor) -> Tensor:
    """Add the channel of grey images."""
    return inputs[:, None] if inputs.dtype == torch.uint8 and inputs.ndim == 3 else inputs


def _targets(name: str, targets: Tensor) -> Tensor:
    """int64 class numbers, or floats."""
    if targets.is_complex() or not targets.ndim:
        raise DataError(f"{name}: targets are class numbers or real numbers, got {list(targets.shape)} {targets.dtype}")
    if targets.is_floating_point():
        if not bool(torch.isfinite(targets).all()):
            raise DataError(f"{name}: targets are not all finite")
        return targets
    numbers = targets.to(torch.int64)
    allowed = numbers >= 0 if targets.ndim == 1 else (numbers >= 0) | (numbers == IGNORED)
    if numbers.numel() and not bool(allowed.all()):
        ignored = "" if targets.ndim == 1 else f", or {IGNORED} for positions without a target"
        raise DataError(f"{name}: targets are class numbers from 0 on{ignored}, got {int(numbers[~allowed][0])}")
    return numbers


def draw(total: int, samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw the numbers of the samples of a subset, by NumPy's RandomState, which is the same in every version."""
    if not 0 < samples <= total:
        raise DataError(f"a subset of {samples:,} samples was asked for; there are {total:,}")
    return np.random.RandomState(seed % 2**32).permutation(total)[:samples]


def centred_one_hot(labels: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return targets for the squared error: one-hot minus 1/classes, so that they sum to zero over the classes.

    Args:
        labels: Class numbers [N].
        classes: The number of classes.
        dtype: The type of the targets.

    Returns:
        Targets [N, classes].

    Example:
        >>> import torch
        >>> from mukron.data import centred_one_hot
        >>> centred_one_hot(torch.tensor([1]), classes=2)
        tensor([[-0.5000,  0.5000]])
    """
    return torch.nn.functional.one_hot(labels, classes).to(dtype) - 1 / classes


def _moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the exact mean and standard deviation of each channel, from the counts of the 256 levels."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(weights @ levels)
        variance = float(weights @ (levels - mean) ** 2)
        means.append(mean)
        stds.append(max(variance**0.5, 1 / 255))  # avoids division by zero for a constant channel
    return tuple(means), tuple(stds)
