"""The table of faults in docs/reliability.md, as ``make soak`` wrote it: nothing wrong, and every kind is in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST = 200  # changes of every kind of file


def test_no_fault_of_the_table_did_harm():
    page = (ROOT / "docs" / "reliability.md").read_text()
    _, table, _ = page.split("<!-- faults -->")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    for kind, tried, survived, *wrong in rows:
        assert wrong == ["0", "0", "0"], kind
        assert tried == survived != "0"
    files = {kind: int(tried.replace(",", "")) for kind, tried, *_ in rows if kind.endswith((", edited", ", damaged"))}
    assert min(files.values()) >= LEAST
    source = (ROOT / "tests" / "faults" / "test_mutated_files.py").read_text()
    kinds = re.findall(r'^    "([^"]+)": \("', source, re.MULTILINE)
    assert len(kinds) > 10
    assert {f"{kind}, edited" for kind in kinds} <= set(files)
    assert {"kill -9 at a random moment", "a full disk", "a pause longer than the lease"} <= {row[0] for row in rows}
