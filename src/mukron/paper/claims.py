"""Checks of claims: each function here returns one, from what the claim is about to what the evidence says of it.

A difference counts if it is larger than the noise over seeds: the standard error of the difference of the two means,
twice. With one seed there is no noise to tell, and every difference counts; the words then say "one seed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mukron.diagnose.readings import FEATURES
from mukron.exponents import fit_exponent
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Evidence, Finding
from mukron.report.numbers import Setting, best, settings
from mukron.study.certificate import CANNOT_TELL, MOVES, TRANSFERS, Judgement
from mukron.study.points import lowest_is_best
from mukron.study.record import StudyRecord

Check = Callable[[Evidence], Finding]
ERRORS = 2.0  # standard errors that a difference must exceed


@dataclass(frozen=True)
class Value:
    """A mean over seeds."""

    mean: float
    error: float | None  # of the mean; None with one seed
    setting: Setting | None = None

    def __str__(self) -> str:
        return "none finished" if math.isnan(self.mean) else f"{self.mean:.4g}"


@dataclass(frozen=True)
class Of:
    """The best value of a study, at one width and of one scheme."""

    part: str
    width: float | None = None  # None: the widest
    scheme: str | None = None  # None: the only one
    name: str = ""
    metric: str | None = None  # None: the study's, by which the best is chosen in any case

    def value(self, evidence: Evidence) -> Value:
        record = evidence.study(self.part)
        scheme = scheme_of(record, self.scheme)
        width = self.width if self.width is not None else record.widths[-1]
        return best_value(record, scheme, width, self.metric)

    def words(self, evidence: Evidence) -> str:
        value = self.value(evidence)
        return f"{self.name or self.part} {_shown(value.mean, self.metric or evidence.study(self.part).metric)}"


def scheme_of(record: StudyRecord, scheme: str | None) -> str:
    """By its beginning: "sp" finds "sp/heuristic:0.001"."""
    for each in record.schemes:
        if scheme is None or each == scheme or each.split("/")[0] == scheme:
            return each
    return record.schemes[0]


def best_value(record: StudyRecord, scheme: str, width: float, metric: str | None = None) -> Value:
    found = best(settings(record, scheme, width), record.metric)
    if found is None:
        return Value(math.nan, None)
    values = found.values if metric in (None, record.metric) else _others(record, found, str(metric))
    if not values:
        return Value(math.nan, None, found)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Value(fmean(values), error, found)


def _others(record: StudyRecord, setting: Setting, metric: str) -> tuple[float, ...]:
    """Another column of the same runs."""
    same = (setting.scheme, setting.width, setting.lr, setting.damping)
    points = [
        each
        for each in record.results
        if (each.point.scheme, each.point.width, each.point.lr, each.point.damping) == same
    ]
    found = [each.value(metric) for each in points]
    return tuple(value for value in found if value is not None)


def differ(a: Value, b: Value) -> str:
    """Whether a is "above" b, "below" it, or "alike" within the noise of the seeds. What did not finish is below."""
    lost = math.isnan(a.mean), math.isnan(b.mean)
    if any(lost):
        return "alike" if all(lost) else "below" if lost[0] else "above"
    noise = ERRORS * math.hypot(a.error or 0.0, b.error or 0.0)
    return "above" if a.mean - b.mean > noise else "below" if b.mean - a.mean > noise else "alike"


def _shown(value: float, metric: str) -> str:
    if math.isnan(value):
        return "none finished"
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.4g}"


# What is compared with what.


def beats(better: Of, worse: Of, or_equals: bool = False) -> Check:
    """The best of one is better than the best of the other, beyond the noise of the seeds."""

    def check(evidence: Evidence) -> Finding:
        a, b = better.value(evidence), worse.value(evidence)
        found = differ(a, b)
        if lowest_is_best(better.metric or evidence.study(better.part).metric) and not math.isnan(a.mean + b.mean):
            found = {"above": "below", "below": "above"}.get(found, found)
        seeds = "" if a.error is not None else " (one seed)"
        measured = f"{better.words(evidence)} against {worse.words(evidence)}{seeds}"
        lost = math.isnan(a.mean) and math.isnan(b.mean)
        verdict = {"above": HOLDS, "alike": HOLDS if or_equals and not lost else UNTOLD, "below": FAILS}[found]
        return Finding(verdict, measured + (", alike within noise" if found == "alike" else ""))

    return check


def near(a: Of, b: Of, within: float) -> Check:
    """The two bests differ by no more than that."""

    def check(evidence: Evidence) -> Finding:
        first, second = a.value(evidence), b.value(evidence)
        measured = f"{a.words(evidence)} against {b.words(evidence)}"
        if math.isnan(first.mean) or math.isnan(second.mean):
            return Finding(UNTOLD if math.isnan(first.mean) and math.isnan(second.mean) else FAILS, measured)
        return Finding(HOLDS if abs(first.mean - second.mean) <= within else FAILS, measured)

    return check


def every(*checks: Check) -> Check:
    """All of them; some make it hold in part."""

    def check(evidence: Evidence) -> Finding:
        found = [each(evidence) for each in checks]
        verdicts = {finding.verdict for finding in found}
        verdict = found[0].verdict if len(verdicts) == 1 else IN_PART if verdicts & {HOLDS, IN_PART} else FAILS
        return Finding(verdict, "; ".join(finding.measured for finding in found))

    return check


# Transfer.


def _judgement(record: StudyRecord, scheme: str, axis: str) -> Judgement | None:
    if record.certificate is None:
        return None
    return next((each for each in record.certificate.judgements if (each.scheme, each.axis) == (scheme, axis)), None)


def _bests(record: StudyRecord, scheme: str, axis: str) -> list[tuple[float, float]]:
    """Width and best setting on the grid."""
    found = [(width, best(settings(record, scheme, width), record.metric)) for width in record.widths]
    return [(width, each.at(axis)) for width, each in found if each is not None]


def _setting_words(bests: Sequence[tuple[float, float]]) -> str:
    if len({value for _, value in bests}) == 1:
        return f"best at {_power(bests[0][1])} at every width from {bests[0][0]:g} to {bests[-1][0]:g}"
    return "best at " + ", ".join(f"{_power(value)} (width {width:g})" for width, value in bests)


def _power(value: float) -> str:
    z = math.log2(value)
    return f"2^{z:.0f}" if abs(z - round(z)) < 1e-6 else f"{value:.3g}"


def _common(record: StudyRecord, scheme: str, axis: str) -> float | None:
    """A setting that no width's own best beats beyond the noise of the seeds; None with one seed."""
    sign = -1.0 if lowest_is_best(record.metric) else 1.0
    tried: dict[float, list[bool]] = {}
    for width in record.widths:
        found = [each for each in settings(record, scheme, width) if each.whole and len(each.values) > 1]
        top = max(found, key=lambda each: sign * each.mean, default=None)
        for each in found:
            assert top is not None
            alike = differ(_signed(top, sign), _signed(each, sign)) != "above"
            tried.setdefault(each.at(axis), []).append(alike)
    serve = [setting for setting, alike in tried.items() if len(alike) == len(record.widths) and all(alike)]
    return serve[0] if serve else None


def _signed(setting: Setting, sign: float) -> Value:
    return Value(sign * setting.mean, stdev(setting.values) / math.sqrt(len(setting.values)))


def stays(part: str, scheme: str | None = None, axis: str = "lr") -> Check:
    """The best setting is the same at every width, on the grid or by the study's certificate.

    In part: one is as good as each width's best within noise, but not the one that the narrowest would have chosen.
    """
    return _location(part, scheme, axis, stays=True)


def moves(part: str, scheme: str | None = None, axis: str = "lr", direction: int = 0) -> Check:
    """The best setting goes with the width; down (-1) or up (+1) if that is claimed."""
    return _location(part, scheme, axis, stays=False, direction=direction)


def _location(part: str, scheme: str | None, axis: str, stays: bool, direction: int = 0) -> Check:
    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        judged, bests = _judgement(record, who, axis), _bests(record, who, axis)
        if not bests or judged is None:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        drift = judged.drift
        said = f"{part}: {_setting_words(bests)}"
        if drift is not None:
            said += f"; drift {drift} per doubling"
        lost = [width for width in record.widths if width not in dict(bests)]
        if lost:
            said += f"; at {', '.join(f'{width:g}' for width in lost)} every run diverged"
        said += f"; certificate: {judged.verdict}"
        same = len({value for _, value in bests}) == 1 and not lost
        common = None if same or lost else _common(record, who, axis)
        if common is not None:
            said += f"; {_power(common)} is as good at every width, within the noise of the seeds"
        if stays:
            if same or judged.verdict == TRANSFERS:
                return Finding(HOLDS, said)
            if judged.verdict == MOVES:
                return Finding(FAILS if common is None else IN_PART, said)
            return Finding(UNTOLD if common is None else HOLDS, said)
        went = math.log2(bests[-1][1] / bests[0][1])
        wrong_way = direction * went < 0 and not lost
        if judged.verdict == MOVES and not wrong_way and common is None:
            verdict = HOLDS
        elif wrong_way or judged.verdict == TRANSFERS or same or common is not None:
            verdict = FAILS
        else:
            verdict = IN_PART if judged.verdict == CANNOT_TELL and direction * went > 0 else UNTOLD
        return Finding(verdict, said)

    return check


def wider_is_better(part: str, scheme: str | None = None, metric: str | None = None) -> Check:
    """At every width's best setting, none is worse than a narrower one beyond noise, and the widest is better."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        by = metric or record.metric
        sign = -1.0 if lowest_is_best(by) else 1.0
        values = {width: best_value(record, who, width, metric) for width in record.widths}
        said = f"{part}: " + ", ".join(f"{_shown(value.mean, by)} at {width:g}" for width, value in values.items())
        if len(values) < 2:
            return Finding(UNTOLD, said)
        signed = [Value(sign * value.mean, value.error) for value in values.values()]
        top, worse = signed[0], False
        for value in signed[1:]:
            worse = worse or differ(value, top) == "below"
            top = value if value.mean > top.mean or math.isnan(top.mean) else top
        rises = differ(signed[-1], signed[0])
        verdict = (
            HOLDS
            if rises == "above" and not worse
            else FAILS
            if rises == "below"
            else IN_PART
            if rises == "above"
            else UNTOLD
        )
        return Finding(verdict, said)

    return check


def wider_is_worse(part: str, scheme: str | None = None) -> Check:
    """The widest's best is worse than the narrowest's."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        narrow = Of(part, record.widths[0], scheme, f"{part} at {record.widths[0]:g}:")
        wide = Of(part, record.widths[-1], scheme, f"at {record.widths[-1]:g}:")
        return beats(narrow, wide)(evidence)

    return check


def worse_somewhere(part: str, scheme: str | None = None) -> Check:
    """At some learning rate the widest network is worse than the narrowest, which learns there."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        narrow, wide = ({each.lr: each for each in settings(record, who, width)} for width in _ends(record))
        sign = -1.0 if lowest_is_best(record.metric) else 1.0
        worse = {
            lr: (there.mean, wide[lr].mean)
            for lr, there in narrow.items()
            if lr in wide and there.whole and not sign * (wide[lr].mean - there.mean) >= 0
        }
        ends = " and ".join(f"{width:g}" for width in _ends(record))
        if len(record.widths) < 2 or not any(each.whole for each in narrow.values()):
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        if not worse:
            return Finding(FAILS, f"{part}: at none of {len(narrow)} learning rates (widths {ends})")
        said = ", ".join(
            f"2^{math.log2(lr):.0f}: {_shown(a, record.metric)} and {_shown(b, record.metric)}"
            for lr, (a, b) in worse.items()
        )
        return Finding(HOLDS, f"{part}, widths {ends}: at {said}")

    return check


def _ends(record: StudyRecord) -> tuple[float, float]:
    return record.widths[0], record.widths[-1]


# Features.


def learns(part: str) -> Check:
    """Every layer's features move alike at every width."""

    def check(evidence: Evidence) -> Finding:
        found = evidence.check(part)
        verdicts = [each for each in found.features if each.reading == FEATURES.title]
        if not verdicts:
            return Finding(UNTOLD, f"{part}: nothing was read")
        slopes = ", ".join(f"{each.layer} {each.measured.slope:+.2f}" for each in verdicts if each.measured is not None)
        off = [each for each in verdicts if each.word in (FEATURES.low, FEATURES.high)]
        if found.record.broken or off:
            verdict = IN_PART if len(off) < len(verdicts) else FAILS
        else:
            verdict = HOLDS if all(each.ok for each in verdicts) else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {slopes}")

    return check


def fades(part: str, *layers: str) -> Check:
    """The features of these layers (of some layer, if none is named) move less and less as the width grows."""

    def check(evidence: Evidence) -> Finding:
        found = evidence.check(part)
        verdicts = [
            each for each in found.features if each.reading == FEATURES.title and (not layers or each.layer in layers)
        ]
        slopes = {each.layer: each.measured.slope for each in verdicts if each.measured is not None}
        low = [layer for layer, slope in slopes.items() if slope < -found.tolerance]
        wanted = len(layers) or 1
        said = ", ".join(f"{layer} {slope:+.2f}" for layer, slope in slopes.items())
        verdict = HOLDS if len(low) >= wanted else IN_PART if low else FAILS if slopes else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {said or 'none'}")

    return check


def departs(part: str) -> Check:
    """The features of some layer go with the width, up or down."""

    def check(evidence: Evidence) -> Finding:
        found = evidence.check(part)
        verdicts = [each for each in found.features if each.reading == FEATURES.title]
        slopes = {each.layer: each.measured.slope for each in verdicts if each.measured is not None}
        off = [slope for slope in slopes.values() if abs(slope) > found.tolerance]
        said = ", ".join(f"{layer} {slope:+.2f}" for layer, slope in slopes.items())
        verdict = HOLDS if off or found.record.broken else FAILS if slopes else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {said or 'none'}")

    return check


def column_exponent(part: str, column: str, predicted: float, tolerance: float = 0.25) -> Check:
    """A column of the rows goes with this power of the width, at the first epoch that has it and at the last."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        found = {}
        for when, pick in (("first", 0), ("last", -1)):
            points = []
            for result in record.results:
                values = [row[column] for row in result.rows if row.get(column)]
                if values and result.status == "finished":
                    points.append((result.point.width, values[pick]))
            if len({width for width, _ in points}) > 1:
                found[when] = fit_exponent([width for width, _ in points], [value for _, value in points]).slope
        if not found:
            return Finding(UNTOLD, f"{column}: not read at two widths")
        right = [abs(slope - predicted) <= tolerance for slope in found.values()]
        said = ", ".join(f"{slope:+.2f} at the {when} epoch" for when, slope in found.items())
        verdict = HOLDS if all(right) else IN_PART if any(right) else FAILS
        return Finding(verdict, f"{column}: exponent {said} (theory {predicted:+g})")

    return check
