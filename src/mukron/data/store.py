"""Files of data sets: what they are, where they lie on disk, and what they must hold."""

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

from mukron.data.dataset import Dataset
from mukron.data.errors import DataError

COMPRESSIONS = ("", ".gz", ".xz")


@dataclass(frozen=True)
class File:
    """A file of a data set, plain, .gz or .xz."""

    name: str
    sha256: str | None  # of its contents, decompressed; None is not checked
    aliases: tuple[str, ...] = ()  # other usual names of it

    def paths(self, folder: Path) -> list[Path]:
        """All that it may be called there."""
        return [folder / f"{name}{suffix}" for name in (self.name, *self.aliases) for suffix in COMPRESSIONS]

    def find(self, folder: Path) -> Path | None:
        return next((path for path in self.paths(folder) if path.exists()), None)


@dataclass(frozen=True)
class Download:
    """What is downloaded: one file of the data set as it is, or an archive (.tar.gz, .zip) of all."""

    name: str
    sha256: str
    size: int  # bytes
    urls: tuple[str, ...]  # tried in this order

    @property
    def archive(self) -> bool:
        return self.name.endswith((".tar.gz", ".zip"))

    def brings(self, file: File) -> bool:
        return self.archive or self.name in {file.name + suffix for suffix in COMPRESSIONS}


@dataclass(frozen=True)
class Source:
    """A data set by name: what it is, where it lies, where it comes from, and the function that reads it."""

    name: str
    kind: str
    train: int
    test: int
    classes: int
    read: Callable[..., Dataset] | None  # (Found, **options); None: a list with a function of its own
    folders: tuple[str, ...] = (".",)  # usual names of its folder; downloads go to the first
    files: tuple[File, ...] = ()
    downloads: tuple[Download, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # what may lie there but is not read, and why
    draws: bool = False  # ``read`` takes samples, test_samples and seed, and reads no more than these

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(download.size for download in self.downloads)

    def places(self, folder: Path) -> list[Path]:
        """Where to look: the folder itself if it bears a usual name, or the beginning of one; and below it."""
        places = []
        for usual in self.folders:
            parts = PurePosixPath(usual).parts
            inside = [n for n in range(1, len(parts) + 1) if folder.absolute().parts[-n:] == parts[:n]]
            places += [folder.joinpath(*parts[n:]) for n in (*inside, 0)]
        return places

    def home(self, folder: Path) -> Path:
        """Where downloads go."""
        return self.places(folder)[0]


@dataclass(frozen=True)
class Found:
    """A data set on disk: its folder, and the files of it that are there."""

    source: Source
    folder: Path
    files: Mapping[str, Path]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.source.files if file.name not in self.files)

    def content(self, name: str) -> bytes:
        """A file's contents, decompressed and checked."""
        file = next(file for file in self.source.files if file.name == name)
        path = self.files[name]
        try:
            data = _read(path)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {self._way_out}") from error
        digest = hashlib.sha256(data).hexdigest()
        if file.sha256 not in (None, digest):
            raise DataError(
                f"{path}: not the file of {self.source.name} that it should be, or damaged ({len(data):,} bytes with "
                f"sha256 {digest}, expected {file.sha256}); {self._way_out}"
            )
        return data

    @property
    def _way_out(self) -> str:
        if not self.source.downloads:
            return "replace it"
        return f"delete it, or replace it with 'mukron data fetch {self.source.name} --force'"


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder of all data sets: the one given, else $MUKRON_DATA, else 'mukron' in the platform's cache folder."""
    given = folder or os.environ.get("MUKRON_DATA")
    if given:
        path = Path(given).expanduser()
        if path.is_file():
            said = "--data-dir" if folder else "MUKRON_DATA"
            raise DataError(f"{said}: {path} is a file, not a folder; name the folder that holds the data sets")
        return path
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "mukron" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mukron"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mukron"


def locate(source: Source, folder: Path) -> Found:
    """The first place that has all files of a data set; failing that, the one that has most."""
    found = []
    for place in source.places(folder):
        here = {file.name: path for file in source.files if (path := file.find(place)) is not None}
        found.append(Found(source, place, here))
    return max(found, key=lambda each: len(each.files))  # the first of the largest


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    return lzma.decompress(data) if path.suffix == ".xz" else data
