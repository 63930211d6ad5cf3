"""One name means one thing: no class, type or constant is defined in two product files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import mukron

SOURCE = Path(mukron.__file__).parent
# The first fields of every file that the library writes; the module that writes a kind of file defines the two for it.
STAMP = {"KIND", "VERSION"}
PLACEHOLDERS = {"TypeVar", "ParamSpec"}  # they stand for a type within one signature and mean nothing outside


def definitions(tree: ast.Module) -> Iterator[str]:
    """The classes and capitalized names that a module defines at its top level, without private ones."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(value=ast.Call(func=ast.Name(id=function))) if function in PLACEHOLDERS:
                names = []
            case ast.Assign(targets=targets):
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if name[0].isupper())


def test_no_class_or_constant_is_defined_twice():
    modules = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in definitions(ast.parse(path.read_text())):
            modules[name].append(str(path.relative_to(SOURCE)))
    assert len(modules) > 500  # the files were found
    assert not {name: paths for name, paths in modules.items() if len(set(paths)) > 1 and name not in STAMP}


def test_definitions_are_found():
    tree = ast.parse("class A: ...\nB, C = 1, 2\nD: int = 3\ne = _F = 4\nT = TypeVar('T')\ndef g():\n    H = 5")
    assert list(definitions(tree)) == ["A", "B", "C", "D"]
