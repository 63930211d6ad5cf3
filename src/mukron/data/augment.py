"""Augmentations of whole batches on their device, each sample drawn on its own.

All draws are made on the CPU from one seed: the same batch and seed give the same result on every device, and the
global random numbers are left alone.
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
    """A function that augments a batch of images in [0, 1], in the order of the names; None without names.

    The function has no memory: its draws come from ``seed`` alone, so give every step its own. Cutout fills with
    ``mean``, one number a channel, or with zero; a data set's mean is what the normalization takes to zero.
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
    """Four black pixels around, then a crop of the old size from anywhere in that."""
    n, _, height, width = images.shape
    top, left = torch.randint(2 * PADDING + 1, (2, n, 1), generator=generator).to(images.device)
    rows = (top + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=images.device))[:, None, None, :]
    sample = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return torch.nn.functional.pad(images, (PADDING,) * 4)[sample, channel, rows, columns]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Left to right, half of the time."""
    flipped = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flipped.to(images.device)[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, generator: torch.Generator, fill: Sequence[float] | None = None) -> Tensor:
    """A square of 16 x 16 around any pixel is covered; less of it at the border."""
    n, channels, height, width = images.shape
    covered = []
    for size in (height, width):
        middle = torch.randint(size, (n, 1), generator=generator).to(images.device)
        away = torch.arange(size, device=images.device) - middle
        covered.append((away >= -HOLE // 2) & (away < HOLE // 2))
    hole = covered[0][:, None, :, None] & covered[1][:, None, None, :]
    colour = images.new_tensor(fill if fill is not None else [0.0] * channels)[:, None, None]
    return torch.where(hole, colour, images)
