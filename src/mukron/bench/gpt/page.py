"""The tables of the docs' page on the GPT, written from the stored result only."""

from __future__ import annotations

from pathlib import Path

from mukron.bench.gpt.choice import choice_tables
from mukron.bench.gpt.drawing import draw_gpt
from mukron.bench.gpt.result import GPTResult
from mukron.bench.page import markdown_lines, page_link, write_marked_page

GPT_MARKER = "<!-- gpt -->"


def write_gpt_page(file: Path, page: Path) -> Path:
    """Replace what stands between the page's two markers, and draw the figure again next to the result.

    Args:
        file: A result of ``mukron bench gpt``, .json.
        page: The page, which has the marker ``<!-- gpt -->`` twice.

    Returns:
        The page.

    Raises:
        ValueError: The page is not there or has no markers.
    """
    result = GPTResult.load(file)
    return write_marked_page(file, page, GPT_MARKER, lambda path: draw_gpt(result, path, (".svg",)), gpt_section)


def gpt_section(file: Path, beside: Path) -> str:
    """Return what stands between the markers: where it was run, the tables, the figure.

    Args:
        file: A result of ``mukron bench gpt``, .json.
        beside: The page's folder, which links are relative to.

    Returns:
        The text.
    """
    result = GPTResult.load(file)
    where = result.machine.get("gpu") or result.machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        f"On {where}, {result.date}; {versions}; text {result.text}, {result.precision} products. Run again by",
        "",
    ]
    lines += ["```sh", *result.commands, "```", ""]
    for choice in choice_tables(result):
        lines += [*markdown_lines(choice), ""]
    if result.transfers():
        picture = page_link(file.with_suffix(".svg"), beside)
        lines += [
            *markdown_lines(result.transfer_table()),
            "",
            f"![Loss against what is tuned, by size]({picture})",
            "",
        ]
    lines += ["<details><summary>All runs</summary>", "", *markdown_lines(result.table()), "", "</details>", ""]
    lines += [f"Numbers: [{file.name}]({page_link(file, beside)})."]
    return "\n".join(lines)
