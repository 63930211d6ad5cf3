"""The files of data sets: their names, their folders, and their checksums."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mukron.data.dataset import Dataset
from mukron.data.errors import DataError

COMPRESSIONS = ("", ".gz", ".xz")
LARGEST_RATIO = 20  # of what is decompressed to what is downloaded; that of MNIST's images is 5
SMALLEST_BOUND = 1 << 24  # bytes


@dataclass(frozen=True)
class File:
    """A file of a data set, which may be compressed (.gz or .xz).

    Attributes:
        name: The name of the file, without the suffix of a compression.
        sha256: The checksum of its decompressed contents; None if it is not checked.
        aliases: Other usual names of the file.

    Example:
        >>> from pathlib import Path
        >>> from mukron.data import File
        >>> [path.name for path in File("train.bin", sha256=None).paths(Path("cifar"))]
        ['train.bin', 'train.bin.gz', 'train.bin.xz']
    """

    name: str
    sha256: str | None
    aliases: tuple[str, ...] = ()

    def paths(self, folder: Path) -> list[Path]:
        """List the paths that the file may have.

        Args:
            folder: The folder of the data set.

        Returns:
            The paths, by name and compression.
        """
        return [folder / f"{name}{suffix}" for name in (self.name, *self.aliases) for suffix in COMPRESSIONS]

    def find(self, folder: Path) -> Path | None:
        """Find the file on disk.

        Args:
            folder: The folder of the data set.

        Returns:
            The first path that exists; None if there is none.
        """
        return next((path for path in self.paths(folder) if path.exists()), None)


@dataclass(frozen=True)
class Download:
    """A download: one file of a data set, or an archive (.tar.gz, .zip) of all its files.

    Attributes:
        name: The name of the downloaded file.
        sha256: Its checksum.
        size: Its size in bytes.
        urls: The addresses, in the order in which they are tried.

    Example:
        >>> from mukron.data import DATASETS
        >>> (download,) = DATASETS["cifar10"].downloads
        >>> download.name, download.archive
        ('cifar-10-binary.tar.gz', True)
    """

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...]

    @property
    def archive(self) -> bool:
        """Whether it is an archive of all files."""
        return self.name.endswith((".tar.gz", ".zip"))

    def brings(self, file: File) -> bool:
        """Say whether the download contains a file of the data set.

        Args:
            file: The file.

        Returns:
            Whether it does.
        """
        return self.archive or self.name in {file.name + suffix for suffix in COMPRESSIONS}


@dataclass(frozen=True)
class Source:
    """A data set by name: its files, where they are downloaded from, and the function that reads them.

    Attributes:
        name: The name of the data set.
        kind: What its samples are, as tables show it.
        train: The number of training samples.
        test: The number of test samples.
        classes: The number of classes.
        read: The function that reads the data set, from a ``StoredDataset`` and options; None for lists that are no
            data sets to train on.
        folders: The usual names of its folder. Downloads go to the first.
        files: Its files.
        downloads: Its downloads; none if it must be provided by the user.
        refused: The files and folders that are not read though they may be present, each with the reason.
        draws: Whether ``read`` takes samples, test_samples and seed, and reads only these samples.

    Example:
        >>> from mukron.data import DATASETS
        >>> mnist = DATASETS["mnist"]
        >>> mnist.kind, mnist.train, mnist.classes
        ('images 28x28', 60000, 10)
        >>> mnist.size < 12_000_000
        True
    """

    name: str
    kind: str
    train: int
    test: int
    classes: int
    read: Callable[..., Dataset] | None
    folders: tuple[str, ...] = (".",)
    files: tuple[File, ...] = ()
    downloads: tuple[Download, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False

    @property
    def size(self) -> int:
        """The number of bytes to download."""
        return sum(download.size for download in self.downloads)

    def places(self, folder: Path) -> list[Path]:
        """List the folders that may hold the data set.

        They are the data folder itself, if its name is that of the data set or the beginning of it, and folders in it.

        Args:
            folder: The data folder.

        Returns:
            The folders, in the order in which they are searched.
        """
        places = []
        for usual in self.folders:
            parts = PurePosixPath(usual).parts
            matches = [n for n in range(1, len(parts) + 1) if folder.absolute().parts[-n:] == parts[:n]]
            places += [folder.joinpath(*parts[n:]) for n in (*matches, 0)]
        return places

    @property
    def bound(self) -> int | None:
        """The bytes that no file of it exceeds, decompressed; None if it is not known what is downloaded."""
        size = sum(item.size for item in self.downloads)
        return max(SMALLEST_BOUND, LARGEST_RATIO * size) if size else None

    def home(self, folder: Path) -> Path:
        """Return the folder to which files are downloaded.

        Args:
            folder: The data folder.

        Returns:
            The folder of this data set.
        """
        return self.places(folder)[0]


@dataclass(frozen=True)
class StoredDataset:
    """A data set on disk: its folder, and those of its files that are present.

    Attributes:
        source: The source of the data set.
        folder: The folder with the files.
        files: The paths of the files that are present, by name.

    Example:
        >>> from mukron.data import where
        >>> stored = where("wordsim353", folder="empty")
        >>> len(stored.files), stored.missing
        (0, ('wordsim353.tsv',))
    """

    source: Source
    folder: Path
    files: Mapping[str, Path]

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the files that are not present."""
        return tuple(file.name for file in self.source.files if file.name not in self.files)

    def content(self, name: str) -> bytes:
        """Read a file, decompress it and verify its checksum.

        Args:
            name: The name of the file.

        Returns:
            Its contents.

        Raises:
            DataError: The file cannot be read, or its checksum is wrong.
        """
        file = next(file for file in self.source.files if file.name == name)
        path = self.files[name]
        try:
            data = _read(path, self.source.bound)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {self._remedy}") from error
        digest = hashlib.sha256(data).hexdigest()
        if file.sha256 not in (None, digest):
            raise DataError(
                f"{path}: not the file of {self.source.name} that it should be, or damaged ({len(data):,} bytes with "
                f"sha256 {digest}, expected {file.sha256}); {self._remedy}"
            )
        return data

    @property
    def _remedy(self) -> str:
        if not self.source.downloads:
            return "replace it"
        return f"delete it, or replace it with 'mukron data fetch {self.source.name} --force'"


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of all data sets.

    Args:
        folder: The folder; by default ``$MUKRON_DATA`` or, if that is not set, ``mukron`` in the platform's cache.

    Returns:
        The folder, which need not exist.

    Raises:
        DataError: The path is that of a file.

    Example:
        >>> from mukron.data import data_folder
        >>> data_folder("data").name
        'data'
    """
    chosen = folder or os.environ.get("MUKRON_DATA")
    if chosen:
        path = Path(chosen).expanduser()
        if path.is_file():
            setting = "--data-dir" if folder else "MUKRON_DATA"
            raise DataError(f"{setting}: {path} is a file, not a folder; name the folder that holds the data sets")
        return path
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "mukron" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mukron"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mukron"


def locate(source: Source, folder: Path) -> StoredDataset:
    """Find the first folder that has all files of a data set, or else the one that has most of them."""
    candidates = []
    for place in source.places(folder):
        files = {file.name: path for file in source.files if (path := file.find(place)) is not None}
        candidates.append(StoredDataset(source, place, files))
    return max(candidates, key=lambda stored: len(stored.files))  # the first of those with the most files


def _open_plain(path: Path) -> Any:
    return path.open("rb")


def _read(path: Path, bound: int | None) -> bytes:
    """Read and decompress a file, or no more of it than the bound."""
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, _open_plain)(path) as file:
        data: bytes = file.read() if bound is None else file.read(bound + 1)
    if bound is not None and len(data) > bound:
        raise OSError(f"more than {bound:,} bytes, which no file of this data set has")
    return data
