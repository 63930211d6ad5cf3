"""The one error of this room, and what becomes one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class RunError(ValueError):
    """A run's description, its folder or its checkpoint does not fit; the message says where and the way out."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """A disk that is full, a folder that is closed, a file in the way. torch says of its own files RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        said = (isinstance(cause, OSError) and cause.strerror) or str(error).partition("\n")[0]
        raise RunError(f"cannot write {path}: {said}; free space or choose another folder (--out)") from error
