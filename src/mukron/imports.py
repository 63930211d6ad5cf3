"""Functions of the user's, named as MODULE:FUNCTION: import them, name them, and see their default width."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Import the function or class at MODULE:FUNCTION; modules of the current folder are found too.

    Args:
        path: The module and the function, as in ``"mypackage.nets:make"``.
        setting: The name of the setting that holds the path, for the text of errors.

    Returns:
        The function or class.

    Raises:
        ValueError: The path is malformed, the module cannot be imported, or it has no such function.

    Example:
        >>> from mukron.imports import import_function
        >>> import_function("math:sqrt", "model")(4.0)
        2.0
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{setting} {path!r}: expected MODULE:FUNCTION, as in mypackage.nets:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not module.startswith(error.name):
            raise ValueError(f"{setting} {path!r}: it imports {error.name!r}, which is not installed") from error
        raise ValueError(
            f"{setting} {path!r}: {error} (a module's name, not a file's; this folder counts too)"
        ) from error
    except TypeError as error:
        raise ValueError(
            f"{setting} {path!r}: {error} (a module's name, not a file's; this folder counts too)"
        ) from error
    function: Callable[..., Any] | None = getattr(imported, name, None)
    if not callable(function):
        raise ValueError(f"{setting} {path!r}: module {module!r} has no function or class {name!r}")
    return function


def path_of(function: object, setting: str) -> str:
    """Return the MODULE:FUNCTION of a function or class by which other processes, and later ones, can import it.

    Args:
        function: The function or class; a text is returned as it is.
        setting: The name of the setting that holds it, for the text of errors.

    Returns:
        The module and the function.

    Raises:
        ValueError: It is not to be had by importing: it is defined in a script, in a notebook or inside of a function.

    Example:
        >>> from mukron.imports import path_of
        >>> from mukron.models import MLP
        >>> path_of(MLP, "model")
        'mukron.models.mlp:MLP'
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or name is None or module is None:
        why = "it is no function or class with a name"
    elif module == "__main__":
        why = "it is defined in a script or a notebook"
    elif getattr(sys.modules.get(module), name, None) is not function:
        why = f"it is not what module {module!r} has as {name!r}"
    else:
        return f"{module}:{name}"
    raise ValueError(
        f"{setting}={function!r:.80}: {why}, and it is stored by its name, for other processes and for later ones that "
        'continue. Define it in a module and give it from there, or as "MODULE:FUNCTION"'
    )


def default_width(factory: Callable[..., Any]) -> float | None:
    """Returns the default of a factory's width, or None if it has none.

    Args:
        factory: A function of the width.

    Returns:
        The default.

    Example:
        >>> default_width(lambda width=64: None)
        64
    """
    parameters = inspect.signature(factory).parameters
    width = parameters.get("width") or (next(iter(parameters.values())) if len(parameters) == 1 else None)
    default = width.default if width is not None else None
    return default if isinstance(default, (int, float)) and not isinstance(default, bool) else None
