"""Language data: a text as bytes, or an array of token numbers, cut into windows whose targets are the next tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mukron.data.dataset import Dataset, Split
from mukron.data.errors import DataError
from mukron.data.store import StoredDataset

BYTES = 256
LENGTH = 64  # tokens of a window
TEST_PART = 0.1  # of a text without a test file of its own: its end
ARRAYS = (".npy",)  # endings of files that hold token numbers


def read_shipped_text(stored: StoredDataset, length: int = LENGTH) -> Dataset:
    """Read the text that comes with the package."""
    content = (files("mukron.data") / "texts" / f"{stored.source.name}.txt").read_bytes()
    return text_dataset(stored.source.name, content, length)


def read_text_file(stored: StoredDataset, length: int = LENGTH) -> Dataset:
    """Read a data set that is one text file."""
    (file,) = stored.source.files
    return text_dataset(stored.source.name, stored.content(file.name), length)


def read_wikitext_bytes(stored: StoredDataset, length: int = LENGTH) -> Dataset:
    """Read WikiText-2 as bytes."""
    train, test = (stored.content(name) for name in ("wiki.train.tokens", "wiki.test.tokens"))
    return Dataset(
        stored.source.name,
        windows(_bytes(train), length, stored.source.name),
        windows(_bytes(test), length, stored.source.name),
        BYTES,
        tokens="bytes",
    )


def own_text(path: Path, length: int = LENGTH, vocabulary: int | None = None) -> Dataset:
    """Read a file of one's own: a text, whose bytes are the tokens, or token numbers in an array of NumPy (.npy).

    The last tenth is for testing.

    Args:
        path: The file.
        length: The tokens of a window.
        vocabulary: The number of tokens; by default 256 for a text, and what an array shows.

    Returns:
        The data set, with the path as its name.

    Raises:
        DataError: The file cannot be read, is too short, or holds something else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "text.txt"
        ...     _ = file.write_text("to be or not to be, that is the question. " * 100)
        ...     dataset = own_text(file, length=32)
        >>> dataset.train.inputs.shape, dataset.classes
        (torch.Size([118, 32]), 256)
    """
    try:
        if path.suffix not in ARRAYS:
            dataset = text_dataset(str(path), path.read_bytes(), length)
            return dataset if vocabulary is None else _with_vocabulary(dataset, vocabulary)
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; known by name: see 'mukron data list'") from None
    except ValueError as error:
        raise DataError(f"{path}: expected an array of NumPy: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: expected token numbers [tokens], got {list(array.shape)} {array.dtype}")
    numbers = torch.from_numpy(array.astype(np.int64))
    if len(numbers) and int(numbers.min()) < 0:
        raise DataError(f"{path}: token numbers begin at 0, got {int(numbers.min())}")
    dataset = _split(str(path), numbers, length, int(numbers.max()) + 1 if len(numbers) else 0, "numbers")
    return dataset if vocabulary is None else _with_vocabulary(dataset, vocabulary)


def text_dataset(name: str, content: bytes, length: int = LENGTH) -> Dataset:
    """Cut a text into windows of bytes; the last tenth is for testing.

    Args:
        name: The name of the data set.
        content: The text.
        length: The bytes of a window.

    Returns:
        The data set.

    Raises:
        DataError: The text is too short.

    Example:
        >>> text_dataset("abc", b"abc" * 100, length=16).train.targets[0, :3].tolist()
        [98, 99, 97]
    """
    return _split(name, _bytes(content), length, BYTES, "bytes")


def windows(numbers: Tensor, length: int, name: str) -> Split:
    """Cut tokens into windows that follow each other; the target of a token is the next one.

    Args:
        numbers: Token numbers [tokens].
        length: The tokens of a window.
        name: Names the data in errors.

    Returns:
        Windows [windows, length] with their targets.

    Raises:
        DataError: There are not enough tokens for one window.

    Example:
        >>> split = windows(torch.arange(7), 3, "numbers")
        >>> split.inputs.tolist(), split.targets.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    if length < 1:
        raise DataError(f"{name}: length={length}: expected at least 1 token in a window")
    number = (len(numbers) - 1) // length
    if number < 1:
        raise DataError(f"{name}: {len(numbers):,} tokens, too few for a window of length={length} and its targets")
    inputs, targets = (numbers[start : start + number * length].view(number, length) for start in (0, 1))
    return Split(inputs.contiguous(), targets.contiguous())


def _split(name: str, numbers: Tensor, length: int, vocabulary: int, kind: str) -> Dataset:
    end = len(numbers) - int(TEST_PART * len(numbers))
    train, test = (windows(part, length, name) for part in (numbers[:end], numbers[end:]))
    return Dataset(name, train, test, vocabulary, tokens=kind)


def _with_vocabulary(dataset: Dataset, vocabulary: int) -> Dataset:
    if vocabulary < dataset.classes:
        raise DataError(f"{dataset.name}: vocabulary={vocabulary}, but there are {dataset.classes} tokens")
    return replace(dataset, classes=vocabulary)


def _bytes(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
