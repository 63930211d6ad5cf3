"""Checks of claims on width: is a wider network better, or worse, than a narrower one?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from mukron.paper.claims import (
    RELATIVE_MARGIN,
    BestOf,
    ClaimCheck,
    Value,
    beats,
    best_value,
    differ,
    difference,
    formatted,
    power_text,
    revised,
    scheme_of,
    value_of,
)
from mukron.paper.evidence import Evidence
from mukron.paper.optima import may_lie_beyond
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Finding
from mukron.study.numbers import best, settings
from mukron.study.points import lowest_is_best
from mukron.study.record import StudyRecord


def wider_is_better(
    part: str, scheme: str | None = None, metric: str | None = None, strictly: bool = True
) -> ClaimCheck:
    """Checks that, with each width at its best setting, no width is worse than a narrower one and the widest is better.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.
        metric: The metric; None for the study's.
        strictly: False if it is only claimed that no width is worse than a narrower one.

    Returns:
        The check.
    """

    def before(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        values = {width: best_value(record, scheme_of(record, scheme), width, metric) for width in record.widths}
        return _wider(part, values, metric or record.metric, strictly)

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        return _inside(before(evidence), record, scheme_of(record, scheme), better=record.widths[-1])

    return revised(check, before, INSIDE_RULE)


def wider_is_better_there(part: str, scheme: str | None = None) -> ClaimCheck:
    """Checks that at the narrowest width's best setting no width is worse than a narrower one and the widest is better.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        scheme_name = scheme_of(record, scheme)
        chosen = best(settings(record, scheme_name, record.widths[0]), record.metric)
        if chosen is None:
            return Finding(UNTOLD, f"{part}: no run of the narrowest finished")
        values = {}
        for width in record.widths:
            for setting in settings(record, scheme_name, width):
                if (setting.lr, setting.damping) == (chosen.lr, chosen.damping):
                    values[width] = value_of(record, setting)
        return _wider(f"{part}, learning rate {power_text(chosen.lr)}", values, record.metric, strictly=True)

    return check


def _wider(title: str, values: Mapping[float, Value], metric: str, strictly: bool) -> Finding:
    """Compares values by width."""
    measured = f"{title}: " + ", ".join(
        f"{formatted(value.mean, metric)} at {width:g}" for width, value in values.items()
    )
    signed = [-value if lowest_is_best(metric) else value for value in values.values()]
    all_values = list(values.values())
    effect = difference(all_values[-1], all_values[0]) if len(values) > 1 else None
    if len(signed) < 2 or math.isnan(signed[0].mean):
        return Finding(UNTOLD, measured)
    rises = differ(signed[-1], signed[0])
    falls = any(differ(wide, narrow) == "below" for n, wide in enumerate(signed) for narrow in signed[:n])
    if rises == "below" or (falls and not strictly):
        return Finding(FAILS, measured, effect=effect)
    if rises == "above":
        return Finding(IN_PART if falls else HOLDS, measured, effect=effect)
    return Finding(UNTOLD if strictly else HOLDS, measured, effect=effect)


def wider_throughout(part: str, metric: str, scheme: str | None = None) -> ClaimCheck:
    """Checks that at every epoch no width is worse than a narrower one by more than ``RELATIVE_MARGIN``.

    Args:
        part: The study's name in the evidence.
        metric: The metric.
        scheme: The scheme or its beginning; None for the first.

    Returns:
        The check, which compares each width's best setting at the epochs that all widths have.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        scheme_name = scheme_of(record, scheme)
        curves = {width: _curve(record, scheme_name, width, metric) for width in record.widths}
        epochs = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
        if len(curves) < 2 or len(epochs) < 2:
            return Finding(UNTOLD, f"{part}: {metric} was not read at two epochs of every width")
        sign = -1.0 if lowest_is_best(metric) else 1.0
        worse_epochs = []
        for epoch in epochs:
            values = [sign * curves[width][epoch] for width in record.widths]
            worst = max(top - value for n, value in enumerate(values) for top in values[: n + 1])
            if worst > RELATIVE_MARGIN * max(map(abs, values)):
                worse_epochs.append(epoch)
        measured = f"{part}: {metric} at {len(epochs) - len(worse_epochs)} of {len(epochs)} epochs"
        return Finding(HOLDS if not worse_epochs else FAILS if len(worse_epochs) == len(epochs) else IN_PART, measured)

    return check


def _curve(record: StudyRecord, scheme: str, width: float, metric: str) -> dict[int, float]:
    """Returns by epoch the mean over the seeds of the best setting."""
    best_setting = best(settings(record, scheme, width), record.metric)
    if best_setting is None:
        return {}
    same = (best_setting.scheme, best_setting.width, best_setting.lr, best_setting.damping)
    values: dict[int, list[float]] = {}
    for result in record.results:
        if (result.point.scheme, result.point.width, result.point.lr, result.point.damping) == same:
            for row in result.rows:
                if row.get(metric) is not None:
                    values.setdefault(row["epoch"], []).append(row[metric])
    return {epoch: fmean(seed_values) for epoch, seed_values in values.items()}


def wider_is_worse(part: str, scheme: str | None = None) -> ClaimCheck:
    """Checks that the widest network at its best setting is worse than the narrowest at its own.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.

    Returns:
        The check.
    """

    def before(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        narrow = BestOf(part, record.widths[0], scheme, f"{part} at {record.widths[0]:g}:")
        wide = BestOf(part, record.widths[-1], scheme, f"at {record.widths[-1]:g}:")
        return beats(narrow, wide)(evidence)

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        return _inside(before(evidence), record, scheme_of(record, scheme), better=record.widths[0])

    return revised(check, before, INSIDE_RULE)


INSIDE_RULE = (
    "Earlier, a best learning rate at the edge of its grid was not minded. Now the best of the width that is behind "
    "must not lie beyond its grid."
)


def _inside(finding: Finding, record: StudyRecord, scheme: str, better: float) -> Finding:
    """Returns the finding that one end of the widths is better; undetermined if the other's best may be beyond."""
    ends = (record.widths[0], record.widths[-1])
    other = ends[better == ends[0]]
    behind = {HOLDS: other, IN_PART: other, FAILS: better}.get(finding.verdict)
    if behind is None or not may_lie_beyond(record, scheme, behind):
        return finding
    return replace(
        finding, verdict=UNTOLD, measured=f"{finding.measured}; at {behind:g} the best may lie beyond the grid"
    )


def wider_is_worse_there(part: str, scheme: str | None = None) -> ClaimCheck:
    """Checks that the widest network is worse than the narrowest at the narrowest's best setting.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        scheme_name = scheme_of(record, scheme)
        narrow, wide = record.widths[0], record.widths[-1]
        narrow_best = best(settings(record, scheme_name, narrow), record.metric)
        candidates = [
            setting
            for setting in settings(record, scheme_name, wide)
            if narrow_best and (setting.lr, setting.damping) == (narrow_best.lr, narrow_best.damping)
        ]
        if narrow_best is None or not candidates or narrow == wide:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        a, b = value_of(record, narrow_best), value_of(record, candidates[0])
        shown = [formatted(value.mean, record.metric) for value in (a, b)]
        measured = (
            f"{part}, learning rate {power_text(narrow_best.lr)}: {shown[0]} at {narrow:g}, {shown[1]} at {wide:g}"
        )
        order = differ(-b, -a) if lowest_is_best(record.metric) else differ(b, a)
        return Finding({"below": HOLDS, "above": FAILS, "alike": UNTOLD}[order], measured, effect=difference(a, b))

    return check
