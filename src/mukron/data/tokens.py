"""Language data: a text as bytes, or an array of token numbers, cut into windows whose targets are the next tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mukron import readers as read
from mukron.data.dataset import Dataset, Split
from mukron.data.errors import DataError
from mukron.data.store import StoredDataset

BYTES = 256
LENGTH = 64  # tokens of a window
TEST_PART = 0.1  # of a text without a test file of its own: its end
ARRAYS = (".npy",)  # endings of files that hold token numbers
LARGEST = 2**31 - 1  # token number
OTHER_FORMATS = {  # how files begin that are no texts
    b"PK\x03\x04": "an archive (.zip, NumPy's .npz or torch's .pt)",
    b"\x93NUMPY": "an array of NumPy without the ending .npy",
    b"\x1f\x8b": "compressed (.gz)",
    b"\xfd7zXZ\x00": "compressed (.xz)",
    b"BZh": "compressed (.bz2)",
}


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


def own_text(path: str | Path, length: int = LENGTH, vocabulary: int | None = None) -> Dataset:
    """Read a file of one's own: a text, whose bytes are the tokens, or token numbers in an array of NumPy (.npy).

    The last tenth is for testing.

    Args:
        path: The file.
        length: The tokens of a window.
        vocabulary: The number of tokens; by default 256 for a text, and what an array shows.

    Returns:
        The data set, with the path as its name, as it was given.

    Raises:
        DataError: The file cannot be read, is too short, or holds something else; or an option is no whole number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "text.txt"
        ...     _ = file.write_text("to be or not to be, that is the question. " * 100)
        ...     dataset = own_text(file, length=32)
        >>> dataset.train.inputs.shape, dataset.classes
        (torch.Size([118, 32]), 256)
    """
    name = str(path)
    if vocabulary is not None:
        _check_whole(name, "vocabulary", vocabulary)
    try:
        if Path(path).suffix in ARRAYS:
            numbers = _numbers(name)
            dataset = _split(name, numbers, length, int(numbers.max()) + 1 if len(numbers) else 0, "numbers")
        else:
            dataset = text_dataset(name, _text(name), length)
    except IsADirectoryError:
        raise DataError(
            f"{name}: is a folder, and no data set has this name; give a text file or token numbers (.npy)"
        ) from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}; known by name: see 'mukron data list'") from None
    return dataset if vocabulary is None else _with_vocabulary(dataset, vocabulary)


def _numbers(name: str) -> Tensor:
    """The token numbers of a file that NumPy wrote."""
    try:
        with open(name, "rb") as file:
            array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{name}: expected an array of NumPy, as numpy.save writes it: {error}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{list(array.shape)} {array.dtype}" if isinstance(array, np.ndarray) else "several arrays"
        raise DataError(f"{name}: expected token numbers [tokens], got {found}")
    if len(array) and int(array.min()) < 0:
        raise DataError(f"{name}: token numbers begin at 0, got {int(array.min())}")
    if len(array) and int(array.max()) > LARGEST:
        raise DataError(f"{name}: token number {int(array.max())} is too large; the largest allowed is {LARGEST}")
    return torch.from_numpy(array.astype(np.int64))


def _text(name: str) -> bytes:
    """The bytes of a text file."""
    content = Path(name).read_bytes()
    for start, kind in OTHER_FORMATS.items():
        if content.startswith(start):
            raise DataError(
                f"{name}: is {kind}, not a text; unpack it, or save its token numbers with numpy.save as a .npy file"
            )
    return content


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
    _check_whole(name, "length", length)
    number = (len(numbers) - 1) // length
    if number < 1:
        raise DataError(f"{name}: {len(numbers):,} tokens, too few for a window of length={length} and its targets")
    inputs, targets = (numbers[start : start + number * length].view(number, length) for start in (0, 1))
    return Split(inputs.contiguous(), targets.contiguous())


def _split(name: str, numbers: Tensor, length: int, vocabulary: int, kind: str) -> Dataset:
    _check_whole(name, "length", length)
    end = len(numbers) - int(TEST_PART * len(numbers))
    if len(numbers) - end <= length:
        raise DataError(
            f"{name}: {len(numbers):,} tokens are too few: the last tenth, which is for testing, must hold a window of "
            f"length={length} and the token after it. Give at least {10 * (length + 1):,} tokens, or a shorter length"
        )
    train, test = (windows(part, length, name) for part in (numbers[:end], numbers[end:]))
    return Dataset(name, train, test, vocabulary, tokens=kind)


def _check_whole(name: str, option: str, value: object) -> None:
    try:
        read.whole(1)(value)
    except ValueError as error:
        raise DataError(f"{name}: {option}={read.shown(value)}: {error}") from None


def _with_vocabulary(dataset: Dataset, vocabulary: int) -> Dataset:
    if vocabulary < dataset.classes:
        raise DataError(f"{dataset.name}: vocabulary={vocabulary}, but there are {dataset.classes} tokens")
    return replace(dataset, classes=vocabulary)


def _bytes(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
