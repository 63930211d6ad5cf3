"""The report of a study: figures, their numbers, and one HTML page that needs no other file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mukron import figures
from mukron.report import tables
from mukron.report.pictures import Picture, pictures, run_numbers, wider_numbers
from mukron.report.svg import inline
from mukron.study.curves import AXES
from mukron.study.errors import StudyError
from mukron.study.numbers import best, metric_label, scheme_labels, settings, subject
from mukron.study.record import StudyRecord

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_report(record: StudyRecord, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the report of a study: report.html, and its figures (SVG and PNG) and numbers (CSV) as files.

    Args:
        record: The record of the study.
        folder: The folder to write to. It is created if it does not exist.

    Returns:
        The paths of the files, beginning with report.html.

    Raises:
        ValueError: matplotlib or jinja2 is not installed.
        StudyError: No run has ended.

    Example:
        >>> from mukron.report import write_report
        >>> from mukron.study import Point, Result, StudyRecord
        >>> from mukron.train import RunConfig
        >>> points = [Point("mup", width, lr, None, seed=0) for width in (64, 128) for lr in (0.1, 0.2, 0.4)]
        >>> epochs = {point: [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}] for point in points}
        >>> results = [Result(point, "finished", epochs[point]) for point in points]
        >>> record = StudyRecord("example", RunConfig(method="sgd"), ("lr",), "test_loss", results)
        >>> [path.name for path in write_report(record, "report")][:3]
        ['report.html', 'transfer-lr.svg', 'transfer-lr.png']
    """
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ValueError(f"a report needs {package}, which is not installed: pip install 'mukron[studies]'")
    if not record.results:
        raise StudyError(f"{record.name}: no run has ended, so there is nothing to report")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    all_pictures = list(pictures(record))
    written = []
    for picture in all_pictures:
        written += figures.save(picture.figure, target / picture.name)
        written.append(figures.write_csv(target / picture.name, *picture.numbers))
    if record.certificate is not None:
        written.append(figures.write_csv(target / "wider", *wider_numbers(record)))
    written.append(figures.write_csv(target / "runs", *run_numbers(record)))
    drawings = [(picture, (target / f"{picture.name}.svg").read_text(encoding="utf-8")) for picture in all_pictures]
    page = target / "report.html"
    page.write_text(render(record, drawings), encoding="utf-8")
    return [page, *written]


def render(record: StudyRecord, drawings: Sequence[tuple[Picture, str]]) -> str:
    """Return the HTML page, which contains the SVG of each figure."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["numeric"] = tables.numeric
    svgs = [
        (picture, Markup(inline(svg, f"figure-{picture.name}", picture.title, picture.description)))
        for picture, svg in drawings
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(figures=svgs, **_content(record))


def _content(record: StudyRecord) -> dict[str, Any]:
    top = best(settings(record), record.metric)
    top_settings = [] if top is None else [(AXES[axis], f"{top.at(axis):.4g}") for axis in record.over]
    return {
        "record": record,
        "subject": subject(record),
        "tally": tables.tally(record),
        "metric": metric_label(record.metric),
        "cards": tables.cards(record),
        "best": None
        if top is None
        else {"settings": top_settings, "width": top.width, "mean": top.mean, "who": scheme_labels(record)[top.scheme]},
        "optima": tables.optima_tables(record),
        "tried": tables.tried_table(record),
        "diverged": tables.diverged_table(record),
        "config": tables.config_table(record, all_fields=False),
        "all_config": tables.config_table(record, all_fields=True),
        "every": tables.settings_table(record),
        "origin": tables.origin_table(record),
        "command": record.made.get("command", ""),
        "snippet": "" if top is None else tables.snippet(record.best(), record.metric),
    }
