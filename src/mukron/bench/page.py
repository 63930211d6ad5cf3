"""The page of benchmarks, written from the stored results only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mukron import figures
from mukron.bench.drawing import draw_result
from mukron.bench.peers import KFAC_PEERS, SHAMPOO_PEERS
from mukron.bench.result import BenchResult
from mukron.table import Table

Drawer = Callable[[Path], object]
SectionWriter = Callable[[Path, Path], str]
PAGE_HEAD = """\
# What a step costs

Written by `mukron bench page` from the results of `mukron bench`; run again by the commands below. Every single time is
in the file that a section names.

K-FAC, FOOF and Shampoo are measured with the plain step of the paper (`trust=None`), refreshed at every step or every
ten, except in rows named "defaults" (the optimizer built from the model alone: bounded steps, averaged factors,
momentum on the gradient) and "bounded". A step with the defaults costs more, since averaged factors are matrices as
large as the layers; [the optimizers](optimizers.md#which-one) say how to get a cheaper one."""


HEADLINES = {
    "kfac-step": ("K-FAC (mc), fused", "K-FAC (empirical), fused", "K-FAC, bounded", "K-FAC, defaults"),
    "shampoo-step": ("Shampoo (tracked), fused", "Shampoo (tracked), fused, every 10", "Shampoo, defaults"),
    "conv": ("K-FAC (mc), every 10", "K-FAC, defaults"),
    "sweep": ("stacked",),
}  # by benchmark, the methods of the summary table


def write_performance_page(files: Sequence[Path], out: Path) -> Path:
    """Writes the page, and draws every figure again next to its file so that both show the same numbers.

    Args:
        files: Result files of benchmarks, .json.
        out: The page to write.

    Returns:
        The page.
    """
    if figures.available():
        for file in files:
            draw_result(BenchResult.load(file), file.with_suffix(".svg"), (".svg",))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page_text(files, out.parent), encoding="utf-8")
    return out


def page_text(files: Sequence[Path], beside: Path) -> str:
    """Returns the page as Markdown: the summary, then one section per file.

    Args:
        files: Result files of benchmarks, .json.
        beside: The page's folder, which links are relative to.

    Returns:
        The text of the page.
    """
    results = [BenchResult.load(file) for file in files]
    short = "\n".join(["## In short", "", *markdown_lines(summary_table(results))])
    sections = [section(result, file, beside) for result, file in zip(results, files, strict=True)]
    return "\n\n".join([PAGE_HEAD, short, *sections]) + "\n"


def summary_table(results: Sequence[BenchResult]) -> Table:
    """Returns the table of this library's main methods, each next to the fastest other library.

    Args:
        results: Results of benchmarks.

    Returns:
        The table; one row per method of ``HEADLINES`` that was measured.

    Example:
        >>> summary_table([]).rows
        ()
    """
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
            peers = [peer for peer in result.at(row.width) if peer.method in others and peer.milliseconds]
            fastest = min(peers, key=lambda peer: peer.median, default=None)
            best_peer = "-" if fastest is None else f"{fastest.median / base.median:.3g}, {fastest.method}"
            where = f"{result.machine.get('gpu') or result.machine['cpu']}, {result.settings['precision']}"
            lines.append((f"{result.bench}: {method}", where, f"x {result.base}: {times}", memory, best_peer))
    columns = ("", "on", "time by width", "memory at the widest", "fastest other library there")
    return Table("In short", columns, tuple(lines), ())


def section(result: BenchResult, file: Path, beside: Path) -> str:
    """Returns one benchmark's section as Markdown.

    Args:
        result: The benchmark's result.
        file: The file it was read from.
        beside: The page's folder, which links are relative to.

    Returns:
        The text of the section.
    """
    where = result.machine.get("gpu") or result.machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    machine = f"{where}, {result.machine['cores']} cores, {result.machine['threads']} threads"
    lines = [f"## {result.bench}, {where}, {result.settings['precision']}", "", f"{result.title}.", ""]
    lines += [f"On {machine}, {result.date}; {versions}.", "", "```sh", result.command, "```", ""]
    lines += markdown_lines(result.table())
    picture = file.with_suffix(".svg")
    if picture.exists():
        lines += ["", f"![{result.title}]({page_link(picture, beside)})"]
    lines += ["", f"Numbers: [{file.name}]({page_link(file, beside)})."]
    parts = result.parts_table()
    if parts is not None:
        lines += ["", f"### {parts.title}", "", *markdown_lines(parts)]
    return "\n".join(lines)


def markdown_lines(table: Table) -> list[str]:
    """Returns a table as lines of Markdown, with its notes as a list below.

    Args:
        table: The table; its title is left out.

    Returns:
        The lines.

    Example:
        >>> markdown_lines(Table("Squares", ("x", "x^2"), (("2", "4"),)))
        ['| x | x^2 |', '| --- | --- |', '| 2 | 4 |']
    """
    lines = [_row(table.columns), _row(["---"] * len(table.columns)), *map(_row, table.rows)]
    return [*lines, *([""] if table.notes else []), *(f"- {note}" for note in table.notes)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_link(file: Path, beside: Path) -> str:
    """Returns the address of a file as a page links it.

    Args:
        file: The file.
        beside: The page's folder.

    Returns:
        The relative path.

    Example:
        >>> page_link(Path("docs/figures/a.svg"), Path("docs"))
        'figures/a.svg'
    """
    return Path(os.path.relpath(file, beside)).as_posix()


def write_marked_page(file: Path, page: Path, marker: str, draw: Drawer, section: SectionWriter) -> Path:
    """Replace what stands between a page's two markers, and draw the figure again next to the result.

    Args:
        file: A stored result, .json.
        page: The page, which has the marker twice.
        marker: The marker.
        draw: Draws the result into the file that it is given.
        section: From the result's file and the page's folder to the text between the markers.

    Returns:
        The page.

    Raises:
        ValueError: The page is not there or has no markers.
    """
    before, after = around_markers(page, marker)
    if figures.available():
        draw(file.with_suffix(".svg"))
    page.write_text(f"{before}{marker}\n{section(file, page.parent)}\n{marker}{after}", encoding="utf-8")
    return page


def around_markers(page: Path, marker: str) -> tuple[str, str]:
    """Return what stands before the first marker of a page and after the second.

    Args:
        page: The page.
        marker: The marker, which the page has twice.

    Returns:
        The two texts.

    Raises:
        ValueError: The page is not there or has no markers.
    """
    if not page.exists():
        raise ValueError(f"{page}: there is no such page; it must exist, and have {marker} twice")
    parts = page.read_text(encoding="utf-8").split(marker)
    if len(parts) != 3:
        raise ValueError(f"{page}: expected {marker} twice, found it {len(parts) - 1} times")
    return parts[0], parts[2]
