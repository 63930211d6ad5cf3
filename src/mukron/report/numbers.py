"""A study's numbers as figures and tables show them: by setting, over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from mukron.study.certificate import Judgement
from mukron.study.errors import StudyError
from mukron.study.points import DIVERGED, FINISHED, PRUNED, Result, label, lowest_is_best
from mukron.study.record import StudyRecord
from mukron.theory import get_method

AXES = {"lr": "learning rate", "damping": "damping"}


@dataclass(frozen=True)
class Setting:
    """All seeds of one setting at one width."""

    scheme: str
    width: float
    lr: float
    damping: float | None
    values: tuple[float, ...]  # the metric at the end, of the seeds that finished
    diverged: int  # how many seeds did
    pruned: int

    @property
    def whole(self) -> bool:
        """Every seed finished: only such settings can be the best."""
        return bool(self.values) and not self.diverged and not self.pruned

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.whole else math.nan

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest seed."""
        return (min(self.values), max(self.values)) if self.whole else (math.nan, math.nan)

    def at(self, axis: str) -> float:
        value = self.lr if axis == "lr" else self.damping
        if value is None:
            raise StudyError(f"{label(self.scheme)} has no damping, so there is nothing to draw against it")
        return value


def settings(record: StudyRecord, scheme: str | None = None, width: float | None = None) -> list[Setting]:
    """By scheme in the study's order, then width, learning rate and damping."""
    groups: dict[tuple[str, float, float, float | None], list[Result]] = {}
    for result in select(record, scheme, width):
        point = result.point
        groups.setdefault((point.scheme, point.width, point.lr, point.damping), []).append(result)
    order = {name: number for number, name in enumerate(record.schemes)}
    keys = sorted(groups, key=lambda key: (order[key[0]], key[1], key[2], key[3] or 0.0))
    return [_setting(key, groups[key], record.metric) for key in keys]


def _setting(key: tuple[str, float, float, float | None], results: Sequence[Result], metric: str) -> Setting:
    ended = [result.value(metric) for result in results if result.status == FINISHED]
    values = tuple(value for value in ended if value is not None and math.isfinite(value))
    lost = sum(result.status == DIVERGED for result in results) + len(ended) - len(values)
    return Setting(*key, values, lost, sum(result.status == PRUNED for result in results))


def select(record: StudyRecord, scheme: str | None = None, width: float | None = None) -> Iterator[Result]:
    for result in record.results:
        if scheme in (None, result.point.scheme) and width in (None, result.point.width):
            yield result


def ordered(found: Sequence[Setting], metric: str) -> list[Setting]:
    """The settings whose every seed finished, the best mean first."""
    sign = 1 if lowest_is_best(metric) else -1
    return sorted((each for each in found if each.whole), key=lambda each: sign * each.mean)


def best(found: Sequence[Setting], metric: str) -> Setting | None:
    return next(iter(ordered(found, metric)), None)


def profile(record: StudyRecord, axis: str, scheme: str, width: float) -> list[Setting]:
    """One setting for each value on the axis: where the other one is tuned too, the best of it."""
    by_value: dict[float, list[Setting]] = {}
    for each in settings(record, scheme, width):
        by_value.setdefault(each.at(axis), []).append(each)
    return [best(found, record.metric) or found[0] for _, found in sorted(by_value.items())]


def judgement(record: StudyRecord, scheme: str, axis: str | None = None) -> Judgement | None:
    """What the certificate says of the scheme, about this axis or the first one."""
    judged = () if record.certificate is None else record.certificate.judgements
    return next((each for each in judged if each.scheme == scheme and axis in (None, each.axis)), None)


def names(record: StudyRecord) -> dict[str, str]:
    """What each scheme is called; with its number where two would have one name."""
    short = {scheme: label(scheme) for scheme in record.schemes}
    shown = list(short.values())
    return {scheme: name if shown.count(name) == 1 else scheme for scheme, name in short.items()}


def subject(record: StudyRecord) -> str:
    """What was trained, in a line."""
    config = record.config
    epochs = f"{config.epochs} epoch" + ("s" if config.epochs > 1 else "")
    return f"{get_method(config.method).title} on {config.data}, {config.model}: {words(record.metric)} after {epochs}"


def words(metric: str) -> str:
    return metric.removeprefix("words/").replace("_", " ")
