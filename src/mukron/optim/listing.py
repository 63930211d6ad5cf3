"""The methods and their options as tables for the docs, from their records.

``python -m mukron.optim.listing docs/training.md`` writes them between the page's two markers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mukron.optim.spec import SPECS, MethodSpec

MARKER = "<!-- methods -->"


def methods_table() -> str:
    """Markdown: a row a method, with its optimizer, default damping, learning rates, and what it records."""
    columns = ("method", "optimizer", "default damping", "default lr", "learning rates searched", "records of a pass")
    return _markdown(columns, (_method_row(spec) for spec in SPECS.values()))


def _method_row(spec: MethodSpec) -> tuple[str, ...]:
    names = [spec.name] if spec.family is None else [spec.name, spec.family.pattern]
    package = "mukron" if spec.layerwise else "torch.optim"
    low, high = spec.lr_range
    return (
        ", ".join(f"`{name}`" for name in names),
        f"`{package}.{spec.optimizer.__name__}`",
        "-" if spec.damping is None else f"`{spec.damping.text()}`",
        f"{spec.usual_lr({}):g}",
        f"2^{low} to 2^{high}",
        ", ".join(spec.captures) or "-",
    )


def options_table() -> str:
    """Markdown: a row an option, with the methods that have it."""
    methods: dict[tuple[str, str], list[str]] = {}  # by name and help: one name may mean two things
    for spec in SPECS.values():
        for option in spec.options:
            methods.setdefault((option.name, option.help), []).append(spec.name)
    rows = ((f"`{name}`", text, ", ".join(having)) for (name, text), having in methods.items())
    return _markdown(("option", "what it does", "methods"), rows)


def listing() -> str:
    """Both tables, as they stand between the markers."""
    return f"{MARKER}\n{methods_table()}\n\n{options_table()}\n{MARKER}"


def write(page: Path) -> None:
    """Replace what stands between the page's markers."""
    parts = page.read_text(encoding="utf-8").split(MARKER)
    if len(parts) != 3:
        raise ValueError(f"{page}: expected {MARKER} twice, found it {len(parts) - 1} times")
    page.write_text(parts[0] + listing() + parts[2], encoding="utf-8")


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        write(Path(path))
