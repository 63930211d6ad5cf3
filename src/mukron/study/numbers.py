"""The numbers of a study as figures and tables show them: by setting, summarized over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from mukron.study.certificate import Judgement
from mukron.study.errors import StudyError
from mukron.study.points import PRUNED, Result, label, lowest_is_best
from mukron.study.record import StudyRecord
from mukron.theory import method_title
from mukron.train.records import DIVERGED, FINISHED


@dataclass(frozen=True)
class SettingSummary:
    """The results of all seeds at one setting and width."""

    scheme: str
    width: float
    lr: float
    damping: float | None
    values: tuple[float, ...]  # the final metric of the seeds that finished
    diverged: int  # the number of seeds that diverged
    pruned: int  # the number of seeds that were pruned

    @property
    def whole(self) -> bool:
        """Whether every seed finished; only such settings can be the best."""
        return bool(self.values) and not self.diverged and not self.pruned

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN unless every seed finished."""
        return fmean(self.values) if self.whole else math.nan

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value over the seeds; NaN unless every seed finished."""
        return (min(self.values), max(self.values)) if self.whole else (math.nan, math.nan)

    def at(self, axis: str) -> float:
        """Return the learning rate (``"lr"``) or the damping (``"damping"``)."""
        value = self.lr if axis == "lr" else self.damping
        if value is None:
            raise StudyError(f"{label(self.scheme)} has no damping, so there is nothing to draw against it")
        return value


def settings(record: StudyRecord, scheme: str | None = None, width: float | None = None) -> list[SettingSummary]:
    """Summarize every setting, by scheme in the study's order, then by width, learning rate and damping."""
    groups: dict[tuple[str, float, float, float | None], list[Result]] = {}
    for result in select(record, scheme, width):
        point = result.point
        groups.setdefault((point.scheme, point.width, point.lr, point.damping), []).append(result)
    order = {name: number for number, name in enumerate(record.schemes)}
    keys = sorted(groups, key=lambda key: (order[key[0]], key[1], key[2], key[3] or 0.0))
    return [_summarize(key, groups[key], record.metric) for key in keys]


def _summarize(key: tuple[str, float, float, float | None], results: Sequence[Result], metric: str) -> SettingSummary:
    final = [result.value(metric) for result in results if result.status == FINISHED]
    values = tuple(value for value in final if value is not None and math.isfinite(value))
    diverged = sum(result.status == DIVERGED for result in results) + len(final) - len(values)
    return SettingSummary(*key, values, diverged, sum(result.status == PRUNED for result in results))


def select(record: StudyRecord, scheme: str | None = None, width: float | None = None) -> Iterator[Result]:
    """Yield the results of a scheme and a width; None selects all schemes or widths."""
    for result in record.results:
        if scheme in (None, result.point.scheme) and width in (None, result.point.width):
            yield result


def ordered(summaries: Sequence[SettingSummary], metric: str) -> list[SettingSummary]:
    """Return the settings for which every seed finished, sorted by their means, best first."""
    sign = 1 if lowest_is_best(metric) else -1
    return sorted((summary for summary in summaries if summary.whole), key=lambda summary: sign * summary.mean)


def best(summaries: Sequence[SettingSummary], metric: str) -> SettingSummary | None:
    """Return the setting with the best mean; None if no setting has finished with every seed."""
    return next(iter(ordered(summaries, metric)), None)


def profile(record: StudyRecord, axis: str, scheme: str, width: float) -> list[SettingSummary]:
    """Return one setting for every value on the axis: the best one, if the other axis is tuned too."""
    by_value: dict[float, list[SettingSummary]] = {}
    for summary in settings(record, scheme, width):
        by_value.setdefault(summary.at(axis), []).append(summary)
    return [best(summaries, record.metric) or summaries[0] for _, summaries in sorted(by_value.items())]


def judgement(record: StudyRecord, scheme: str, axis: str | None = None) -> Judgement | None:
    """Return the certificate's judgement of a scheme, on this axis or on the first one."""
    judgements = () if record.certificate is None else record.certificate.judgements
    return next((verdict for verdict in judgements if verdict.scheme == scheme and axis in (None, verdict.axis)), None)


def scheme_labels(record: StudyRecord) -> dict[str, str]:
    """Return the labels of the schemes; a scheme with its damping where two labels would be the same."""
    labels = {scheme: label(scheme) for scheme in record.schemes}
    texts = list(labels.values())
    return {scheme: text if texts.count(text) == 1 else scheme for scheme, text in labels.items()}


def subject(record: StudyRecord) -> str:
    """Describe in one line what was trained."""
    config = record.config
    trained = f"{method_title(config.method)} on {config.data}, {config.model}"
    epochs = f"{config.epochs} epoch" + ("s" if config.epochs > 1 else "")
    return f"{trained}: {metric_label(record.metric)} after {epochs}"


def metric_label(metric: str) -> str:
    """Return the name of a metric as figures and tables show it."""
    return metric.removeprefix("words/").replace("_", " ")
