"""Plain data as JSON files with a kind and a format version."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mukron.params.errors import ParametrizationError

Data = dict[str, Any]


def stamp(kind: str, version: int, content: Mapping[str, Any]) -> Data:
    return {"format": f"mukron.{kind}", "version": version, **content}


def check_stamp(data: object, kind: str, version: int, source: str, oldest: int | None = None) -> Data:
    """The data itself, if it is of this kind and of a version that this code reads: this one, or from the oldest on."""
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
        raise ParametrizationError(f"{source}: damaged, {what}; make it again") from error


def write_json(path: str | os.PathLike[str], data: Data) -> None:
    """All or nothing: a file that is there is whole."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """All or nothing: a file that is there is whole."""
    path = Path(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say of what
        raise


def read_json(path: str | os.PathLike[str]) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # Python refuses deep nests, and numbers of thousands of digits
        raise ParametrizationError(f"{path}: not a JSON file ({error}); was it written by mukron's save()?") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
