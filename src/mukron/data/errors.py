"""The one error of this room, and packages that load when they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


class DataError(ValueError):
    """A data set is unknown, missing, damaged or not as asked for; the message names the file and the way out."""


def need(module: str, package: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{purpose} needs {package}, which is not installed: pip install 'mukron[studies]'") from error
