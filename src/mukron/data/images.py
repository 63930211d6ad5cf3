"""Read images: MNIST's IDX files, CIFAR's binary files, and the digits that come with scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mukron.data.dataset import Dataset, Split, image_dataset
from mukron.data.errors import DataError, need
from mukron.data.store import StoredDataset


def read_mnist(stored: StoredDataset) -> Dataset:
    """Read MNIST, or a data set with the same names of files."""

    def split(prefix: str) -> Split:
        images, labels = (
            parse_idx(stored.content(name), stored.files[name], dimensions)
            for name, dimensions in ((f"{prefix}-images-idx3-ubyte", 3), (f"{prefix}-labels-idx1-ubyte", 1))
        )
        return Split(images[:, None], labels.long())

    return image_dataset(stored.source.name, split("train"), split("t10k"), stored.source.classes)


def read_cifar10(stored: StoredDataset) -> Dataset:
    """Read CIFAR-10."""
    return _read_cifar(stored, [f"data_batch_{number}.bin" for number in range(1, 6)], "test_batch.bin", label_bytes=1)


def read_cifar100(stored: StoredDataset) -> Dataset:
    """Read CIFAR-100 with its 100 fine classes; the 20 coarse ones are skipped."""
    return _read_cifar(stored, ["train.bin"], "test.bin", label_bytes=2)


def read_digits(stored: StoredDataset) -> Dataset:
    """Read scikit-learn's 1,797 digits of 8x8 pixels; always the same 1,500 are for training, and 297 for testing."""
    digits = need("sklearn.datasets", "scikit-learn", "the digits").load_digits()
    images = torch.from_numpy(np.rint(digits.images * 255 / 16).astype(np.uint8))[:, None]  # 17 levels
    order = np.random.RandomState(0).permutation(len(images))
    train, test = (
        Split(images[part], torch.from_numpy(digits.target[part]).long()) for part in (order[:1500], order[1500:])
    )
    return image_dataset(stored.source.name, train, test, stored.source.classes)


def parse_idx(data: bytes, path: Path, dimensions: int) -> Tensor:
    """Parse an IDX file: the bytes 0, 0, 8 (unsigned bytes) and dimensions; their sizes as big-endian int32; values."""
    start = 4 + 4 * dimensions
    if data[:4] != bytes((0, 0, 8, dimensions)) or len(data) < start:
        raise DataError(
            f"{path}: not an IDX file of bytes in {dimensions} dimensions (begins with {data[:4].hex() or 'nothing'})"
        )
    shape = [int(size) for size in np.frombuffer(data, ">i4", dimensions, offset=4)]
    if len(data) != start + math.prod(shape):
        raise DataError(f"{path}: {len(data):,} bytes, expected {start + math.prod(shape):,}: cut off or damaged")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:].reshape(shape)


def parse_cifar(data: bytes, path: Path, label_bytes: int, classes: int) -> Split:
    """Parse a CIFAR file: rows of labels (the last one is used) and 3 x 32 x 32 pixels, one byte each."""
    row = label_bytes + 3 * 32 * 32
    if not data or len(data) % row:
        raise DataError(f"{path}: {len(data):,} bytes is no whole number of rows of {row:,} bytes: cut off or damaged")
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, row)
    labels = rows[:, label_bytes - 1].long()
    if labels.max() >= classes:
        raise DataError(f"{path}: label {labels.max()}, expected 0 to {classes - 1}: not this data set's file")
    return Split(rows[:, label_bytes:].reshape(-1, 3, 32, 32), labels)


def _read_cifar(stored: StoredDataset, train: list[str], test: str, label_bytes: int) -> Dataset:
    def split(name: str) -> Split:
        return parse_cifar(stored.content(name), stored.files[name], label_bytes, stored.source.classes)

    batches = [split(name) for name in train]
    whole = Split(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches]))
    return image_dataset(stored.source.name, whole, split(test), stored.source.classes)
