"""Synthetic data, for smoke runs of networks that cannot be trained on digits."""

from __future__ import annotations

import torch

from mukron.data import Dataset, Split, load


def large_digits() -> Dataset:
    """Returns digits enlarged to 32 x 32 pixels, for networks that pool five times."""
    digits = load("digits")
    train, test = (Split(_enlarged(split.inputs), split.targets) for split in (digits.train, digits.test))
    return Dataset("large_digits", train, test, digits.classes, mean=digits.mean, std=digits.std)


def _enlarged(images: torch.Tensor) -> torch.Tensor:
    return images.repeat_interleave(4, dim=-2).repeat_interleave(4, dim=-1)


def sentences(words: int = 16, samples: int = 64) -> Dataset:
    """Returns contexts of a synthetic language in which the first neighbour determines the middle word.

    Args:
        words: The size of the vocabulary.
        samples: The number of training samples, and of test samples.

    Returns:
        The data set.

    Example:
        >>> sentences(samples=4).train.inputs.shape
        torch.Size([4, 8])
    """
    generator = torch.Generator().manual_seed(0)
    contexts = torch.randint(words, (2 * samples, 8), generator=generator)
    targets = (contexts[:, 0] + 1) % words
    train, test = Split(contexts[:samples], targets[:samples]), Split(contexts[samples:], targets[samples:])
    return Dataset("sentences", train, test, words)
