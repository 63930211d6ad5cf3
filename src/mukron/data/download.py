"""How files of data sets get to the disk.

A file under its own name is whole: it is written elsewhere, checked, and then renamed. A data set is there when all its
files are. So a download that fails, or is killed at any moment, leaves nothing that could be taken for data.
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
from mukron.data.store import Download, File, Found, Source, locate

STAGE = ".fetch-"  # folders of work under way
MakeBar = Callable[[Download], Any]  # a bar as pooch takes it: with total, update, reset and close


def obtain(
    source: Source, folder: Path, *, download: bool = True, force: bool = False, progress: MakeBar | None = None
) -> Found:
    """A data set on disk. What is missing is downloaded if it may be; with ``force`` all of it, in place of the old."""
    found = locate(source, folder)
    if not found.missing and not force:
        return found
    home = source.home(folder)
    for wanted in source.downloads:
        files = [file for file in source.files if wanted.brings(file) and (force or file.find(home) is None)]
        given = _given(source, wanted, folder, force) if files else None
        if files and (given or download):
            with _writing(folder), _stage(folder) as stage:
                path = given or _download(source, wanted, stage, folder, progress)
                _put(source, wanted, files, path, stage, home)
    found = locate(source, folder)
    if found.missing:
        raise DataError(_not_here(found, folder))
    return found


def _put(source: Source, wanted: Download, files: list[File], path: Path, stage: Path, home: Path) -> None:
    """Out of the download into the data set's folder, each file in one step."""
    ready = stage / "ready"
    ready.mkdir()
    if wanted.archive:
        _unpack(path, {f"{source.folders[0]}/{file.name}": ready / file.name for file in files})
    else:
        shutil.copyfile(path, ready / wanted.name)  # a copy, because pooch's own file is closed to other users
    home.mkdir(parents=True, exist_ok=True)
    for file in files:
        new = file.name if wanted.archive else wanted.name
        os.replace(ready / new, home / new)
        for old in file.paths(home):  # under another name, or compressed otherwise
            if old.name != new:
                old.unlink(missing_ok=True)


def _download(source: Source, wanted: Download, stage: Path, folder: Path, progress: MakeBar | None) -> Path:
    """The file from the first address that gives it with the right checksum."""
    pooch = need("pooch", "pooch", f"downloading {source.name}")
    requests = need("requests", "pooch", f"downloading {source.name}")
    if progress is not None:
        pooch.get_logger().setLevel("WARNING")  # the bar says it all
    # As the server stores it: a .gz must not be decompressed on the way.
    headers = {"User-Agent": "mukron", "Accept-Encoding": "identity"}
    failures = []
    for url in wanted.urls:
        bar = False if progress is None else progress(wanted)
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18, headers=headers)
        try:
            return Path(pooch.retrieve(url, f"sha256:{wanted.sha256}", wanted.name, stage, downloader=downloader))
        except (requests.RequestException, ValueError) as error:
            failures.append(f"{url}: {_reason(error, requests)}")
    raise DataError(
        f"{source.name}: could not download {wanted.name} ({'; '.join(failures)}). Nothing was left behind: try again, "
        f"or put the file into {folder if wanted.archive else source.home(folder)} yourself, or let --data-dir or "
        f"MUKRON_DATA name a folder that holds {source.name}{_refused(source, folder)}"
    )


def _reason(error: Exception, requests: ModuleType) -> str:
    if isinstance(error, requests.HTTPError):
        return str(error).partition(" for url")[0]
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if isinstance(error, requests.RequestException):
        return str(error)
    return "what came has another sha256, cut off on the way or changed on the server"


def _given(source: Source, wanted: Download, folder: Path, force: bool) -> Path | None:
    """An archive that the user has put into the data folder."""
    path = folder / wanted.name
    if not wanted.archive or not path.exists():
        return None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest == wanted.sha256:
        return path
    if force:
        return None
    raise DataError(
        f"{path}: damaged, or another archive (sha256 {digest}, expected {wanted.sha256}); delete it, or download "
        f"with 'mukron data fetch {source.name} --force'"
    )


def _unpack(archive: Path, targets: Mapping[str, Path]) -> None:
    """Write the members asked for, each to its own path, and nothing else of the archive."""
    left = dict(targets)
    for name, stream in _members(archive):
        if name in left:
            with open(left.pop(name), "wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
    if left:
        raise DataError(f"{archive.name}: holds no {', '.join(left)}")


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
def _stage(folder: Path) -> Iterator[Path]:
    """A folder for work under way, gone afterwards; what a killed process left a day ago goes too."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{STAGE}*"):
        with suppress(FileNotFoundError):  # another download's, which has just ended
            if old.stat().st_mtime < time.time() - 24 * 3600:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=STAGE) as stage:
        yield Path(stage)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the data folder {folder}: {error}; name another with --data-dir or MUKRON_DATA"
        ) from error


def _not_here(found: Found, folder: Path) -> str:
    source = found.source
    message = f"{source.name}: no {', '.join(found.missing)} under {folder} (in {' or '.join(source.folders)})"
    message += _refused(source, folder)
    elsewhere = f"let --data-dir or MUKRON_DATA name the folder that holds {source.name}"
    if not source.downloads:
        return f"{message}. It cannot be downloaded: {elsewhere}"
    return f"{message}. Download it with 'mukron data fetch {source.name}', or {elsewhere}"


def _refused(source: Source, folder: Path) -> str:
    paths = {name: folder if folder.name == name else folder / name for name in source.refused}
    return "".join(f"; {path} {source.refused[name]}" for name, path in paths.items() if path.exists())
