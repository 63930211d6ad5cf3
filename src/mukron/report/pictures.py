"""Which figures a report has, each with its words and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mukron.report.curves import carried, draw_curves, epochs
from mukron.report.drawing import draw_drift, draw_search, draw_transfer, slope
from mukron.report.numbers import AXES, Setting, best, names, profile, settings, words
from mukron.study.record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = tuple[Sequence[str], list[Sequence[object]]]  # columns and rows of a CSV


@dataclass(frozen=True)
class Picture:
    """A figure of the report."""

    name: str  # of its files
    figure: Figure
    title: str
    description: str  # for those who do not see it: what it shows
    caption: str  # for those who do: how to read it
    numbers: Numbers


def pictures(record: StudyRecord) -> Iterator[Picture]:
    """Of a study over widths: transfer, drift and curves; of one width: the search and its curve."""
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
    tops = [(scheme, width, best(found, record.metric)) for scheme, width, found in lines]
    shown = names(record)
    described = [
        f"{shown[scheme]}, width {width:g}: " + ("nothing finished" if top is None else f"best at {top.at(axis):.3g}")
        for scheme, width, top in tops
    ]
    other = [AXES[each] for each in record.over if each != axis]
    return Picture(
        f"transfer-{axis}",
        draw_transfer(record, axis),
        f"{_capital(words(record.metric))} against {AXES[axis]}",
        "One line a width. " + "; ".join(described) + ".",
        f"One line a width, the mean over the seeds; bands go from the lowest to the highest seed. "
        f"{''.join(f'The {each} is the best one at each point. ' for each in other)}"
        f"Stars mark each width's best {AXES[axis]}, bars its interval; a hollow star is near the edge of what was "
        "tried. If the stars stand above one another, the setting found on a narrow network holds for a wide one.",
        setting_numbers(record.metric, [each for _, _, found in lines for each in found]),
    )


def _search(record: StudyRecord) -> Picture:
    found = settings(record)
    top = best(found, record.metric)
    axis = "lr" if "lr" in record.over else "damping"
    pruned = sum(each.pruned > 0 for each in found)
    return Picture(
        "search",
        draw_search(record),
        f"{_capital(words(record.metric))} against {AXES[axis]}",
        "One dot a setting. " + ("Nothing finished." if top is None else f"Best at {top.at(axis):.3g}."),
        "One dot a setting, the star is the best one."
        + (f" {pruned} that fell behind were given up and are not shown." if pruned else ""),
        setting_numbers(record.metric, found),
    )


def _drift(record: StudyRecord) -> Picture:
    judged = record.certificate.judgements if record.certificate else ()
    columns = ("scheme", "axis", "width", "log2_best", "log2_low", "log2_high", "best_measured", record.metric)
    rows: list[Sequence[object]] = []
    for each in judged:
        drift = ("", "", "") if each.drift is None else (each.drift.value, each.drift.low, each.drift.high)
        for optimum in each.optima:
            interval = (optimum.best.value, optimum.best.low, optimum.best.high)
            there = (optimum.measured, optimum.value, "" if optimum.noise is None else optimum.noise)
            rows.append((each.scheme, each.axis, optimum.width, *interval, *there, *drift, "; ".join(optimum.notes)))
    shown = names(record)
    return Picture(
        "drift",
        draw_drift(record),
        "The best setting against the width",
        "; ".join(f"{shown.get(each.scheme, each.scheme)}, {AXES[each.axis]}: {slope(each)}" for each in judged) + ".",
        "The best setting at each width with its interval, and the fitted line. Its slope is the drift: how many "
        "powers of two the best setting moves when the width doubles. Flat is what transfers.",
        ((*columns, "seed_noise", "drift", "drift_low", "drift_high", "notes"), rows),
    )


def _curves(record: StudyRecord) -> Picture:
    chosen = {scheme: carried(record, scheme) for scheme in record.schemes}
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
    shown, wide = names(record), record.certificate is not None
    at = [f"{shown[scheme]}: learning rate {each.lr:.3g}" for scheme, each in chosen.items() if each is not None]
    whose = "the narrowest width's best setting" if wide else "the best setting"
    return Picture(
        "curves",
        draw_curves(record),
        "Training curves by width" if wide else "Training curve",
        f"{_capital(words(record.metric))} over the epochs at {whose}. {'; '.join(at)}.",
        f"Training at {whose}, the mean over the seeds."
        + (" Below, the same against the width, early and late in training: wider should be better." if wide else ""),
        (columns, rows),
    )


def setting_numbers(metric: str, found: Sequence[Setting]) -> Numbers:
    """Settings as a CSV has them; a mean only where every seed finished."""
    columns = ("scheme", "width", "lr", "damping", "finished", "diverged", "pruned", metric, "lowest", "highest")
    rows: list[Sequence[object]] = []
    for each in found:
        numbers = (each.mean, *each.spread) if each.whole else ("", "", "")
        counts = (len(each.values), each.diverged, each.pruned)
        rows.append((each.scheme, each.width, each.lr, _blank(each.damping), *counts, *numbers))
    return columns, rows


def wider_numbers(record: StudyRecord) -> Numbers:
    """The metric against the width, early and late."""
    rows = [
        (each.scheme, each.axis, wider.when, wider.epoch, width, mean, _blank(error))
        for each in (record.certificate.judgements if record.certificate else ())
        for wider in each.wider
        for width, mean, error in wider.values
    ]
    return ("scheme", "axis", "when", "epoch", "width", record.metric, "standard_error"), list(rows)


def run_numbers(record: StudyRecord) -> Numbers:
    """Every run."""
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
