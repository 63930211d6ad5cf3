"""Import a function of the user's, named as MODULE:FUNCTION, and see its default width.

Code and the command line may name any function. A file may have been written by anybody, so what it names is a
``FileFunction``, which is not imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import keyword
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAMED_BY = {"model": "--factory", "data": "--data", "loss": "--loss"}  # by setting: how a command names its function


class FileFunction(str):
    """MODULE:FUNCTION as a file names it. It is text like any other, but it is not imported.

    Args:
        path: The module and the function.
        source: The file, for errors.

    Example:
        >>> function = FileFunction("os:system", "run.json")
        >>> function == "os:system", function.source
        (True, 'run.json')
    """

    def __new__(cls, path: str, source: str) -> FileFunction:
        return super().__new__(cls, path)

    def __init__(self, path: str, source: str) -> None:
        self.source = source

    def __reduce__(self) -> Any:
        return FileFunction, (str(self), self.source)


class UntrustedError(ValueError):
    """A file names functions that would have to be imported.

    Args:
        functions: By setting, what the file names.
    """

    def __init__(self, functions: Mapping[str, FileFunction]) -> None:
        self.functions = dict(functions)
        super().__init__(f"{self._found()}: it runs if you take config.trusted(), or name it yourself by replace()")

    def for_command_line(self) -> str:
        """What to do, as options of a command."""
        named = " ".join(f"{NAMED_BY.get(setting, setting)} {path}" for setting, path in self.functions.items())
        return f"{self._found()}: it runs if you name it too ({named}), or with --trust"

    def _found(self) -> str:
        source = next(iter(self.functions.values())).source
        named = json.dumps(self.functions).strip("{}")
        return f"{source}: {named} is code to run, and a file may come from anybody"


def is_function_path(path: str) -> bool:
    """Return whether a text has the form MODULE:FUNCTION.

    Args:
        path: The text.

    Returns:
        Whether it is one.

    Example:
        >>> is_function_path("mypackage.nets:make"), is_function_path("nets:make()")
        (True, False)
    """
    module, _, name = path.partition(":")
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), name))


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Import the function or class at MODULE:FUNCTION; modules of the current folder are found too.

    Args:
        path: The module and the function, as in ``"mypackage.nets:make"``.
        setting: The name of the setting that holds the path, for the text of errors.

    Returns:
        The function or class.

    Raises:
        UntrustedError: A file names the function.
        ValueError: The path is malformed, the module cannot be imported, or it has no such function.

    Example:
        >>> from mukron.imports import import_function
        >>> import_function("math:sqrt", "model")(4.0)
        2.0
    """
    if isinstance(path, FileFunction):
        raise UntrustedError({setting: path})
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{setting} {path!r}: expected MODULE:FUNCTION, as in mypackage.nets:make")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path[:] = current_folder_after_python([os.getcwd(), *sys.path])
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


def current_folder_after_python(path: Sequence[str]) -> list[str]:
    """Order places of modules so that none of the current folder can stand in for one of Python's own.

    Args:
        path: Places of modules, such as ``sys.path``.

    Returns:
        The same without repetitions; the current folder, if it is one of them, is the first after Python's own.

    Example:
        >>> here = os.getcwd()
        >>> places = current_folder_after_python([here, "/usr/lib/python3.12", "/usr/lib/python3.12/site-packages"])
        >>> places.index(here)
        1
    """
    here = {"", os.getcwd()}
    places = [place for place in dict.fromkeys(path) if place not in here]
    installed = (n for n, place in enumerate(places) if os.path.basename(place) in ("site-packages", "dist-packages"))
    if not here.isdisjoint(path):
        places.insert(next(installed, len(places)), os.getcwd())
    return places


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
