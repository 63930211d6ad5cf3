"""The error that this package raises, and the import of optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType


class DataError(ValueError):
    """A data set is unknown, missing, damaged or does not fit; the message names the file and what to do."""


def need(module: str, package: str, purpose: str) -> ModuleType:
    """Import an optional package, or say that it must be installed and for what."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{purpose} needs {package}, which is not installed: pip install 'mukron[studies]'") from error
