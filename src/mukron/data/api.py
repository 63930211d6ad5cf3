"""What a user calls: load a data set by name, fetch its files, verify them, read the evaluation lists."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from mukron.data.catalogue import get_source
from mukron.data.dataset import Dataset
from mukron.data.download import MakeBar, obtain
from mukron.data.errors import DataError
from mukron.data.store import Found, data_folder, locate
from mukron.data.words import Pair, Question, parse_analogies, parse_pairs


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
    """A data set by name, from the data folder; downloaded into it if it is not there and may be.

    ``samples`` and ``test_samples`` draw a subset with ``seed``. Options: wikitext2 takes min_count=128 and window=4,
    imagenet takes size=64.
    """
    source = get_source(name)
    if source.read is None:
        raise DataError(f"{name} is a list to judge word embeddings by, not a data set to train on")
    subset: dict[str, Any] = {"samples": samples, "test_samples": test_samples, "seed": seed}
    if source.draws:
        options = {**options, **subset}
    known = [*inspect.signature(source.read).parameters][1:]
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = ", ".join(option for option in known if option not in subset) or "none"
        raise DataError(f"{name} takes no option {unknown[0]!r}; its options: {takes}")
    dataset = source.read(obtain(source, data_folder(folder), download=download), **options)
    return dataset if source.draws else dataset.subset(**subset)


def fetch(
    name: str, folder: str | Path | None = None, *, force: bool = False, progress: MakeBar | None = None
) -> Found:
    """See to it that a data set is on disk, whole: download what is missing, check what is there."""
    found = obtain(get_source(name), data_folder(folder), force=force, progress=progress)
    if wrong := problems(found):
        raise DataError("; ".join(wrong))
    return found


def problems(found: Found) -> list[str]:
    """What is wrong with the files of a data set; nothing, if all are there and hold what they should."""
    if found.missing and not found.files:
        way_out = f"; get it with 'mukron data fetch {found.source.name}'" if found.source.downloads else ""
        return [f"not here{way_out}"]
    wrong = [f"{found.folder / name}: missing" for name in found.missing]
    for file in found.source.files:
        if file.sha256 is not None and file.name in found.files:
            try:
                found.content(file.name)
            except DataError as error:
                wrong.append(str(error))
    return wrong


def where(name: str, folder: str | Path | None = None) -> Found:
    """What of a data set is on disk, and where; nothing is downloaded."""
    return locate(get_source(name), data_folder(folder))


def word_pairs(folder: str | Path | None = None, download: bool = True) -> list[Pair]:
    """WordSim-353: pairs of words and how similar people find them, from 0 to 10."""
    found = obtain(get_source("wordsim353"), data_folder(folder), download=download)
    return parse_pairs(found.content("wordsim353.tsv"), found.files["wordsim353.tsv"])


def analogies(folder: str | Path | None = None, download: bool = True) -> list[Question]:
    """Google's 19,544 analogies (a, b, c, d): a is to b as c is to d."""
    found = obtain(get_source("analogies"), data_folder(folder), download=download)
    return parse_analogies(found.content("questions-words.txt"), found.files["questions-words.txt"])
