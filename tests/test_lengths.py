"""Pages stay short: no product file above 400 lines but flat catalogues, no class above 250."""

from __future__ import annotations

import ast
from pathlib import Path

import mukron

SOURCE = Path(mukron.__file__).parent
CATALOGUES = {"paper/claims.py", "paper/drawing.py"}


def test_no_file_is_above_400_lines():
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert set(long) <= CATALOGUES, long


def test_no_class_is_above_250_lines():
    long = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > 250:
                long[f"{path.relative_to(SOURCE)}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert not long
