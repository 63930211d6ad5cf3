"""The page of benchmarks, from the results that are kept, and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mukron import figures
from mukron.bench.drawing import draw
from mukron.bench.result import Result
from mukron.table import Table

HEAD = """\
# What a step costs

Written by `mukron bench page` from the results of `mukron bench`; run again by the commands below. Every single time is
in the file that a section names."""


def write_page(files: Sequence[Path], out: Path) -> Path:
    """OUT, a section a file; each figure is drawn anew beside its file, so that it shows the same numbers."""
    sections = []
    for file in files:
        result = Result.load(file)
        if figures.available():
            draw(result, file.with_suffix(".svg"), (".svg",))
        sections.append(section(result, file, out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join([HEAD, *sections]) + "\n", encoding="utf-8")
    return out


def section(result: Result, file: Path, beside: Path) -> str:
    """As Markdown. beside: the page's folder, from which links lead."""
    where = result.machine.get("gpu") or result.machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    machine = f"{where}, {result.machine['cores']} cores, {result.machine['threads']} threads"
    lines = [f"## {result.bench}, {where}, {result.settings['precision']}", "", f"{result.title}.", ""]
    lines += [f"On {machine}, {result.date}; {versions}.", "", "```sh", result.command, "```", ""]
    lines += _markdown(result.table())
    picture = file.with_suffix(".svg")
    if picture.exists():
        lines += ["", f"![{result.title}]({_link(picture, beside)})"]
    lines += ["", f"Numbers: [{file.name}]({_link(file, beside)})."]
    parts = result.parts_table()
    if parts is not None:
        lines += ["", f"### {parts.title}", "", *_markdown(parts)]
    return "\n".join(lines)


def _markdown(table: Table) -> list[str]:
    lines = [_row(table.columns), _row(["---"] * len(table.columns)), *map(_row, table.rows)]
    return [*lines, "", *(f"- {note}" for note in table.notes)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(file: Path, beside: Path) -> str:
    return Path(os.path.relpath(file, beside)).as_posix()
