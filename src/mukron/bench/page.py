"""The page of benchmarks, from the results that are kept, and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mukron import figures
from mukron.bench.drawing import draw
from mukron.bench.peers import KFAC_PEERS, SHAMPOO_PEERS
from mukron.bench.result import Result
from mukron.table import Table

HEAD = """\
# What a step costs

Written by `mukron bench page` from the results of `mukron bench`; run again by the commands below. Every single time is
in the file that a section names."""


HEADLINES = {
    "kfac-step": ("K-FAC (mc), fused", "K-FAC (empirical), fused"),
    "shampoo-step": ("Shampoo (tracked), fused", "Shampoo (tracked), fused, every 10"),
    "conv": ("K-FAC (mc), every 10",),
    "sweep": ("stacked",),
}  # what is told in short


def write_page(files: Sequence[Path], out: Path) -> Path:
    """OUT; each figure is drawn anew beside its file, so that it shows the same numbers."""
    if figures.available():
        for file in files:
            draw(Result.load(file), file.with_suffix(".svg"), (".svg",))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(files, out.parent), encoding="utf-8")
    return out


def page(files: Sequence[Path], beside: Path) -> str:
    """What it comes to, then a section a file. beside: the page's folder, from which links lead."""
    results = [Result.load(file) for file in files]
    short = "\n".join(["## In short", "", *_markdown(in_short(results))])
    sections = [section(result, file, beside) for result, file in zip(results, files, strict=True)]
    return "\n\n".join([HEAD, short, *sections]) + "\n"


def in_short(results: Sequence[Result]) -> Table:
    """The best of ours by width, and the fastest of other libraries beside it."""
    others = {peer.name for peer in (*KFAC_PEERS, *SHAMPOO_PEERS)}
    lines = []
    for result in results:
        for method in HEADLINES.get(result.bench, ()):
            pairs = [(row, result.base_at(row.width)) for row in result.rows if row.method == method]
            known = sorted(
                ((row, base) for row, base in pairs if row.milliseconds and base is not None),
                key=lambda pair: pair[0].width,
            )
            if not known:
                continue
            row, base = known[-1]
            times = ", ".join(f"{row.median / base.median:.3g} at {row.width}" for row, base in known)
            memory = f"{row.memory / base.memory:.2f}" if row.memory and base.memory else "-"
            theirs = [each for each in result.at(row.width) if each.method in others and each.milliseconds]
            fastest = min(theirs, key=lambda each: each.median, default=None)
            peer = "-" if fastest is None else f"{fastest.median / base.median:.3g}, {fastest.method}"
            where = f"{result.machine.get('gpu') or result.machine['cpu']}, {result.settings['precision']}"
            lines.append((f"{result.bench}: {method}", where, f"x {result.base}: {times}", memory, peer))
    columns = ("", "on", "time by width", "memory at the widest", "fastest other library there")
    return Table("In short", columns, tuple(lines), ())


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
    return [*lines, *([""] if table.notes else []), *(f"- {note}" for note in table.notes)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(file: Path, beside: Path) -> str:
    return Path(os.path.relpath(file, beside)).as_posix()
