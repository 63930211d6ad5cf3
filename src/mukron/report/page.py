"""A study's report: figures, the numbers behind them, and one page that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mukron import figures
from mukron.report import tables
from mukron.report.numbers import AXES, best, names, settings, subject, words
from mukron.report.pictures import Picture, pictures, run_numbers, wider_numbers
from mukron.report.svg import inline
from mukron.study.errors import StudyError
from mukron.study.record import StudyRecord

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_report(record: StudyRecord, folder: str | os.PathLike[str]) -> list[Path]:
    """Write report.html, and beside it every figure (SVG and PNG) and the numbers (CSV). Returns the files."""
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ValueError(f"a report needs {package}, which is not installed: pip install 'mukron[studies]'")
    if not record.results:
        raise StudyError(f"{record.name}: no run has ended, so there is nothing to report")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    shown = list(pictures(record))
    written = []
    for picture in shown:
        written += figures.save(picture.figure, target / picture.name)
        written.append(figures.write_csv(target / picture.name, *picture.numbers))
    if record.certificate is not None:
        written.append(figures.write_csv(target / "wider", *wider_numbers(record)))
    written.append(figures.write_csv(target / "runs", *run_numbers(record)))
    drawn = [(picture, (target / f"{picture.name}.svg").read_text(encoding="utf-8")) for picture in shown]
    page = target / "report.html"
    page.write_text(render(record, drawn), encoding="utf-8")
    return [page, *written]


def render(record: StudyRecord, drawn: Sequence[tuple[Picture, str]]) -> str:
    """The page, with each figure's SVG in it."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["numeric"] = tables.numeric
    svgs = [
        (picture, Markup(inline(svg, f"figure-{picture.name}", picture.title, picture.description)))
        for picture, svg in drawn
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(figures=svgs, **_content(record))


def _content(record: StudyRecord) -> dict[str, Any]:
    top = best(settings(record), record.metric)
    found = [] if top is None else [(AXES[axis], f"{top.at(axis):.4g}") for axis in record.over]
    return {
        "record": record,
        "subject": subject(record),
        "tally": tables.tally(record),
        "metric": words(record.metric),
        "cards": tables.cards(record),
        "best": None
        if top is None
        else {"settings": found, "width": top.width, "mean": top.mean, "who": names(record)[top.scheme]},
        "optima": tables.optima_tables(record),
        "tried": tables.tried_table(record),
        "diverged": tables.diverged_table(record),
        "config": tables.config_table(record, all_fields=False),
        "all_config": tables.config_table(record, all_fields=True),
        "every": tables.settings_table(record),
        "made": tables.made_table(record),
        "command": record.made.get("command", ""),
        "snippet": "" if top is None else tables.snippet(record.best(), record.metric),
    }
