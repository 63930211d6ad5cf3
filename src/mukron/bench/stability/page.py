"""The tables of the docs' page on stability, written from the stored result only."""

from __future__ import annotations

from pathlib import Path

from mukron.bench.page import markdown_lines, page_link, write_marked_page
from mukron.bench.stability.drawing import draw_stability
from mukron.bench.stability.problems import STABILITY_PROBLEMS
from mukron.bench.stability.result import StabilityResult

STABILITY_MARKER = "<!-- stability -->"


def write_stability_page(file: Path, page: Path) -> Path:
    """Replace what stands between the page's two markers, and draw the figure again next to the result.

    Args:
        file: A result of ``mukron bench stability``, .json.
        page: The page, which has the marker ``<!-- stability -->`` twice.

    Returns:
        The page.

    Raises:
        ValueError: The page is not there or has no markers.
    """
    result = StabilityResult.load(file)
    return write_marked_page(
        file, page, STABILITY_MARKER, lambda path: draw_stability(result, path, (".svg",)), stability_section
    )


def stability_section(file: Path, beside: Path) -> str:
    """Return what stands between the markers: where it was run, the tables, the figure.

    Args:
        file: A result of ``mukron bench stability``, .json.
        beside: The page's folder, which links are relative to.

    Returns:
        The text.
    """
    result = StabilityResult.load(file)
    where = result.machine.get("gpu") or result.machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [f"On {where}, {result.date}; {versions}. Run again by", "", "```sh", *result.commands, "```", ""]
    findings = result.findings()
    if findings:
        used = list(dict.fromkeys(finding.row.problem for finding in findings))
        lines += [f"- `{name}`: {STABILITY_PROBLEMS[name].title}" for name in used]
        lines += ["", "Stable rows:", "", *markdown_lines(result.summary()), "", "All rows:", ""]
        lines += markdown_lines(result.table())
        picture = file.with_suffix(".svg")
        lines += ["", f"![Largest and final losses by refresh interval]({page_link(picture, beside)})", ""]
    if result.fitted:
        lines += ["Fitted data:", "", *markdown_lines(result.fitted_table()), ""]
    return "\n".join([*lines, f"Numbers: [{file.name}]({page_link(file, beside)})."])
