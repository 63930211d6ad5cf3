"""The figures of a report, each with its title, caption, description and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mukron.report.curves import draw_curves, epochs, narrowest_best
from mukron.study.curves import AXES
from mukron.study.drawing import draw_drift, draw_search, draw_transfer, slope
from mukron.study.numbers import SettingSummary, best, metric_label, profile, scheme_labels, settings
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CsvTable = tuple[Sequence[str], list[Sequence[object]]]  # columns and rows of a CSV


@dataclass(frozen=True)
class Picture:
    """A figure of the report."""

    name: str  # the name of its files
    figure: Figure
    title: str
    description: str  # for readers who cannot see the figure: what it shows
    caption: str  # for readers who can see it: how to read it
    numbers: CsvTable


def pictures(record: StudyRecord) -> Iterator[Picture]:
    """Make the figures: transfer, drift and curves of a study over widths, or the search and its curve at one width."""
    if len(record.widths) > 1:
        for axis in record.over:
            yield _transfer(record, axis)
    else:
        yield _search(record)
    if record.certificate is not None:
        yield _drift(record)
    yield _curves(record)


def _transfer(record: StudyRecord, axis: str) -> Picture:
    lines = [
        (scheme, width, profile(record, axis, scheme, width)) for scheme in record.schemes for width in record.widths
    ]
    tops = [(scheme, width, best(on_line, record.metric)) for scheme, width, on_line in lines]
    labels = scheme_labels(record)
    descriptions = [
        f"{labels[scheme]}, width {width:g}: " + ("nothing finished" if top is None else f"best at {top.at(axis):.3g}")
        for scheme, width, top in tops
    ]
    others = [AXES[other] for other in record.over if other != axis]
    return Picture(
        f"transfer-{axis}",
        draw_transfer(record, axis),
        f"{_capital(metric_label(record.metric))} against {AXES[axis]}",
        "One line per width. " + "; ".join(descriptions) + ".",
        f"One line per width, the mean over the seeds; bands go from the lowest to the highest seed. "
        f"{''.join(f'The {other} is the best one at each point. ' for other in others)}"
        f"Stars mark each width's best {AXES[axis]}, bars its interval; a hollow star is near the edge of what was "
        "tried. If the stars are aligned vertically, the best setting of a narrow network is also that of a wide one.",
        setting_numbers(record.metric, [setting for _, _, on_line in lines for setting in on_line]),
    )


def _search(record: StudyRecord) -> Picture:
    all_settings = settings(record)
    top = best(all_settings, record.metric)
    axis = "lr" if "lr" in record.over else "damping"
    pruned = sum(setting.pruned > 0 for setting in all_settings)
    return Picture(
        "search",
        draw_search(record),
        f"{_capital(metric_label(record.metric))} against {AXES[axis]}",
        "One dot per setting. " + ("Nothing finished." if top is None else f"Best at {top.at(axis):.3g}."),
        "One dot per setting; the star is the best one."
        + (f" {pruned} that were pruned are not shown." if pruned else ""),
        setting_numbers(record.metric, all_settings),
    )


def _drift(record: StudyRecord) -> Picture:
    judgements = record.certificate.judgements if record.certificate else ()
    columns = ("scheme", "axis", "width", "log2_best", "log2_low", "log2_high", "best_measured", record.metric)
    rows: list[Sequence[object]] = []
    for judged in judgements:
        drift = ("", "", "") if judged.drift is None else (judged.drift.value, judged.drift.low, judged.drift.high)
        for optimum in judged.optima:
            interval = (optimum.best.value, optimum.best.low, optimum.best.high)
            measured = (optimum.measured, optimum.value, "" if optimum.noise is None else optimum.noise)
            key = (judged.scheme, judged.axis, optimum.width)
            rows.append((*key, *interval, *measured, *drift, "; ".join(optimum.notes)))
    labels = scheme_labels(record)
    return Picture(
        "drift",
        draw_drift(record),
        "The best setting against the width",
        "; ".join(f"{labels.get(one.scheme, one.scheme)}, {AXES[one.axis]}: {slope(one)}" for one in judgements) + ".",
        "The best setting at each width with its interval, and the fitted line. Its slope is the drift: how many "
        "powers of two the best setting moves when the width doubles. A flat line transfers.",
        ((*columns, "seed_noise", "drift", "drift_low", "drift_high", "notes"), rows),
    )


def _curves(record: StudyRecord) -> Picture:
    chosen = {scheme: narrowest_best(record, scheme) for scheme in record.schemes}
    columns = ("scheme", "width", "lr", "damping", "epoch", "seeds", "mean", "lowest", "highest")
    rows: list[Sequence[object]] = [
        (
            *(scheme, width, setting.lr, _blank(setting.damping), epoch.number, len(epoch.values)),
            *(math.fsum(epoch.values) / len(epoch.values), min(epoch.values), max(epoch.values)),
        )
        for scheme, setting in chosen.items()
        if setting is not None
        for width in record.widths
        for epoch in epochs(record, setting, width)
    ]
    labels, certified = scheme_labels(record), record.certificate is not None
    rates = [f"{labels[scheme]}: learning rate {setting.lr:.3g}" for scheme, setting in chosen.items() if setting]
    where = "the narrowest width's best setting" if certified else "the best setting"
    return Picture(
        "curves",
        draw_curves(record),
        "Training curves by width" if certified else "Training curve",
        f"{_capital(metric_label(record.metric))} over the epochs at {where}. {'; '.join(rates)}.",
        f"Training at {where}, the mean over the seeds."
        + (
            " Below, the same against the width, early and late in training: wider should be better."
            if certified
            else ""
        ),
        (columns, rows),
    )


def setting_numbers(metric: str, summaries: Sequence[SettingSummary]) -> CsvTable:
    """Return settings as the rows of a CSV, with a mean only where every seed finished."""
    columns = ("scheme", "width", "lr", "damping", "finished", "diverged", "pruned", metric, "lowest", "highest")
    rows: list[Sequence[object]] = []
    for setting in summaries:
        numbers = (setting.mean, *setting.spread) if setting.whole else ("", "", "")
        counts = (len(setting.values), setting.diverged, setting.pruned)
        rows.append((setting.scheme, setting.width, setting.lr, _blank(setting.damping), *counts, *numbers))
    return columns, rows


def wider_numbers(record: StudyRecord) -> CsvTable:
    """Return the metric against the width, early and late in training."""
    rows = [
        (judged.scheme, judged.axis, wider.when, wider.epoch, width, mean, _blank(error))
        for judged in (record.certificate.judgements if record.certificate else ())
        for wider in judged.wider
        for width, mean, error in wider.values
    ]
    return ("scheme", "axis", "when", "epoch", "width", record.metric, "standard_error"), list(rows)


def run_numbers(record: StudyRecord) -> CsvTable:
    """Return every run."""
    rows = [
        (
            *(run.point.scheme, run.point.width, run.point.lr, _blank(run.point.damping), run.point.seed),
            *(run.status, _blank(run.value(record.metric)), run.seconds, run.reason),
        )
        for run in record.results
    ]
    return ("scheme", "width", "lr", "damping", "seed", "status", record.metric, "seconds", "reason"), list(rows)


def _blank(value: float | None) -> object:
    return "" if value is None else value


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
