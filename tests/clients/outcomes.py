"""What the tests of this folder found, as the tables of docs/works-with.md."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"
BEGIN, END = "<!-- tests/clients: begin -->", "<!-- tests/clients: end -->"
WORDS = {"passed": "yes", "failed": "no", "skipped": "not run"}
Cell = tuple[str, str, str]  # table, row, column

outcomes: dict[Cell, set[str]] = defaultdict(set)


def note(cell: Cell, outcome: str) -> None:
    outcomes[cell].add(outcome)


def word(found: set[str]) -> str:
    """Of several tests: all must have passed."""
    return next((WORDS[outcome] for outcome in ("failed", "skipped", "passed") if outcome in found), "")


def tables() -> str:
    """Every table, with all in the order of the alphabet."""
    text = []
    for title in sorted({table for table, _, _ in outcomes}):
        cells = {(row, column): found for (table, row, column), found in outcomes.items() if table == title}
        rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
        text += [f"### {title}", "", f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for row in rows:
            words = " | ".join(word(cells.get((row, column), set())) for column in columns)
            text.append(f"| {row} | {words} |")
        text.append("")
    return "\n".join(text)


def page() -> str:
    """The page with these tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def snippet(text: str) -> str:
    """The one block of code on the page that has this text."""
    (found,) = (code for code in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if text in code)
    return found
