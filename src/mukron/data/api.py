"""The functions for users: load a data set by name, fetch and verify its files, read the evaluation lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mukron.data.catalogue import get_source, is_known
from mukron.data.dataset import Dataset
from mukron.data.download import MakeBar, obtain
from mukron.data.errors import DataError
from mukron.data.store import StoredDataset, data_folder, locate
from mukron.data.text import Pair, Question, parse_analogies, parse_pairs
from mukron.data.tokens import own_text


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    download: bool = True,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """Load a data set by name, or a file of your own. What is missing in the data folder is downloaded.

    Args:
        name: A key of ``DATASETS``, such as ``"digits"`` or ``"cifar10"``; or the path of a text (any ending or
            none), whose bytes are the tokens, or of token numbers (.npy).
        folder: The data folder; by default that of ``data_folder``.
        download: Whether missing files may be downloaded.
        samples: The number of training samples to draw; by default all.
        test_samples: The number of test samples to draw; by default all.
        seed: The seed with which samples are drawn.
        **options: Options of the data set: texts take length=64, the tokens of a window, and token numbers
            vocabulary= too; wikitext2 takes min_count=128 and window=4, imagenet takes size=64.

    Returns:
        The data set.

    Raises:
        DataError: The data set or an option is unknown, files are missing or damaged, or the download failed.

    Example:
        >>> from mukron.data import load
        >>> digits = load("digits", samples=100)
        >>> len(digits.train), digits.classes, digits.input_shape
        (100, 10, (1, 8, 8))
    """
    subset: dict[str, Any] = {"samples": samples, "test_samples": test_samples, "seed": seed}
    if _is_path(name):
        _check_options(name, options, own_text)
        return own_text(name, **options).subset(**subset)
    source = get_source(name)
    if source.read is None:
        raise DataError(f"{name} is a list to judge word embeddings by, not a data set to train on")
    if source.draws:
        options = {**options, **subset}
    _check_options(name, options, source.read, subset)
    dataset = source.read(obtain(source, data_folder(folder), download=download), **options)
    return dataset if source.draws else dataset.subset(**subset)


def option_names(name: str) -> list[str]:
    """List the options that a data set takes, by name or by the path of a file.

    Args:
        name: What ``load`` takes.

    Returns:
        The names of its options.

    Raises:
        DataError: The data set is unknown.

    Example:
        >>> from mukron.data import option_names
        >>> option_names("coriolanus"), option_names("digits")
        (['length'], [])
    """
    reader = own_text if _is_path(name) else get_source(name).read
    return [] if reader is None else [*inspect.signature(reader).parameters][1:]


def _is_path(name: str) -> bool:
    """Whether a name that is no data set's is that of a file: it has an ending or a folder, or something is there."""
    path = Path(name)
    return not is_known(name) and bool(name) and (bool(path.suffix) or len(path.parts) > 1 or path.exists())


def _check_options(
    name: str, options: Mapping[str, Any], reader: Callable[..., Dataset], hidden: Collection[str] = ()
) -> None:
    known = [*inspect.signature(reader).parameters][1:]
    unknown = [option for option in options if option not in known]
    if unknown:
        accepted = ", ".join(option for option in known if option not in hidden) or "none"
        raise DataError(f"{name} takes no option {unknown[0]!r}; its options: {accepted}")


def fetch(
    name: str, folder: str | Path | None = None, *, force: bool = False, progress: MakeBar | None = None
) -> StoredDataset:
    """Make sure that all files of a data set are on disk: download missing ones, verify the others.

    Args:
        name: A key of ``DATASETS``.
        folder: The data folder; by default that of ``data_folder``.
        force: Whether to download all files again, in place of the old ones.
        progress: Makes a progress bar for a download, as pooch takes it.

    Returns:
        The data set on disk.

    Raises:
        DataError: The data set is unknown, its files are damaged, or the download failed.

    Example:
        >>> from mukron.data import fetch
        >>> fetch("digits").missing  # comes with scikit-learn and has no files
        ()
    """
    stored = obtain(get_source(name), data_folder(folder), force=force, progress=progress)
    if errors := problems(stored):
        raise DataError("; ".join(errors))
    return stored


def problems(stored: StoredDataset) -> list[str]:
    """List what is wrong with the files of a data set: missing files, and files with a wrong checksum.

    Args:
        stored: The data set on disk, as ``where`` returns it.

    Returns:
        One message per problem; none if all files are present and have the right contents.

    Example:
        >>> from mukron.data import problems, where
        >>> problems(where("digits"))
        []
        >>> problems(where("mnist", folder="empty"))
        ["not here; get it with 'mukron data fetch mnist'"]
    """
    if stored.missing and not stored.files:
        way_out = f"; get it with 'mukron data fetch {stored.source.name}'" if stored.source.downloads else ""
        return [f"not here{way_out}"]
    errors = [f"{stored.folder / name}: missing" for name in stored.missing]
    for file in stored.source.files:
        if file.sha256 is not None and file.name in stored.files:
            try:
                stored.content(file.name)
            except DataError as error:
                errors.append(str(error))
    return errors


def where(name: str, folder: str | Path | None = None) -> StoredDataset:
    """Find the files of a data set on disk. Nothing is downloaded.

    Args:
        name: A key of ``DATASETS``.
        folder: The data folder; by default that of ``data_folder``.

    Returns:
        The data set on disk, with the files that are present.

    Raises:
        DataError: The data set is unknown.

    Example:
        >>> from mukron.data import where
        >>> where("cifar100", folder="empty").missing
        ('train.bin', 'test.bin')
    """
    return locate(get_source(name), data_folder(folder))


def word_pairs(folder: str | Path | None = None, download: bool = True) -> list[Pair]:
    """Read WordSim-353: pairs of words, and how similar people find them, from 0 to 10.

    Args:
        folder: The data folder; by default that of ``data_folder``.
        download: Whether the file may be downloaded if it is missing.

    Returns:
        Tuples of two words and a score.

    Raises:
        DataError: The file is missing or damaged, or the download failed.

    Example:
        >>> from mukron.data import where, word_pairs
        >>> if not where("wordsim353").missing:  # it has been fetched
        ...     first, second, score = word_pairs()[0]
    """
    stored = obtain(get_source("wordsim353"), data_folder(folder), download=download)
    return parse_pairs(stored.content("wordsim353.tsv"), stored.files["wordsim353.tsv"])


def analogies(folder: str | Path | None = None, download: bool = True) -> list[Question]:
    """Read Google's 19,544 analogies (a, b, c, d): a is to b as c is to d.

    Args:
        folder: The data folder; by default that of ``data_folder``.
        download: Whether the file may be downloaded if it is missing.

    Returns:
        Tuples of four words.

    Raises:
        DataError: The file is missing or damaged, or the download failed.

    Example:
        >>> from mukron.data import analogies, where
        >>> if not where("analogies").missing:  # it has been fetched
        ...     a, b, c, d = analogies()[0]
    """
    stored = obtain(get_source("analogies"), data_folder(folder), download=download)
    return parse_analogies(stored.content("questions-words.txt"), stored.files["questions-words.txt"])
