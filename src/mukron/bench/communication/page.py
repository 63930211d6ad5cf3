"""The tables of the docs' page on distributed training, written from the stored result only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mukron.bench.communication.drawing import draw_communication
from mukron.bench.communication.result import CommunicationResult
from mukron.bench.page import markdown_lines, page_link, write_marked_page

COMMUNICATION_MARKER = "<!-- communication -->"


def write_communication_page(file: Path, page: Path) -> Path:
    """Replace what stands between the page's two markers, and draw the figure again next to the result.

    Args:
        file: A result of ``mukron bench communication``, .json.
        page: The page, which has the marker ``<!-- communication -->`` twice.

    Returns:
        The page.

    Raises:
        ValueError: The page is not there or has no markers.
    """
    result = CommunicationResult.load(file)
    drawn = lambda path: draw_communication(result, path, (".svg",))  # noqa: E731
    return write_marked_page(file, page, COMMUNICATION_MARKER, drawn, communication_section)


def communication_section(file: Path, beside: Path) -> str:
    """Return what stands between the markers: the command, the tables, the figure.

    Args:
        file: A result of ``mukron bench communication``, .json.
        beside: The page's folder, which links are relative to.

    Returns:
        The text.
    """
    result = CommunicationResult.load(file)
    lines = [f"{result.where()} Run again by", "", "```sh", result.command, "```", ""]
    tables = result.tables()
    for table in tables:
        lines += [f"**{table.title}**", "", *markdown_lines(replace(table, notes=())), ""]
    lines += [*(f"- {note}" for note in tables[0].notes), ""]
    picture = page_link(file.with_suffix(".svg"), beside)
    lines += [f"![Bytes that arrive on a rank, over the batch]({picture})", ""]
    lines += [f"Numbers: [{file.name}]({page_link(file, beside)})."]
    return "\n".join(lines)
