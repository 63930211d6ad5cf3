"""Augmentations of whole batches on their device, with random numbers drawn independently for each sample.

All random numbers are drawn on the CPU from one seed: the same batch and seed give the same result on every device, and
torch's global random state does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mukron.data.autoaugment import autoaugment
from mukron.data.errors import DataError

PADDING, HOLE = 4, 16  # pixels

AUGMENTATIONS = ("crop", "flip", "cutout", "autoaugment")


def augmentation(
    names: Sequence[str], seed: int, mean: Sequence[float] | None = None
) -> Callable[[Tensor], Tensor] | None:
    """Make a function that augments a batch of images in [0, 1].

    Args:
        names: The augmentations, in the order in which they are applied: ``"crop"``, ``"flip"``, ``"cutout"`` and
            ``"autoaugment"``.
        seed: The seed of all random numbers. The function has no state, so give every step a seed of its own.
        mean: The colour with which cutout fills, one number per channel; by default black. With the mean of the data
            set, the filled pixels are zero after normalization.

    Returns:
        The function from a batch [samples, channels, height, width] to the augmented batch; None without names.

    Raises:
        DataError: An augmentation is unknown.

    Example:
        >>> import torch
        >>> from mukron.data import augmentation
        >>> augment = augmentation(["crop", "flip"], seed=0)
        >>> augment(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])
    """
    unknown = [name for name in names if name not in AUGMENTATIONS]
    if unknown:
        raise DataError(f"unknown augmentation {unknown[0]!r}; known: {', '.join(AUGMENTATIONS)}")
    if not names:
        return None
    steps: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
        "crop": crop,
        "flip": flip,
        "cutout": lambda images, generator: cutout(images, generator, mean),
        "autoaugment": autoaugment,
    }

    def augment(images: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for name in names:
            images = steps[name](images, generator)
        return images

    return augment


def crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad each image with four black pixels on every side, and crop the old size at a random position."""
    n, _, height, width = images.shape
    top, left = torch.randint(2 * PADDING + 1, (2, n, 1), generator=generator).to(images.device)
    rows = (top + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=images.device))[:, None, None, :]
    sample = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return torch.nn.functional.pad(images, (PADDING,) * 4)[sample, channel, rows, columns]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each image horizontally with probability 1/2."""
    flipped = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flipped.to(images.device)[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, generator: torch.Generator, fill: Sequence[float] | None = None) -> Tensor:
    """Cover a square of 16 x 16 pixels around a random pixel; at the border, the part of it inside the image."""
    n, channels, height, width = images.shape
    covered = []
    for size in (height, width):
        middle = torch.randint(size, (n, 1), generator=generator).to(images.device)
        offset = torch.arange(size, device=images.device) - middle
        covered.append((offset >= -HOLE // 2) & (offset < HOLE // 2))
    hole = covered[0][:, None, :, None] & covered[1][:, None, None, :]
    colour = images.new_tensor(fill if fill is not None else [0.0] * channels)[:, None, None]
    return torch.where(hole, colour, images)
