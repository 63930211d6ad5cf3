"""Files: plain data as JSON with a kind, a format version and a seal; all are whole, or not there."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mukron.params.errors import ParametrizationError

Data = dict[str, Any]
LONGEST_REASON = 1000  # characters of what is wrong with a file, which may hold a text of any length
SEAL = "seal"  # a field of data that can be verified: a digest of the others


def stamp(kind: str, version: int, content: Mapping[str, Any]) -> Data:
    return {"format": f"mukron.{kind}", "version": version, **content}


def check_stamp(data: object, kind: str, version: int, source: str, oldest: int | None = None) -> Data:
    """The data itself, if it is of this kind and of a version that this code reads: this one, or from the oldest on."""
    data = unsealed(data, source)
    if not isinstance(data, dict) or data.get("format") != f"mukron.{kind}":
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ParametrizationError(f"{source}: expected format 'mukron.{kind}', found {found!r}")
    if data.get("version") not in range(version if oldest is None else oldest, version + 1):
        raise ParametrizationError(
            f"{source}: format version {data.get('version')!r}, this mukron reads version {version}; "
            "install the version of mukron that wrote it, or make the file again"
        )
    return data


@contextmanager
def damaged(source: str) -> Iterator[None]:
    """Data of the right kind that cannot be read is told so. ``mukron.typed`` says what is wrong where."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        what = what if len(what) <= LONGEST_REASON else f"{what[:LONGEST_REASON]}..."
        raise ParametrizationError(f"{source}: damaged, {what}; make it again") from error


def sealed(content: Mapping[str, Any]) -> Data:
    """The data with a digest of itself. Damage changes one of the two; an attacker can write both."""
    return {**content, SEAL: _digest(content)}


def unsealed(data: object, source: str) -> Any:
    """The data without its seal, which must be right. Data without one (of earlier versions, by hand) is taken."""
    if not isinstance(data, dict) or SEAL not in data:
        return data
    content = {name: value for name, value in data.items() if name != SEAL}
    if data[SEAL] != _digest(content):
        raise ParametrizationError(
            f"{source}: damaged, or edited: its content and its seal do not agree; make it again, or take out "
            f'"{SEAL}" if you changed it on purpose'
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def write_json(path: str | os.PathLike[str], data: Data, *, seal: bool = True) -> None:
    """All or nothing: a file that is there is whole. Files that people edit are not sealed."""
    write_text(path, json.dumps(sealed(data) if seal else data, indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str, *, sole: bool = False) -> None:
    """All or nothing: a file that is there is whole. ``sole`` is that of ``write_whole``."""
    write_whole(path, lambda file: file.write(text.encode()), sole=sole)


def write_whole(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    *,
    sole: bool = False,
    before: Path | None = None,
) -> None:
    """Write a file that lasts: it is on the disk before it takes its name, so that a file of that name is whole.

    A stream, such as /dev/stdout, is written to as it is.

    Args:
        path: The file.
        write: Writes the content.
        sole: Whether no other process writes this file now. What a killed one has left is then overwritten.
        before: A second name for the file of now, which is replaced without it.
    """
    path = Path(path)
    if is_stream(path):
        with path.open("wb") as file:
            write(file)
        return
    part = path.with_name(f".{path.name}.part" if sole else f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.exists():
            _keep(path, before)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say of what
        raise
    with suppress(OSError):  # not every file system can
        _sync(path.parent)


def is_stream(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: /dev/stdout, a pipe. No file may take its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _keep(path: Path, before: Path) -> None:
    """Give a file a second name: at no moment is it without the first."""
    link = before.with_name(f".{before.name}.part")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links
        os.replace(path, before)
    else:
        os.replace(link, before)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: str | os.PathLike[str]) -> object:
    """The data of a file, whose seal is verified if it has one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # Python refuses deep nests, and numbers of thousands of digits
        remedy = "was it written by mukron's save()?"
        if Path(path).suffix == ".bsh":
            remedy = "files of microsoft/mup are read by mukron.params.mup_base_shapes(path, model)"
        raise ParametrizationError(f"{path}: not a JSON file ({error}); {remedy}") from error
    return unsealed(data, str(path))
