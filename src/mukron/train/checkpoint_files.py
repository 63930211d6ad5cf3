"""The last two checkpoints of a run as files: verified when they are read, and whole whenever a process is killed."""

from __future__ import annotations

import errno
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from mukron import __version__
from mukron.params.storage import Data, check_stamp, stamp, write_whole
from mukron.train.errors import RunError, writing

CHECKPOINT_KIND, CHECKPOINT_VERSION = "checkpoint", 1
VERSIONS = {"mukron": __version__, "torch": str(torch.__version__)}


# Troubles of a machine, which say nothing of the file.
NOT_READ_NOW = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)


class _DamagedError(Exception):
    pass


class CheckpointFiles:
    """A checkpoint and the one before it, which serves if the last one is damaged.

    Args:
        last: The file of the last one.
        before: That of the one before it.
    """

    def __init__(self, last: Path, before: Path) -> None:
        self.last, self.before = last, before
        self.files = (last, before)
        self._last_is_damaged = False

    def save(self, checkpoint: Data) -> None:
        """Write a checkpoint. The file of the last one becomes that of the one before, unless it is damaged.

        Args:
            checkpoint: The state of the run.
        """
        content = stamp(CHECKPOINT_KIND, CHECKPOINT_VERSION, {**checkpoint, "versions": VERSIONS})
        with writing(self.last):
            before = None if self._last_is_damaged else self.before
            write_whole(self.last, lambda file: torch.save(content, file), sole=True, before=before)
        self._last_is_damaged = False

    def load(self) -> Data | None:
        """Return the last checkpoint that is whole, or None if there is no file of any.

        Raises:
            RunError: There are files and all are damaged, or one cannot be read now.
        """
        damages: list[str] = []
        for path in self.files:
            try:
                checkpoint = _read(path)
            except FileNotFoundError:
                continue
            except _DamagedError as error:
                damages.append(f"{path}: damaged, {error}")
                continue
            if damages:
                self._last_is_damaged = True
                warnings.warn(
                    f"{damages[0]}. The run goes on from the checkpoint before it, {path.name} (step "
                    f"{checkpoint['state']['step']})",
                    UserWarning,
                    stacklevel=4,
                )
            _warn_of_another_version(path, checkpoint.get("versions", {}))
            return checkpoint
        if damages:
            names = " and ".join(path.name for path in self.files if path.exists())
            raise RunError(f"{'; '.join(damages)}; delete {names} to train this run from its beginning")
        return None

    def forget(self) -> None:
        """Delete the files."""
        for path in self.files:
            with writing(path):
                path.unlink(missing_ok=True)


def _read(path: Path) -> Data:
    """Verify the checksum of every part, which torch writes and does not look at, and load."""
    whole = False
    try:
        with zipfile.ZipFile(path) as archive:
            if (part := archive.testzip()) is not None:
                raise _DamagedError(f"the checksum of its part {part} is wrong")
        whole = True
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, _DamagedError):
        raise
    except Exception as error:  # zipfile and torch raise various errors for a damaged file
        if isinstance(error, OSError) and error.errno in NOT_READ_NOW:
            raise RunError(f"{path}: cannot be read: {error.strerror}; nothing was changed") from error
        if whole and (isinstance(error, MemoryError) or "allocate memory" in str(error)):
            raise RunError(f"{path}: there is no memory to read it; nothing was changed") from error
        said = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise _DamagedError(f"{type(error).__name__} {said[:100]}".strip()) from error
    return check_stamp(data, CHECKPOINT_KIND, CHECKPOINT_VERSION, str(path))


def _warn_of_another_version(path: Path, stored: Mapping[str, str]) -> None:
    changed = [
        f"{name} {stored.get(name)}, here is {here}" for name, here in VERSIONS.items() if stored.get(name) != here
    ]
    if changed:
        warnings.warn(
            f"{path}: written by {'; '.join(changed)}. The run goes on, but its numbers may not be those of a run that "
            "was never stopped",
            UserWarning,
            stacklevel=5,
        )
