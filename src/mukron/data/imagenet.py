"""Read a folder of images by class, train/CLASS/*.JPEG and val/CLASS/*.JPEG, as ImageNet is distributed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mukron.data.dataset import Dataset, Split, draw
from mukron.data.errors import DataError, need
from mukron.data.store import StoredDataset

if TYPE_CHECKING:
    from PIL.Image import Image

# ImageNet's usual mean and standard deviation, those of the whole data set, whichever images are read.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = (".jpeg", ".jpg", ".png")
CHUNK = 64  # the number of images that a thread decodes at a time


def read_imagenet(
    stored: StoredDataset, size: int = 64, samples: int | None = None, test_samples: int | None = None, seed: int = 0
) -> Dataset:
    """Read images, resized to ``size`` pixels at their shorter side and cropped to the middle square."""
    if size < 1:
        raise DataError(f"size={size}: expected the side of an image in pixels")
    train, val = stored.files["train"], stored.files["val"]
    classes = _classes(train)
    unknown = set(_classes(val)) - set(classes)
    if unknown:
        raise DataError(f"{val}: classes that {train} does not have: {', '.join(sorted(unknown)[:5])}")
    chosen = [_choose(train, classes, samples, seed), _choose(val, classes, test_samples, seed)]
    _check_memory(sum(map(len, chosen)), size)
    train_split, test_split = (_decode(images, size) for images in chosen)
    return Dataset(stored.source.name, train_split, test_split, len(classes), mean=MEAN, std=STD)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; expected a folder that holds one for every class")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{folder}: expected a folder for every class, with images in it; sort the images into these")
    return classes


def _choose(folder: Path, classes: list[str], samples: int | None, seed: int) -> list[tuple[Path, int]]:
    """Return paths and class numbers in order; or some of them, drawn like any subset."""
    images = [
        (folder / name / image, number)
        for number, name in enumerate(classes)
        if (folder / name).is_dir()
        for image in sorted(os.listdir(folder / name))
        if image.lower().endswith(SUFFIXES) and not image.startswith(".")
    ]
    if not images:
        raise DataError(f"{folder}: no images ({', '.join(SUFFIXES)}) in the folders of its classes")
    return images if samples is None else [images[number] for number in draw(len(images), samples, seed)]


def _decode(images: list[tuple[Path, int]], size: int) -> Split:
    need("PIL", "pillow", "reading images")
    from PIL import Image, ImageOps, UnidentifiedImageError

    pixels = np.empty((len(images), 3, size, size), np.uint8)

    def decode(start: int) -> None:
        for number, (path, _) in enumerate(images[start : start + CHUNK], start):
            try:
                with Image.open(path) as image:
                    image.draft("RGB", (2 * size, 2 * size))  # decodes a JPEG at the lowest sufficient resolution
                    middle = ImageOps.fit(_rgb(image, path), (size, size), Image.Resampling.BILINEAR)
            except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
                raise DataError(f"{path}: not an image, or damaged ({error}); replace it or take it away") from error
            pixels[number] = np.asarray(middle).transpose(2, 0, 1)

    with ThreadPoolExecutor() as threads:  # Pillow releases the GIL while it decodes
        list(threads.map(decode, range(0, len(images), CHUNK)))
    return Split(torch.from_numpy(pixels), torch.tensor([label for _, label in images]))


def _rgb(image: Image, path: Path) -> Image:
    """Convert to eight bits per colour without transparency; Pillow would turn 16-bit grey into white."""
    from PIL.Image import fromarray

    if image.mode == "F":
        raise DataError(f"{path}: its pixels are floats (mode F); make it an image of 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(f"{path}: its pixels go from {values.min()} to {values.max()}; 8 or 16 bits are read")
        image = fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _check_memory(images: int, size: int) -> None:
    needed, free = images * 3 * size**2, free_memory()
    if free is not None and needed > free:
        raise DataError(
            f"{images:,} images of {size}x{size} take {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB "
            "are free; read fewer with samples= and test_samples=, or smaller ones with size="
        )


def free_memory() -> int | None:
    """Return the bytes of memory that are available; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
