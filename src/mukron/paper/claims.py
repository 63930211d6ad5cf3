"""Checks of claims on studies: each public function returns a check, a function from the evidence to a finding.

A difference counts if it is larger than twice its standard error. The noise of one run is estimated once per study,
from the median spread over seeds of each width's best few settings. So neither a single run that collapsed nor
settings at which nothing is learned inflate it. With one seed the noise is unknown, and a difference counts if it
exceeds 1 point of accuracy, or 5 percent of any other number.

What is not known is not a verdict: a best setting at the edge of its grid, a grid too coarse for the drift that it is
to exclude, or runs other than the paper's give "cannot be determined". Where a rule was replaced, ``revised`` keeps the
verdict of the earlier one (``mukron.paper.earlier``) beside the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, variance

from mukron.paper.effects import POINTS, Effect, effect_of
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Finding
from mukron.study.numbers import SettingSummary, best, ordered, settings
from mukron.study.points import lowest_is_best
from mukron.study.record import StudyRecord

ClaimCheck = Callable[[Evidence], Finding]
STANDARD_ERRORS = 2.0  # a difference must exceed this many standard errors
NOISE_SETTINGS = 3  # settings per width that noise is estimated from: the best and, as a rule, its neighbours
ACCURACY_MARGIN, RELATIVE_MARGIN = 0.01, 0.05  # with one seed: margin of accuracies, and relative one of other numbers


@dataclass(frozen=True)
class Value:
    """A mean over seeds.

    Attributes:
        mean: The mean; NaN if no run finished.
        error: Its standard error; None with one seed.
        accuracy: Whether it is an accuracy.

    Example:
        >>> -Value(0.5, None)
        Value(mean=-0.5, error=None, accuracy=True)
    """

    mean: float
    error: float | None
    accuracy: bool = True

    def __neg__(self) -> Value:
        return Value(-self.mean, self.error, self.accuracy)


@dataclass(frozen=True)
class BestOf:
    """Names the best setting of a study, or of several ones, at one width and of one scheme.

    Attributes:
        part: The study's name in the evidence.
        width: The width; None for the widest.
        scheme: The scheme or its beginning; None for the first.
        name: What the setting is called in findings; the part's name if empty.
        metric: The metric that is read; None for the study's. The best is always chosen by the study's.
        among: Names of further studies that the best setting may be in, such as those of other multipliers.
    """

    part: str
    width: float | None = None
    scheme: str | None = None
    name: str = ""
    metric: str | None = None
    among: tuple[str, ...] = ()

    def value(self, evidence: Evidence) -> Value:
        """Returns the metric's mean over the seeds of the best setting.

        Args:
            evidence: The results of all parts.

        Returns:
            The mean with its error.
        """
        chosen = self._chosen(evidence)
        return Value(math.nan, None) if chosen is None else value_of(*chosen, self.metric)

    def best(self, evidence: Evidence) -> SettingSummary | None:
        """Returns the best setting, or None if no run finished.

        Args:
            evidence: The results of all parts.

        Returns:
            The setting.
        """
        chosen = self._chosen(evidence)
        return None if chosen is None else chosen[1]

    def describe(self, evidence: Evidence) -> str:
        """Returns the name and the value, as findings show them.

        Args:
            evidence: The results of all parts.

        Returns:
            The text.
        """
        value = self.value(evidence)
        return f"{self.name or self.part} {formatted(value.mean, self.metric or evidence.study(self.part).metric)}"

    def _chosen(self, evidence: Evidence) -> tuple[StudyRecord, SettingSummary] | None:
        """Returns the best setting with its study; None if no run finished."""
        candidates = []
        for part in (self.part, *self.among):
            record = evidence.study(part)
            width = self.width if self.width is not None else record.widths[-1]
            setting = best(settings(record, scheme_of(record, self.scheme), width), record.metric)
            if setting is not None:
                candidates.append((record, setting))
        if not candidates:
            return None
        choose = min if lowest_is_best(candidates[0][0].metric) else max
        return choose(candidates, key=lambda candidate: candidate[1].mean)


def scheme_of(record: StudyRecord, scheme: str | None) -> str:
    """Returns the full name of a study's scheme from its beginning: "sp" gives "sp/heuristic:0.001".

    Args:
        record: The study.
        scheme: The scheme or its beginning; None for the first.

    Returns:
        The scheme as the study names it; the first one if none fits.
    """
    for name in record.schemes:
        if scheme is None or name == scheme or name.split("/")[0] == scheme:
            return name
    return record.schemes[0]


def best_value(record: StudyRecord, scheme: str, width: float, metric: str | None = None) -> Value:
    """Returns the mean over seeds of the best setting of a width.

    Args:
        record: The study.
        scheme: The scheme as the study names it.
        width: The width.
        metric: The metric that is read; None for the study's.

    Returns:
        The mean with its error.
    """
    setting = best(settings(record, scheme, width), record.metric)
    if setting is None:
        return Value(math.nan, None)
    return value_of(record, setting, metric)


def value_of(
    record: StudyRecord, setting: SettingSummary, metric: str | None = None, tuned_schemes: bool = False
) -> Value:
    """Returns the mean over the seeds of a setting.

    Args:
        record: The study.
        setting: One of its settings.
        metric: The metric that is read; None for the study's.
        tuned_schemes: Whether schemes are settings that are tuned; see ``noise_of``.

    Returns:
        The mean with its error.
    """
    metric_name = metric or record.metric
    values = _seeds(record, setting, metric_name)
    if not values:
        return Value(math.nan, None)
    noise = noise_of(record, metric_name, tuned_schemes)
    error = None if noise is None else noise / math.sqrt(len(values))
    return Value(fmean(values), error, metric_name.endswith("accuracy"))


def _seeds(record: StudyRecord, setting: SettingSummary, metric: str) -> tuple[float, ...]:
    if not setting.whole:
        return ()
    if metric == record.metric:
        return setting.values
    same = (setting.scheme, setting.width, setting.lr, setting.damping)
    values = [
        result.value(metric)
        for result in record.results
        if (result.point.scheme, result.point.width, result.point.lr, result.point.damping) == same
    ]
    return tuple(value for value in values if value is not None)


def noise_of(record: StudyRecord, metric: str, tuned_schemes: bool = False) -> float | None:
    """Estimates the standard deviation of one run from the median variance over seeds of the best few settings.

    Args:
        record: The study.
        metric: The metric.
        tuned_schemes: Whether schemes are settings that are tuned, such as numbers of a fixed damping, so that a
            width's best settings are the best over all of them.

    Returns:
        The standard deviation, or None with one seed.
    """
    schemes = (None,) if tuned_schemes else record.schemes
    leading = [
        setting
        for scheme in schemes
        for width in record.widths
        for setting in ordered(settings(record, scheme, width), record.metric)[:NOISE_SETTINGS]
    ]
    seed_values = [values for setting in leading if len(values := _seeds(record, setting, metric)) > 1]
    if not seed_values:
        return None
    freedom = median(len(values) - 1 for values in seed_values)
    median_over_mean = (1 - 2 / (9 * freedom)) ** 3  # of the chi^2 distribution (Wilson and Hilferty 1931)
    return math.sqrt(median(map(variance, seed_values)) / median_over_mean)


def differ(a: Value, b: Value) -> str:
    """Compares two values. A value without finished runs is below any other.

    Args:
        a: A value.
        b: The value it is compared with.

    Returns:
        "above" or "below" if a differs from b by more than the noise of the seeds, else "alike".

    Example:
        >>> differ(Value(0.92, 0.001), Value(0.90, 0.001)), differ(Value(0.92, 0.01), Value(0.90, 0.01))
        ('above', 'alike')
    """
    unfinished = math.isnan(a.mean), math.isnan(b.mean)
    if any(unfinished):
        return "alike" if all(unfinished) else "below" if unfinished[0] else "above"
    margin = margin_of(a, b)
    return "above" if a.mean - b.mean > margin else "below" if b.mean - a.mean > margin else "alike"


def margin_of(a: Value, b: Value) -> float:
    """Returns how far apart two values must be to differ: by more than the noise of the seeds.

    Args:
        a: A value.
        b: Another one.

    Returns:
        The margin.

    Example:
        >>> margin_of(Value(0.92, 0.003), Value(0.90, 0.004)), margin_of(Value(0.92, None), Value(0.90, None))
        (0.01, 0.01)
    """
    if a.error is None or b.error is None:
        return ACCURACY_MARGIN if a.accuracy else RELATIVE_MARGIN * max(abs(a.mean), abs(b.mean))
    return STANDARD_ERRORS * math.hypot(a.error, b.error)


def difference(a: Value, b: Value) -> Effect | None:
    """Returns how much a value is above another: in points, if they are accuracies.

    Args:
        a: A value.
        b: The value it is compared with.

    Returns:
        The difference with the noise of the seeds; None if either did not finish.

    Example:
        >>> print(difference(Value(0.92, 0.003), Value(0.90, 0.004)))
        +2.00 [+1.00, +3.00] points
    """
    scale, unit = (100.0, POINTS) if a.accuracy and b.accuracy else (1.0, "")
    gap = scale * (a.mean - b.mean)
    if a.error is None or b.error is None:
        return effect_of(gap, None, None, unit)
    noise = scale * margin_of(a, b)
    return effect_of(gap, gap - noise, gap + noise, unit)


def formatted(value: float, metric: str) -> str:
    """Returns a value of a metric as findings show it.

    Args:
        value: The value; NaN if no run finished.
        metric: The metric.

    Returns:
        The text.

    Example:
        >>> formatted(0.5, "test_accuracy"), formatted(0.5, "train_loss")
        ('50.00%', '0.5')
    """
    if math.isnan(value):
        return "none finished"
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.4g}"


def power_text(value: float) -> str:
    """Returns a learning rate or damping as findings show it.

    Args:
        value: The number.

    Returns:
        The text.

    Example:
        >>> power_text(0.125), power_text(0.1)
        ('2^-3', '0.1')
    """
    z = math.log2(value)
    return f"2^{z:.0f}" if abs(z - round(z)) < 1e-6 else f"{value:.3g}"


def revised(check: ClaimCheck, earlier: ClaimCheck, rule: str) -> ClaimCheck:
    """Replaces a check: where the two give different verdicts, the finding names the earlier one's too.

    Args:
        check: The check that decides.
        earlier: The check that it replaces.
        rule: What the earlier rule was and what replaced it.

    Returns:
        The check.

    Example:
        >>> strict = revised(lambda evidence: Finding(UNTOLD, "+0.1"), lambda evidence: Finding(HOLDS, "+0.1"), "Why.")
        >>> strict(Evidence()).earlier
        'holds'
    """

    def both(evidence: Evidence) -> Finding:
        finding, before = check(evidence), earlier(evidence)
        return finding if before.verdict == finding.verdict else replace(finding, earlier=before.verdict, rule=rule)

    return both


# Comparisons of best values.


def beats(better: BestOf, worse: BestOf, or_equals: bool = False) -> ClaimCheck:
    """Checks that one best value is better than another by more than the noise of the seeds.

    Args:
        better: The setting claimed to be better.
        worse: The setting it is compared with.
        or_equals: Whether the claim also holds if the two are alike.

    Returns:
        The check.

    Example:
        >>> from mukron.study.points import Point, Result
        >>> from mukron.train import RunConfig
        >>> def study(*accuracies):  # one run per seed
        ...     points = (Point("mup", 64.0, 0.1, 1.0, seed) for seed in range(len(accuracies)))
        ...     rows = ([{"epoch": 1, "test_accuracy": value}] for value in accuracies)
        ...     runs = tuple(Result(point, "finished", row) for point, row in zip(points, rows))
        ...     return StudyRecord("study", RunConfig(epochs=1), ("lr",), "test_accuracy", runs, None)
        >>> finding = beats(BestOf("a"), BestOf("b"))(Evidence(a=study(0.92, 0.93), b=study(0.88, 0.89)))
        >>> finding.verdict, finding.measured
        ('holds', 'a 92.50% against b 88.50%')
    """

    def check(evidence: Evidence) -> Finding:
        a, b = better.value(evidence), worse.value(evidence)
        down = lowest_is_best(better.metric or evidence.study(better.part).metric)
        order = differ(-a, -b) if down else differ(a, b)
        seeds = "" if a.error is not None else " (one seed)"
        measured = f"{better.describe(evidence)} against {worse.describe(evidence)}{seeds}"
        unfinished = math.isnan(a.mean) and math.isnan(b.mean)
        verdict = {"above": HOLDS, "alike": HOLDS if or_equals and not unfinished else UNTOLD, "below": FAILS}[order]
        measured += ", alike within noise" if order == "alike" else ""
        return Finding(verdict, measured, effect=difference(a, b))

    return check


def alike(one: BestOf, others: Sequence[BestOf], within: float) -> ClaimCheck:
    """Checks that no best value differs from a given one by more than an amount, beyond doubt.

    It holds if every difference and its noise lie within the amount, and fails if one difference lies outside with its
    noise.

    Args:
        one: The setting that the others are compared with.
        others: The other settings.
        within: The largest difference.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        values = [setting.value(evidence) for setting in others]
        first = one.value(evidence)
        measured = f"{one.describe(evidence)}; {', '.join(setting.describe(evidence) for setting in others)}"
        if math.isnan(first.mean) or not values:
            return Finding(UNTOLD, measured)
        sizes = [(math.inf if math.isnan(value.mean) else abs(value.mean - first.mean)) for value in values]
        margins = [0.0 if math.isnan(value.mean) else margin_of(value, first) for value in values]
        gaps = [difference(value, first) for value in values]
        effect = max((gap for gap in gaps if gap is not None), key=lambda gap: abs(gap.value), default=None)
        if any(size - margin > within for size, margin in zip(sizes, margins, strict=True)):
            return Finding(FAILS, measured, effect=effect)
        sure = all(size + margin <= within for size, margin in zip(sizes, margins, strict=True))
        return Finding(HOLDS if sure else UNTOLD, measured, effect=effect)

    return check


def lower_rate(lower: BestOf, higher: BestOf) -> ClaimCheck:
    """Checks that the best learning rate of one study is below that of another.

    Args:
        lower: The setting claimed to have the lower learning rate.
        higher: The setting it is compared with.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        bests = [lower.best(evidence), higher.best(evidence)]
        if None in bests:
            return Finding(UNTOLD, "none finished")
        a, b = (setting.lr for setting in bests if setting is not None)
        measured = (
            f"{lower.name or lower.part} best at {power_text(a)}, {higher.name or higher.part} at {power_text(b)}"
        )
        return Finding(HOLDS if a < b else FAILS, measured)

    return check


def gap_grows(pairs: Sequence[tuple[str, BestOf, BestOf]]) -> ClaimCheck:
    """Checks that the gap between two best values grows from pair to pair, and beyond noise from first to last.

    Args:
        pairs: For each pair a name, the better and the worse setting.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        gaps, errors, gap_texts = [], [], []
        for name, better, worse in pairs:
            a, b = better.value(evidence), worse.value(evidence)
            gaps.append(a.mean - b.mean)
            errors.append(math.hypot(a.error or 0.0, b.error or 0.0))
            gap_texts.append(f"{100 * gaps[-1]:+.2f} ({name})")
        measured = "points: " + ", ".join(gap_texts)
        if len(gaps) < 2 or any(map(math.isnan, gaps)):
            return Finding(UNTOLD, measured)
        last, first = (Value(gaps[end], errors[end] or None) for end in (-1, 0))
        order, effect = differ(last, first), difference(last, first)
        if order == "above":
            return Finding(HOLDS if gaps == sorted(gaps) else IN_PART, measured, effect=effect)
        return Finding(FAILS if order == "below" else UNTOLD, measured, effect=effect)

    return check


def all_of(*checks: ClaimCheck) -> ClaimCheck:
    """Combines checks: the claim holds if all of them hold, and in part if some do.

    Args:
        checks: The checks.

    Returns:
        The combined check.

    Example:
        >>> both = all_of(lambda evidence: Finding(HOLDS, "1 > 0"), lambda evidence: Finding(FAILS, "0 < 1"))
        >>> both(Evidence()).verdict
        'holds in part'
    """

    def check(evidence: Evidence) -> Finding:
        findings = [claim_check(evidence) for claim_check in checks]
        verdict = _joined([finding.verdict for finding in findings])
        before = _joined([finding.earlier or finding.verdict for finding in findings])
        finding = Finding(verdict, "; ".join(finding.measured for finding in findings))
        rules = dict.fromkeys(finding.rule for finding in findings if finding.rule)
        return finding if before == verdict else replace(finding, earlier=before, rule=" ".join(rules))

    return check


def _joined(verdicts: Sequence[str]) -> str:
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return IN_PART if {HOLDS, IN_PART} & set(verdicts) else FAILS


def beats_everywhere(better: str, worse: str) -> ClaimCheck:
    """Checks that one study beats another at every learning rate of both, at the widest; in part if at some.

    Args:
        better: Name of the study claimed to be better.
        worse: Name of the study it is compared with.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        records = evidence.study(better), evidence.study(worse)
        better_settings, worse_settings = (
            {setting.lr: setting for setting in settings(record, width=record.widths[-1])} for record in records
        )
        orders, phrases = [], []
        for lr in sorted(set(better_settings) & set(worse_settings)):
            a, b = value_of(records[0], better_settings[lr]), value_of(records[1], worse_settings[lr])
            orders.append(differ(a, b))
            phrases.append(
                f"{formatted(a.mean, records[0].metric)} against {formatted(b.mean, records[1].metric)} at {lr:g}"
            )
        above = orders.count("above")
        verdict = (
            HOLDS if orders and above == len(orders) else IN_PART if above else FAILS if "below" in orders else UNTOLD
        )
        return Finding(verdict, "; ".join(phrases) or "nothing was run at the same rate")

    return check
