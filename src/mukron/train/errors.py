"""The error of training runs, and the failed writes that are reported as one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class RunError(ValueError):
    """A run's configuration, folder or checkpoint is invalid; the message says which one and what to do.

    Example:
        >>> from mukron.train import Run
        >>> Run.load("no-such-folder")
        Traceback (most recent call last):
            ...
        mukron.train.errors.RunError: no-such-folder: there is no run (no config.json)
    """


class LostProcessError(ConnectionError):
    """Another process of the run has ended or does not answer; the message says how to go on."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Reports a failed write as ``RunError``: a full disk, missing permission, a file in place of a folder.

    Args:
        path: What is written, for the message.

    Raises:
        RunError: If the body raises OSError, or RuntimeError, which torch raises when it cannot write its files.

    Example:
        >>> with writing("run/config.json"):
        ...     raise OSError(28, "No space left on device")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        mukron.train.errors.RunError: cannot write run/config.json: No space left on device; ...
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        reason = (isinstance(cause, OSError) and cause.strerror) or str(error).partition("\n")[0]
        raise RunError(f"cannot write {path}: {reason}; free space or choose another folder (--out)") from error
