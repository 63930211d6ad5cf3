"""Checks of claims: each function here returns one, from what the claim is about to what the evidence says of it.

A difference counts if it is larger than twice its standard error. The noise of one run is one number a study: the
median spread over seeds of each width's best few settings. A seed that collapsed in one place hides no difference
there, nor do settings at which nothing is learned, whose accuracies are those of untrained networks. With one seed
there is no noise to tell, and a difference counts from 1 point of accuracy (5 percent of anything else) on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from mukron.diagnose.readings import FEATURES
from mukron.exponents import fit_exponent
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Evidence, Finding
from mukron.report.numbers import SettingSummary, best, ordered, settings
from mukron.study.certificate import MOVES, TRANSFERS, Judgement
from mukron.study.points import lowest_is_best
from mukron.study.record import StudyRecord

Check = Callable[[Evidence], Finding]
ERRORS = 2.0  # standard errors that a difference must exceed
FEW = 3  # settings of a width that noise is read from: the best and, as a rule, its neighbours
POINT, SHARE = 0.01, 0.05  # with one seed: of an accuracy, and of the larger of two other numbers


@dataclass(frozen=True)
class Value:
    """A mean over seeds."""

    mean: float
    error: float | None  # of the mean; None with one seed
    accuracy: bool = True

    def __neg__(self) -> Value:
        return Value(-self.mean, self.error, self.accuracy)


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

    def best(self, evidence: Evidence) -> SettingSummary | None:
        record = evidence.study(self.part)
        width = self.width if self.width is not None else record.widths[-1]
        return best(settings(record, scheme_of(record, self.scheme), width), record.metric)

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
    return value_of(record, found, metric)


def value_of(record: StudyRecord, setting: SettingSummary, metric: str | None = None) -> Value:
    """The mean of a setting's seeds; of another column than the study's metric, if one is named."""
    by = metric or record.metric
    values = _seeds(record, setting, by)
    if not values:
        return Value(math.nan, None)
    noise = noise_of(record, by)
    error = None if noise is None else noise / math.sqrt(len(values))
    return Value(fmean(values), error, by.endswith("accuracy"))


def _seeds(record: StudyRecord, setting: SettingSummary, metric: str) -> tuple[float, ...]:
    if not setting.whole:
        return ()
    if metric == record.metric:
        return setting.values
    same = (setting.scheme, setting.width, setting.lr, setting.damping)
    found = [
        each.value(metric)
        for each in record.results
        if (each.point.scheme, each.point.width, each.point.lr, each.point.damping) == same
    ]
    return tuple(value for value in found if value is not None)


def noise_of(record: StudyRecord, metric: str) -> float | None:
    """The standard deviation of one run: from the median variance over seeds of the best few; None with one seed."""
    few = [
        each
        for scheme in record.schemes
        for width in record.widths
        for each in ordered(settings(record, scheme, width), record.metric)[:FEW]
    ]
    several = [values for each in few if len(values := _seeds(record, each, metric)) > 1]
    if not several:
        return None
    freedom = median(len(values) - 1 for values in several)
    shrinks = (1 - 2 / (9 * freedom)) ** 3  # the median of chi^2 over its mean (Wilson and Hilferty 1931)
    return math.sqrt(median(map(variance, several)) / shrinks)


def differ(a: Value, b: Value) -> str:
    """Whether a is "above" b, "below" it, or "alike" within the noise of the seeds. What did not finish is below."""
    lost = math.isnan(a.mean), math.isnan(b.mean)
    if any(lost):
        return "alike" if all(lost) else "below" if lost[0] else "above"
    if a.error is None or b.error is None:
        least = POINT if a.accuracy else SHARE * max(abs(a.mean), abs(b.mean))
    else:
        least = ERRORS * math.hypot(a.error, b.error)
    return "above" if a.mean - b.mean > least else "below" if b.mean - a.mean > least else "alike"


def _shown(value: float, metric: str) -> str:
    if math.isnan(value):
        return "none finished"
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.4g}"


# What is compared with what.


def beats(better: Of, worse: Of, or_equals: bool = False) -> Check:
    """The best of one is better than the best of the other, beyond the noise of the seeds."""

    def check(evidence: Evidence) -> Finding:
        a, b = better.value(evidence), worse.value(evidence)
        down = lowest_is_best(better.metric or evidence.study(better.part).metric)
        found = differ(-a, -b) if down else differ(a, b)
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


def lower_rate(lower: Of, higher: Of) -> Check:
    """The best learning rate of one is below that of the other."""

    def check(evidence: Evidence) -> Finding:
        found = [each.best(evidence) for each in (lower, higher)]
        if None in found:
            return Finding(UNTOLD, "none finished")
        a, b = (each.lr for each in found if each is not None)
        said = f"{lower.name or lower.part} best at {_power(a)}, {higher.name or higher.part} at {_power(b)}"
        return Finding(HOLDS if a < b else FAILS, said)

    return check


def gap_grows(pairs: Sequence[tuple[str, Of, Of]]) -> Check:
    """The difference of two bests is larger in each pair than in the one before, beyond noise from first to last."""

    def check(evidence: Evidence) -> Finding:
        gaps, errors, said = [], [], []
        for name, better, worse in pairs:
            a, b = better.value(evidence), worse.value(evidence)
            gaps.append(a.mean - b.mean)
            errors.append(math.hypot(a.error or 0.0, b.error or 0.0))
            said.append(f"{100 * gaps[-1]:+.2f} ({name})")
        words = "points: " + ", ".join(said)
        if len(gaps) < 2 or any(map(math.isnan, gaps)):
            return Finding(UNTOLD, words)
        found = differ(Value(gaps[-1], errors[-1] or None), Value(gaps[0], errors[0] or None))
        if found == "above":
            return Finding(HOLDS if gaps == sorted(gaps) else IN_PART, words)
        return Finding(FAILS if found == "below" else UNTOLD, words)

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
    tried: dict[float, list[bool]] = {}
    for width in record.widths:
        found = [each for each in settings(record, scheme, width) if each.whole]
        top = best(found, record.metric)
        for each in found:
            assert top is not None
            alike = differ(value_of(record, top), value_of(record, each)) == "alike"
            tried.setdefault(each.at(axis), []).append(alike)
    serve = [setting for setting, alike in tried.items() if len(alike) == len(record.widths) and all(alike)]
    return serve[0] if serve and noise_of(record, record.metric) is not None else None


@dataclass(frozen=True)
class Located:
    """Where the best settings of a scheme are."""

    bests: Sequence[tuple[float, float]]  # width and best setting on the grid
    judged: Judgement
    common: float | None  # one that is as good everywhere, where they are not the same
    lost: Sequence[float]  # widths at which every run diverged
    beyond: Sequence[float]  # widths whose best may lie beyond the grid

    @property
    def same(self) -> bool:
        return len({setting for _, setting in self.bests}) == 1 and not self.lost

    def words(self, part: str) -> str:
        said = [f"{part}: {_setting_words(self.bests)}"]
        if self.judged.drift is not None:
            said.append(f"drift {self.judged.drift} per doubling")
        if self.lost:
            said.append(f"at {_listed(self.lost)} every run diverged")
        if self.beyond:
            said.append(f"at {_listed(self.beyond)} the best may lie beyond the grid")
        said.append(f"certificate: {self.judged.verdict}")
        if self.common is not None:
            said.append(f"{_power(self.common)} is as good at every width, within the noise of the seeds")
        return "; ".join(said)


def _listed(widths: Sequence[float]) -> str:
    return ", ".join(f"{width:g}" for width in widths)


def locate(record: StudyRecord, scheme: str, axis: str) -> Located | None:
    judged, bests = _judgement(record, scheme, axis), _bests(record, scheme, axis)
    if judged is None or not bests:
        return None
    lost = [width for width in record.widths if width not in dict(bests)]
    same = len({setting for _, setting in bests}) == 1
    common = None if same or lost else _common(record, scheme, axis)
    return Located(bests, judged, common, lost, [each.width for each in judged.optima if each.open])


def _by_place(part: str, scheme: str | None, axis: str, verdict: Callable[[Located], str]) -> Check:
    """A check that is decided by where the best settings are."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        found = locate(record, scheme_of(record, scheme), axis)
        if found is None:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        return Finding(verdict(found), found.words(part))

    return check


def stays(part: str, scheme: str | None = None, axis: str = "lr") -> Check:
    """The best setting is the same at every width, on the grid or by the study's certificate.

    In part: one is as good as each width's best within noise, but not the one that the narrowest would have chosen.
    """

    def verdict(found: Located) -> str:
        if found.judged.verdict == TRANSFERS or (found.same and not found.beyond):
            return HOLDS
        if found.beyond and not found.lost:
            return UNTOLD
        if found.judged.verdict == MOVES:
            return FAILS if found.common is None else IN_PART
        return UNTOLD if found.common is None else HOLDS

    return _by_place(part, scheme, axis, verdict)


def moves(part: str, scheme: str | None = None, axis: str = "lr", direction: int = 0) -> Check:
    """The best setting goes with the width, by the certificate; down (-1) or up (+1) if that is claimed."""

    def verdict(found: Located) -> str:
        if found.judged.verdict == TRANSFERS:
            return FAILS
        if found.same and not found.beyond:
            return UNTOLD if found.judged.verdict == MOVES else FAILS
        if found.judged.verdict == MOVES and found.common is None:
            went = math.log2(found.bests[-1][1] / found.bests[0][1])
            return FAILS if direction * went < 0 and not found.lost else HOLDS
        return UNTOLD

    return _by_place(part, scheme, axis, verdict)


def wider_is_better(part: str, scheme: str | None = None, metric: str | None = None, strictly: bool = True) -> Check:
    """Each width at its best setting: none is worse than a narrower one beyond noise, and the widest is better.

    strictly: False if it is claimed only that none is worse.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        by = metric or record.metric
        values = {width: best_value(record, who, width, metric) for width in record.widths}
        said = f"{part}: " + ", ".join(f"{_shown(value.mean, by)} at {width:g}" for width, value in values.items())
        signed = [-value if lowest_is_best(by) else value for value in values.values()]
        if len(signed) < 2 or math.isnan(signed[0].mean):
            return Finding(UNTOLD, said)
        rises = differ(signed[-1], signed[0])
        falls = any(differ(wide, narrow) == "below" for n, wide in enumerate(signed) for narrow in signed[:n])
        if rises == "below" or (falls and not strictly):
            return Finding(FAILS, said)
        if rises == "above":
            return Finding(IN_PART if falls else HOLDS, said)
        return Finding(UNTOLD if strictly else HOLDS, said)

    return check


def wider_throughout(part: str, metric: str, scheme: str | None = None) -> Check:
    """At the best setting of each width: at every epoch that all have, none is worse than a narrower one by SHARE."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        curves = {width: _curve(record, who, width, metric) for width in record.widths}
        epochs = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
        if len(curves) < 2 or len(epochs) < 2:
            return Finding(UNTOLD, f"{part}: {metric} was not read at two epochs of every width")
        sign = -1.0 if lowest_is_best(metric) else 1.0
        off = []
        for epoch in epochs:
            values = [sign * curves[width][epoch] for width in record.widths]
            worst = max(top - value for n, value in enumerate(values) for top in values[: n + 1])
            if worst > SHARE * max(map(abs, values)):
                off.append(epoch)
        said = f"{part}: {metric} at {len(epochs) - len(off)} of {len(epochs)} epochs"
        return Finding(HOLDS if not off else FAILS if len(off) == len(epochs) else IN_PART, said)

    return check


def _curve(record: StudyRecord, scheme: str, width: float, metric: str) -> dict[int, float]:
    """By epoch, the mean over the seeds of the best setting."""
    top = best(settings(record, scheme, width), record.metric)
    if top is None:
        return {}
    same = (top.scheme, top.width, top.lr, top.damping)
    values: dict[int, list[float]] = {}
    for each in record.results:
        if (each.point.scheme, each.point.width, each.point.lr, each.point.damping) == same:
            for row in each.rows:
                if row.get(metric) is not None:
                    values.setdefault(row["epoch"], []).append(row[metric])
    return {epoch: fmean(found) for epoch, found in values.items()}


def wider_is_worse(part: str, scheme: str | None = None) -> Check:
    """The widest's best is worse than the narrowest's."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        narrow = Of(part, record.widths[0], scheme, f"{part} at {record.widths[0]:g}:")
        wide = Of(part, record.widths[-1], scheme, f"at {record.widths[-1]:g}:")
        return beats(narrow, wide)(evidence)

    return check


def wider_is_worse_there(part: str, scheme: str | None = None) -> Check:
    """With the setting that is best for the narrowest, the widest is worse than it."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        who = scheme_of(record, scheme)
        narrow, wide = record.widths[0], record.widths[-1]
        there = best(settings(record, who, narrow), record.metric)
        same = [
            each
            for each in settings(record, who, wide)
            if there and (each.lr, each.damping) == (there.lr, there.damping)
        ]
        if there is None or not same or narrow == wide:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        a, b = value_of(record, there), value_of(record, same[0])
        shown = [_shown(value.mean, record.metric) for value in (a, b)]
        said = f"{part}, learning rate {_power(there.lr)}: {shown[0]} at {narrow:g}, {shown[1]} at {wide:g}"
        found = differ(-b, -a) if lowest_is_best(record.metric) else differ(b, a)
        return Finding({"below": HOLDS, "above": FAILS, "alike": UNTOLD}[found], said)

    return check


def beats_everywhere(better: str, worse: str) -> Check:
    """At every learning rate that both were run at, at the widest; some make it hold in part."""

    def check(evidence: Evidence) -> Finding:
        records = evidence.study(better), evidence.study(worse)
        ours, theirs = ({each.lr: each for each in settings(record, width=record.widths[-1])} for record in records)
        found, said = [], []
        for lr in sorted(set(ours) & set(theirs)):
            a, b = value_of(records[0], ours[lr]), value_of(records[1], theirs[lr])
            found.append(differ(a, b))
            said.append(f"{_shown(a.mean, records[0].metric)} against {_shown(b.mean, records[1].metric)} at {lr:g}")
        above = found.count("above")
        verdict = (
            HOLDS if found and above == len(found) else IN_PART if above else FAILS if "below" in found else UNTOLD
        )
        return Finding(verdict, "; ".join(said) or "nothing was run at the same rate")

    return check


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
