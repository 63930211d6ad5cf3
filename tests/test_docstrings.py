"""Every public name of a room is documented in Google style, and the examples in docstrings run.

A room is a package or a module of mukron.

What a name needs:

    function   summary; ``Args`` with every parameter; ``Returns`` unless it returns None (or ``Yields``); ``Example``
    class      summary; every field or argument of the constructor in ``Attributes`` or ``Args``; ``Example``
    exception  summary
    method     summary; ``Args`` with every parameter
    property   summary
    constant   nothing: the docstring that Python shows for it is that of its type

A section may describe nothing that does not exist.
"""

from __future__ import annotations

import dataclasses
import doctest
import enum
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from typing import get_origin

import pytest

ROOMS = (
    *("mukron.theory", "mukron.models", "mukron.data", "mukron.report", "mukron.diagnose"),
    *("mukron.optim", "mukron.layers", "mukron.memory", "mukron.damping", "mukron.params", "mukron.curvature"),
    *("mukron.linalg", "mukron.train", "mukron.study", "mukron.paper", "mukron.bench", "mukron.workers"),
    *(
        "mukron.integrations",
        "mukron.readers",
        "mukron.table",
        "mukron.exponents",
        "mukron.figures",
        "mukron.imports",
        "mukron.commands",
        "mukron.typed",
    ),
    *(f"mukron.workers.{name}" for name in ("foreman", "interrupts", "locks", "machine", "progress", "worker")),
)

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Note")
TITLE = re.compile(rf"^({'|'.join(SECTIONS)}):$")
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?: \S")


def sections(docstring: str) -> dict[str, list[str]]:
    """Split a docstring into the lines of its sections; lines outside of them are under the empty name."""
    parts: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if title := TITLE.match(line):
            current = title[1]
            parts[current] = []
            continue
        if line and not line.startswith(" "):  # an unindented line ends a section
            current = ""
        parts[current].append(line)
    return parts


def described(parts: dict[str, list[str]], *titles: str) -> set[str]:
    """The names that have an entry in these sections."""
    return {entry[1] for title in titles for line in parts.get(title, []) if (entry := ENTRY.match(line))}


def problems_of_summary(docstring: str | None) -> list[str]:
    if not docstring or not docstring.strip():
        return ["has no docstring"]
    first = inspect.cleandoc(docstring).splitlines()[0]
    return [] if re.search(r"\w+ .*[.?!]$", first) else [f"its first line is not a sentence: {first!r}"]


def problems_of_names(parts: dict[str, list[str]], expected: set[str], *titles: str) -> list[str]:
    entries = described(parts, *titles)
    section = " or ".join(titles)
    return [f"{section} does not describe {name!r}" for name in sorted(expected - entries)] + [
        f"{section} describes {name!r}, which does not exist" for name in sorted(entries - expected)
    ]


def parameters(function: object) -> set[str]:
    """The public parameters, without ``self`` and ``cls``."""
    signature = inspect.signature(function)
    return {name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")}


def problems_of_example(parts: dict[str, list[str]]) -> list[str]:
    return [] if any(">>> " in line for line in parts.get("Example", [])) else ["has no Example with a line of >>>"]


def problems_of_function(function: object) -> list[str]:
    parts = sections(function.__doc__ or "")
    problems = problems_of_summary(function.__doc__) + problems_of_names(parts, parameters(function), "Args")
    section = "Yields" if inspect.isgeneratorfunction(inspect.unwrap(function)) else "Returns"
    if inspect.signature(function).return_annotation not in (None, "None") and not parts.get(section):
        problems.append(f"has no {section}")
    return problems + problems_of_example(parts)


def fields(cls: type) -> set[str] | None:
    """The fields of a data class or a named tuple; None for other classes."""
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
    return set(cls._fields) if hasattr(cls, "_fields") else None


def problems_of_class(cls: type) -> Iterator[str]:
    doc = cls.__doc__
    parts = sections(doc or "")
    yield from problems_of_summary(doc)
    if dataclasses.is_dataclass(cls) and doc is not None and doc.startswith(f"{cls.__name__}("):
        yield "has no docstring but the one that dataclass makes"
    if issubclass(cls, BaseException):
        return
    names = fields(cls)
    if names is not None:
        yield from problems_of_names(parts, names, "Attributes", "Args")
    elif issubclass(cls, enum.Enum):
        yield from problems_of_names(parts, set(cls.__members__), "Attributes")
    else:  # a class without a constructor has object's or that of a type written in C, which has no names
        takes = parameters(cls.__init__) if inspect.isfunction(cls.__init__) else set()
        yield from problems_of_names(parts, takes, "Args")
    yield from problems_of_example(parts)
    for name, member in public_members(cls):
        yield from (f".{name}: {problem}" for problem in problems_of_member(member))


def public_members(cls: type) -> Iterator[tuple[str, object]]:
    """The methods and properties that mukron defines for the class, itself or in a class that it inherits from."""
    names = set(fields(cls) or ())
    for owner in cls.__mro__:
        if not owner.__module__.startswith("mukron"):
            continue
        for name, member in vars(owner).items():
            if not name.startswith("_") and name not in names and callable(getattr(member, "__get__", None)):
                names.add(name)
                yield name, member


def problems_of_member(member: object) -> list[str]:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if not inspect.isfunction(member):  # a property, cached or not
        return problems_of_summary(member.__doc__)
    parts = sections(member.__doc__ or "")
    return problems_of_summary(member.__doc__) + problems_of_names(parts, parameters(member), "Args")


def public(room: str) -> Iterator[tuple[str, object]]:
    """The functions and classes of ``__all__``; of a module without it, those that it defines."""
    module = importlib.import_module(room)
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == room]
    for name in getattr(module, "__all__", [name for name in defined if not name.startswith("_")]):
        value = getattr(module, name)
        if get_origin(value) is not None:  # an alias such as tuple[int, ...], which Python 3.10 takes for a class
            continue
        if inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):
            yield name, value


PUBLIC = [pytest.param(value, id=f"{room}.{name}") for room in ROOMS for name, value in public(room)]


@pytest.mark.parametrize("value", PUBLIC)
def test_public_names_are_documented(value):
    problems = list(problems_of_class(value)) if inspect.isclass(value) else problems_of_function(value)
    assert not problems, "\n".join(problems)


def modules(room: str) -> Iterator[str]:
    """The room, its modules, and the modules elsewhere that its public names come from."""
    yield room
    folders = getattr(importlib.import_module(room), "__path__", ())
    yield from (module.name for module in pkgutil.walk_packages(folders, f"{room}."))
    yield from (value.__module__ for _, value in public(room))


@pytest.mark.parametrize("name", dict.fromkeys(name for room in ROOMS for name in modules(room)))
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


class Undocumented:
    def __init__(self, size: int) -> None: ...

    def grow(self, times: int) -> None: ...


def half_documented(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: The first number.
        third: A number that does not exist.
    """
    return first + second


def documented(first: int, *, second: int = 2) -> int:
    """Add two numbers.

    Args:
        first: The first number: it may
            be described on two lines.
        second (int): The second number.

    Returns:
        The sum.

    Example:
        >>> 1 + 2
        3
    """
    return first + second


def test_the_checker_can_fail():
    assert problems_of_function(documented) == []
    assert problems_of_function(half_documented) == [
        "Args does not describe 'second'",
        "Args describes 'third', which does not exist",
        "has no Returns",
        "has no Example with a line of >>>",
    ]


def test_the_checker_sees_classes_and_their_methods():
    Undocumented.__module__ = "mukron.nowhere"
    assert list(problems_of_class(Undocumented)) == [
        "has no docstring",
        "Args does not describe 'size'",
        "has no Example with a line of >>>",
        ".grow: has no docstring",
        ".grow: Args does not describe 'times'",
    ]
