"""Download the files of data sets.

A file under its final name is always complete: it is written to a temporary folder, verified, and then renamed. So a
download that fails, or is killed at any moment, leaves nothing that could be taken for data.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from mukron.data.errors import DataError, need
from mukron.data.store import Download, File, Source, StoredDataset, locate

STAGE = ".fetch-"  # the prefix of temporary folders
MakeBar = Callable[[Download], Any]  # makes a progress bar for pooch, with total, update, reset and close


def obtain(
    source: Source, folder: Path, *, download: bool = True, force: bool = False, progress: MakeBar | None = None
) -> StoredDataset:
    """Find a data set on disk. Missing files are downloaded if allowed; with ``force`` all files are downloaded."""
    stored = locate(source, folder)
    if not stored.missing and not force:
        return stored
    home = source.home(folder)
    for item in source.downloads:
        files = [file for file in source.files if item.brings(file) and (force or file.find(home) is None)]
        archive = _user_archive(source, item, folder, force) if files else None
        if files and (archive or download):
            with _explained_write_errors(folder), _temporary_folder(folder) as stage:
                path = archive or _download(source, item, stage, folder, progress)
                _install(source, item, files, path, stage, home)
    stored = locate(source, folder)
    if stored.missing:
        raise DataError(_missing_message(stored, folder))
    return stored


def _install(source: Source, item: Download, files: list[File], path: Path, stage: Path, home: Path) -> None:
    """Move files from the download to the data set's folder, each by one rename."""
    ready = stage / "ready"
    ready.mkdir()
    if item.archive:
        _unpack(path, {f"{source.folders[0]}/{file.name}": ready / file.name for file in files})
    else:
        shutil.copyfile(path, ready / item.name)  # a copy, because other users may not read pooch's file
    home.mkdir(parents=True, exist_ok=True)
    for file in files:
        new = file.name if item.archive else item.name
        with open(ready / new, "rb") as written:
            os.fsync(written.fileno())  # on the disk before it takes its name
        os.replace(ready / new, home / new)
        for old in file.paths(home):  # under another name, or with another compression
            if old.name != new:
                old.unlink(missing_ok=True)


def _download(source: Source, item: Download, stage: Path, folder: Path, progress: MakeBar | None) -> Path:
    """Download the file from the first address that has it with the right checksum."""
    pooch = need("pooch", "pooch", f"downloading {source.name}")
    requests = need("requests", "pooch", f"downloading {source.name}")
    if progress is not None:
        pooch.get_logger().setLevel("WARNING")  # the bar shows what it would log
    # The file must arrive as it is stored: a .gz must not be decompressed by the transport.
    headers = {"User-Agent": "mukron", "Accept-Encoding": "identity"}
    failures = []
    for url in item.urls:
        bar = False if progress is None else progress(item)
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18, headers=headers)
        try:
            bounded = _bounded(downloader, item)
            return Path(pooch.retrieve(url, f"sha256:{item.sha256}", item.name, stage, downloader=bounded))
        except (requests.RequestException, ValueError) as error:
            failures.append(f"{url}: {_reason(error, requests)}")
    raise DataError(
        f"{source.name}: could not download {item.name} ({'; '.join(failures)}). Nothing was left behind: try again, "
        f"or put the file into {folder if item.archive else source.home(folder)} yourself, or let --data-dir or "
        f"MUKRON_DATA name a folder that holds {source.name}{_refused(source, folder)}"
    )


class _Bounded:
    """A file that takes no more bytes than a download has, however many a server sends."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left, self._size = file, size, size
        self.flush = file.flush

    def write(self, chunk: bytes) -> int:
        self._left -= len(chunk)
        if self._left < 0:
            raise _TooLongError(f"more than its {self._size:,} bytes came")
        return self._file.write(chunk)


class _TooLongError(ValueError):
    pass


def _bounded(downloader: Callable[..., object], item: Download) -> Callable[..., None]:
    def download(url: str, path: str, pooch: object) -> None:
        with open(path, "wb") as file:
            downloader(url, _Bounded(file, item.size), pooch)

    return download


def _reason(error: Exception, requests: ModuleType) -> str:
    if isinstance(error, requests.HTTPError):
        return str(error).partition(" for url")[0]
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if isinstance(error, (requests.RequestException, _TooLongError)):
        return str(error)
    return "what came has another sha256, cut off on the way or changed on the server"


def _user_archive(source: Source, item: Download, folder: Path, force: bool) -> Path | None:
    """Return an archive that the user has put into the data folder."""
    path = folder / item.name
    if not item.archive or not path.exists():
        return None
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size == item.size else "of another size"
    if digest == item.sha256:
        return path
    if force:
        return None
    raise DataError(
        f"{path}: damaged, or another archive (sha256 {digest}, expected {item.sha256}); delete it, or download "
        f"with 'mukron data fetch {source.name} --force'"
    )


def _unpack(archive: Path, targets: Mapping[str, Path]) -> None:
    """Write the members that are asked for to their paths, and no other member of the archive."""
    remaining = dict(targets)
    for name, stream in _members(archive):
        if name in remaining:
            with open(remaining.pop(name), "wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
    if remaining:
        raise DataError(f"{archive.name}: holds no {', '.join(remaining)}")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                with opened.open(name) as stream:
                    yield name, stream
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            extracted = tar.extractfile(member) if member.isreg() else None
            if extracted is not None:
                yield member.name, extracted


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder, and remove those that a killed process left more than a day ago."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{STAGE}*"):
        with suppress(FileNotFoundError):  # it belonged to another download, which has just ended
            if old.stat().st_mtime < time.time() - 24 * 3600:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=STAGE) as stage:
        yield Path(stage)


@contextmanager
def _explained_write_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a ``DataError`` that says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the data folder {folder}: {error}; name another with --data-dir or MUKRON_DATA"
        ) from error


def _missing_message(stored: StoredDataset, folder: Path) -> str:
    source = stored.source
    message = f"{source.name}: no {', '.join(stored.missing)} under {folder} (in {' or '.join(source.folders)})"
    message += _refused(source, folder)
    elsewhere = f"let --data-dir or MUKRON_DATA name the folder that holds {source.name}"
    if not source.downloads:
        return f"{message}. It cannot be downloaded: {elsewhere}"
    return f"{message}. Download it with 'mukron data fetch {source.name}', or {elsewhere}"


def _refused(source: Source, folder: Path) -> str:
    """Name the files that are present but not read, each with the reason."""
    paths = {name: folder if folder.name == name else folder / name for name in source.refused}
    return "".join(f"; {path} {source.refused[name]}" for name, path in paths.items() if path.exists())
