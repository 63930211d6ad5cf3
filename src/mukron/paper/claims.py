"""Checks of claims: each public function returns a check, a function from the evidence to a finding.

A difference counts if it is larger than twice its standard error. The noise of one run is estimated once per study,
from the median spread over seeds of each width's best few settings. So neither a single run that collapsed nor
settings at which nothing is learned inflate it. With one seed the noise is unknown, and a difference counts if it
exceeds 1 point of accuracy, or 5 percent of any other number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from mukron.diagnose.readings import FEATURES
from mukron.exponents import fit_exponent
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Evidence, Finding
from mukron.study.certificate import MOVES, TRANSFERS, Judgement
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
    """Names the best setting of a study at one width and of one scheme.

    Attributes:
        part: The study's name in the evidence.
        width: The width; None for the widest.
        scheme: The scheme or its beginning; None for the first.
        name: What the setting is called in findings; the part's name if empty.
        metric: The metric that is read; None for the study's. The best is always chosen by the study's.
    """

    part: str
    width: float | None = None
    scheme: str | None = None
    name: str = ""
    metric: str | None = None

    def value(self, evidence: Evidence) -> Value:
        """Returns the metric's mean over the seeds of the best setting.

        Args:
            evidence: The results of all parts.

        Returns:
            The mean with its error.
        """
        record = evidence.study(self.part)
        scheme = scheme_of(record, self.scheme)
        width = self.width if self.width is not None else record.widths[-1]
        return best_value(record, scheme, width, self.metric)

    def best(self, evidence: Evidence) -> SettingSummary | None:
        """Returns the best setting, or None if no run finished.

        Args:
            evidence: The results of all parts.

        Returns:
            The setting.
        """
        record = evidence.study(self.part)
        width = self.width if self.width is not None else record.widths[-1]
        return best(settings(record, scheme_of(record, self.scheme), width), record.metric)

    def describe(self, evidence: Evidence) -> str:
        """Returns the name and the value, as findings show them.

        Args:
            evidence: The results of all parts.

        Returns:
            The text.
        """
        value = self.value(evidence)
        return f"{self.name or self.part} {_formatted(value.mean, self.metric or evidence.study(self.part).metric)}"


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


def value_of(record: StudyRecord, setting: SettingSummary, metric: str | None = None) -> Value:
    """Returns the mean over the seeds of a setting.

    Args:
        record: The study.
        setting: One of its settings.
        metric: The metric that is read; None for the study's.

    Returns:
        The mean with its error.
    """
    metric_name = metric or record.metric
    values = _seeds(record, setting, metric_name)
    if not values:
        return Value(math.nan, None)
    noise = noise_of(record, metric_name)
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


def noise_of(record: StudyRecord, metric: str) -> float | None:
    """Estimates the standard deviation of one run from the median variance over seeds of the best few settings.

    Args:
        record: The study.
        metric: The metric.

    Returns:
        The standard deviation, or None with one seed.
    """
    leading = [
        setting
        for scheme in record.schemes
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
    if a.error is None or b.error is None:
        margin = ACCURACY_MARGIN if a.accuracy else RELATIVE_MARGIN * max(abs(a.mean), abs(b.mean))
    else:
        margin = STANDARD_ERRORS * math.hypot(a.error, b.error)
    return "above" if a.mean - b.mean > margin else "below" if b.mean - a.mean > margin else "alike"


def _formatted(value: float, metric: str) -> str:
    if math.isnan(value):
        return "none finished"
    return f"{100 * value:.2f}%" if metric.endswith("accuracy") else f"{value:.4g}"


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
        >>> beats(BestOf("a"), BestOf("b"))(Evidence(a=study(0.92, 0.93), b=study(0.88, 0.89)))
        Finding(verdict='holds', measured='a 92.50% against b 88.50%')
    """

    def check(evidence: Evidence) -> Finding:
        a, b = better.value(evidence), worse.value(evidence)
        down = lowest_is_best(better.metric or evidence.study(better.part).metric)
        order = differ(-a, -b) if down else differ(a, b)
        seeds = "" if a.error is not None else " (one seed)"
        measured = f"{better.describe(evidence)} against {worse.describe(evidence)}{seeds}"
        unfinished = math.isnan(a.mean) and math.isnan(b.mean)
        verdict = {"above": HOLDS, "alike": HOLDS if or_equals and not unfinished else UNTOLD, "below": FAILS}[order]
        return Finding(verdict, measured + (", alike within noise" if order == "alike" else ""))

    return check


def close(a: BestOf, b: BestOf, within: float) -> ClaimCheck:
    """Checks that two best values differ by at most a given amount.

    Args:
        a: A setting.
        b: Another setting.
        within: The largest difference.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        first, second = a.value(evidence), b.value(evidence)
        measured = f"{a.describe(evidence)} against {b.describe(evidence)}"
        if math.isnan(first.mean) or math.isnan(second.mean):
            return Finding(UNTOLD if math.isnan(first.mean) and math.isnan(second.mean) else FAILS, measured)
        return Finding(HOLDS if abs(first.mean - second.mean) <= within else FAILS, measured)

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
        measured = f"{lower.name or lower.part} best at {_power(a)}, {higher.name or higher.part} at {_power(b)}"
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
        order = differ(Value(gaps[-1], errors[-1] or None), Value(gaps[0], errors[0] or None))
        if order == "above":
            return Finding(HOLDS if gaps == sorted(gaps) else IN_PART, measured)
        return Finding(FAILS if order == "below" else UNTOLD, measured)

    return check


def all_of(*checks: ClaimCheck) -> ClaimCheck:
    """Combines checks: the claim holds if all of them hold, and in part if some do.

    Args:
        checks: The checks.

    Returns:
        The combined check.

    Example:
        >>> both = all_of(lambda evidence: Finding(HOLDS, "1 > 0"), lambda evidence: Finding(FAILS, "0 < 1"))
        >>> both(Evidence())
        Finding(verdict='holds in part', measured='1 > 0; 0 < 1')
    """

    def check(evidence: Evidence) -> Finding:
        findings = [claim_check(evidence) for claim_check in checks]
        verdicts = {finding.verdict for finding in findings}
        verdict = findings[0].verdict if len(verdicts) == 1 else IN_PART if verdicts & {HOLDS, IN_PART} else FAILS
        return Finding(verdict, "; ".join(finding.measured for finding in findings))

    return check


# Transfer.


def _judgement(record: StudyRecord, scheme: str, axis: str) -> Judgement | None:
    if record.certificate is None:
        return None
    return next(
        (
            judgement
            for judgement in record.certificate.judgements
            if (judgement.scheme, judgement.axis) == (scheme, axis)
        ),
        None,
    )


def _bests(record: StudyRecord, scheme: str, axis: str) -> list[tuple[float, float]]:
    """Returns pairs of a width and its best setting on the grid."""
    pairs = [(width, best(settings(record, scheme, width), record.metric)) for width in record.widths]
    return [(width, setting.at(axis)) for width, setting in pairs if setting is not None]


def _describe_bests(bests: Sequence[tuple[float, float]]) -> str:
    if len({value for _, value in bests}) == 1:
        return f"best at {_power(bests[0][1])} at every width from {bests[0][0]:g} to {bests[-1][0]:g}"
    return "best at " + ", ".join(f"{_power(value)} (width {width:g})" for width, value in bests)


def _power(value: float) -> str:
    z = math.log2(value)
    return f"2^{z:.0f}" if abs(z - round(z)) < 1e-6 else f"{value:.3g}"


def _common_setting(record: StudyRecord, scheme: str, axis: str) -> float | None:
    """Returns a setting that is as good as each width's best within the noise of the seeds; None with one seed."""
    alike_by_value: dict[float, list[bool]] = {}
    for width in record.widths:
        complete = [setting for setting in settings(record, scheme, width) if setting.whole]
        best_setting = best(complete, record.metric)
        for setting in complete:
            assert best_setting is not None
            alike = differ(value_of(record, best_setting), value_of(record, setting)) == "alike"
            alike_by_value.setdefault(setting.at(axis), []).append(alike)
    common = [setting for setting, alike in alike_by_value.items() if len(alike) == len(record.widths) and all(alike)]
    return common[0] if common and noise_of(record, record.metric) is not None else None


@dataclass(frozen=True)
class Optima:
    """The best settings of a scheme over the widths.

    Attributes:
        bests: Pairs of a width and its best setting on the grid.
        judgement: The judgement of the study's certificate.
        common: If the bests differ, a setting that is as good at every width, if there is one.
        diverged: Widths at which every run diverged.
        open_ended: Widths whose best may lie beyond the grid.
    """

    bests: Sequence[tuple[float, float]]
    judgement: Judgement
    common: float | None
    diverged: Sequence[float]
    open_ended: Sequence[float]

    @property
    def same(self) -> bool:
        """Whether the best setting is the same at every width."""
        return len({setting for _, setting in self.bests}) == 1 and not self.diverged

    def describe(self, part: str) -> str:
        """Returns where the best settings are, as findings show it.

        Args:
            part: The study's name.

        Returns:
            The text.
        """
        phrases = [f"{part}: {_describe_bests(self.bests)}"]
        if self.judgement.drift is not None:
            phrases.append(f"drift {self.judgement.drift} per doubling")
        if self.diverged:
            phrases.append(f"at {_width_list(self.diverged)} every run diverged")
        if self.open_ended:
            phrases.append(f"at {_width_list(self.open_ended)} the best may lie beyond the grid")
        phrases.append(f"certificate: {self.judgement.verdict}")
        if self.common is not None:
            phrases.append(f"{_power(self.common)} is as good at every width, within the noise of the seeds")
        return "; ".join(phrases)


def _width_list(widths: Sequence[float]) -> str:
    return ", ".join(f"{width:g}" for width in widths)


def find_optima(record: StudyRecord, scheme: str, axis: str) -> Optima | None:
    """Finds the best settings of a scheme over the widths.

    Args:
        record: The study.
        scheme: The scheme as the study names it.
        axis: "lr" or "damping".

    Returns:
        The best settings, or None if too little was run.
    """
    judgement, bests = _judgement(record, scheme, axis), _bests(record, scheme, axis)
    if judgement is None or not bests:
        return None
    diverged = [width for width in record.widths if width not in dict(bests)]
    same = len({setting for _, setting in bests}) == 1
    common = None if same or diverged else _common_setting(record, scheme, axis)
    return Optima(bests, judgement, common, diverged, [optimum.width for optimum in judgement.optima if optimum.open])


def _by_optima(part: str, scheme: str | None, axis: str, verdict: Callable[[Optima], str]) -> ClaimCheck:
    """Returns a check whose verdict follows from the best settings."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        optima = find_optima(record, scheme_of(record, scheme), axis)
        if optima is None:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        return Finding(verdict(optima), optima.describe(part))

    return check


def stays(part: str, scheme: str | None = None, axis: str = "lr") -> ClaimCheck:
    """Checks that the best setting is the same at every width, on the grid or by the study's certificate.

    The claim holds in part if the best settings move but one setting is as good at every width within noise.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.
        axis: "lr" or "damping".

    Returns:
        The check.
    """

    def verdict(optima: Optima) -> str:
        if optima.judgement.verdict == TRANSFERS or (optima.same and not optima.open_ended):
            return HOLDS
        if optima.open_ended and not optima.diverged:
            return UNTOLD
        if optima.judgement.verdict == MOVES:
            return FAILS if optima.common is None else IN_PART
        return UNTOLD if optima.common is None else HOLDS

    return _by_optima(part, scheme, axis, verdict)


def moves(part: str, scheme: str | None = None, axis: str = "lr", direction: int = 0) -> ClaimCheck:
    """Checks that the best setting moves with the width, by the study's certificate.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.
        axis: "lr" or "damping".
        direction: -1 if it is claimed to fall, 1 if to rise, 0 for either.

    Returns:
        The check.
    """

    def verdict(optima: Optima) -> str:
        if optima.judgement.verdict == TRANSFERS:
            return FAILS
        if optima.same and not optima.open_ended:
            return UNTOLD if optima.judgement.verdict == MOVES else FAILS
        if optima.judgement.verdict == MOVES and optima.common is None:
            log_ratio = math.log2(optima.bests[-1][1] / optima.bests[0][1])
            return FAILS if direction * log_ratio < 0 and not optima.diverged else HOLDS
        return UNTOLD

    return _by_optima(part, scheme, axis, verdict)


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

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        scheme_name = scheme_of(record, scheme)
        metric_name = metric or record.metric
        values = {width: best_value(record, scheme_name, width, metric) for width in record.widths}
        measured = f"{part}: " + ", ".join(
            f"{_formatted(value.mean, metric_name)} at {width:g}" for width, value in values.items()
        )
        signed = [-value if lowest_is_best(metric_name) else value for value in values.values()]
        if len(signed) < 2 or math.isnan(signed[0].mean):
            return Finding(UNTOLD, measured)
        rises = differ(signed[-1], signed[0])
        falls = any(differ(wide, narrow) == "below" for n, wide in enumerate(signed) for narrow in signed[:n])
        if rises == "below" or (falls and not strictly):
            return Finding(FAILS, measured)
        if rises == "above":
            return Finding(IN_PART if falls else HOLDS, measured)
        return Finding(UNTOLD if strictly else HOLDS, measured)

    return check


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

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        narrow = BestOf(part, record.widths[0], scheme, f"{part} at {record.widths[0]:g}:")
        wide = BestOf(part, record.widths[-1], scheme, f"at {record.widths[-1]:g}:")
        return beats(narrow, wide)(evidence)

    return check


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
        shown = [_formatted(value.mean, record.metric) for value in (a, b)]
        measured = f"{part}, learning rate {_power(narrow_best.lr)}: {shown[0]} at {narrow:g}, {shown[1]} at {wide:g}"
        order = differ(-b, -a) if lowest_is_best(record.metric) else differ(b, a)
        return Finding({"below": HOLDS, "above": FAILS, "alike": UNTOLD}[order], measured)

    return check


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
                f"{_formatted(a.mean, records[0].metric)} against {_formatted(b.mean, records[1].metric)} at {lr:g}"
            )
        above = orders.count("above")
        verdict = (
            HOLDS if orders and above == len(orders) else IN_PART if above else FAILS if "below" in orders else UNTOLD
        )
        return Finding(verdict, "; ".join(phrases) or "nothing was run at the same rate")

    return check


# Features.


def learns(part: str) -> ClaimCheck:
    """Checks that the change of every layer's features does not depend on the width.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        verdicts = [judged for judged in coordinate_check.features if judged.reading == FEATURES.title]
        if not verdicts:
            return Finding(UNTOLD, f"{part}: nothing was read")
        slopes = ", ".join(
            f"{judged.layer} {judged.measured.slope:+.2f}" for judged in verdicts if judged.measured is not None
        )
        off = [judged for judged in verdicts if judged.word in (FEATURES.low, FEATURES.high)]
        if coordinate_check.record.broken or off:
            verdict = IN_PART if len(off) < len(verdicts) else FAILS
        else:
            verdict = HOLDS if all(judged.ok for judged in verdicts) else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {slopes}")

    return check


def decays(part: str, *layers: str) -> ClaimCheck:
    """Checks that the change of features decays as the width grows.

    Args:
        part: The coordinate check's name in the evidence.
        layers: The layers it is claimed of; some layer if none is named.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        verdicts = [
            judged
            for judged in coordinate_check.features
            if judged.reading == FEATURES.title and (not layers or judged.layer in layers)
        ]
        slopes = {judged.layer: judged.measured.slope for judged in verdicts if judged.measured is not None}
        low = [layer for layer, slope in slopes.items() if slope < -coordinate_check.tolerance]
        least = len(layers) or 1
        exponents = ", ".join(f"{layer} {slope:+.2f}" for layer, slope in slopes.items())
        verdict = HOLDS if len(low) >= least else IN_PART if low else FAILS if slopes else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {exponents or 'none'}")

    return check


def depends_on_width(part: str) -> ClaimCheck:
    """Checks that the change of some layer's features depends on the width, rising or falling.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        verdicts = [judged for judged in coordinate_check.features if judged.reading == FEATURES.title]
        slopes = {judged.layer: judged.measured.slope for judged in verdicts if judged.measured is not None}
        off = [slope for slope in slopes.values() if abs(slope) > coordinate_check.tolerance]
        exponents = ", ".join(f"{layer} {slope:+.2f}" for layer, slope in slopes.items())
        verdict = HOLDS if off or coordinate_check.record.broken else FAILS if slopes else UNTOLD
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {exponents or 'none'}")

    return check


def column_exponent(part: str, column: str, predicted: float, tolerance: float = 0.25) -> ClaimCheck:
    """Checks that a recorded quantity scales as a power of the width, at the first epoch and at the last.

    Args:
        part: The study's name in the evidence.
        column: The quantity's name in the epochs.
        predicted: The exponent of the width.
        tolerance: The largest difference of the fitted exponent from it.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        slopes = {}
        for when, pick in (("first", 0), ("last", -1)):
            points = []
            for result in record.results:
                values = [row[column] for row in result.rows if row.get(column)]
                if values and result.status == "finished":
                    points.append((result.point.width, values[pick]))
            if len({width for width, _ in points}) > 1:
                slopes[when] = fit_exponent([width for width, _ in points], [value for _, value in points]).slope
        if not slopes:
            return Finding(UNTOLD, f"{column}: not read at two widths")
        right = [abs(slope - predicted) <= tolerance for slope in slopes.values()]
        exponents = ", ".join(f"{slope:+.2f} at the {when} epoch" for when, slope in slopes.items())
        verdict = HOLDS if all(right) else IN_PART if any(right) else FAILS
        return Finding(verdict, f"{column}: exponent {exponents} (theory {predicted:+g})")

    return check
