"""A study as it is kept in one JSON file: what was trained, every point's result, and the certificate."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mukron.notebook import Shown
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.study.certificate import Certificate
from mukron.study.errors import StudyError
from mukron.study.points import Point, Result, label, lowest_is_best
from mukron.table import Table
from mukron.train import RunConfig
from mukron.train.records import FINISHED
from mukron.typed import fields_of, read_as

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, VERSION = "study", 1


@dataclass(frozen=True, repr=False)
class StudyRecord(Shown):
    """The results of a study. Reports and plans need nothing else.

    Attributes:
        name: The study's name.
        config: What is trained; scheme, width, learning rate, damping and seed are those of the points.
        over: What is tuned: "lr", "damping" or both.
        metric: What decides which setting is best.
        results: The results of all points.
        certificate: Whether settings transfer; None if there is one width only.
        made: How the record was made: command, date, storage, machine, versions.

    Example:
        >>> from mukron.train import RunConfig
        >>> StudyRecord("first", RunConfig(), over=("lr",), metric="train_loss", results=()).widths
        ()

        That of a study is in its folder::

            record = StudyRecord.load("studies/first/study.json")
            print(record.ranking())
            config = record.best(scheme="mup/rescaled:1", width=64)
    """

    name: str
    config: RunConfig
    over: tuple[str, ...]
    metric: str
    results: Sequence[Result]
    certificate: Certificate | None = None
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of the results."""
        return tuple(dict.fromkeys(result.point.scheme for result in self.results))

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths of the results, ascending."""
        return tuple(sorted({result.point.width for result in self.results}))

    def best(self, scheme: str | None = None, width: float | None = None) -> RunConfig:
        """Return the run with the best mean over seeds.

        Args:
            scheme: Only of this scheme, as ``schemes`` has it.
            width: Only of this width.

        Returns:
            The run, with the seed of ``config``.

        Raises:
            StudyError: There is no setting of which all seeds finished.
        """
        ranked = self.ranked(scheme, width)
        if not ranked:
            what = f"no run{f' of {scheme}' if scheme else ''}{f' at width {width:g}' if width else ''} finished"
            raise StudyError(f"{self.name}: {what}; lower the learning rates")
        return ranked[0][0].config(self.config)

    def ranking(self, most: int = 10) -> Table:
        """Return a table of settings, the best one first.

        Args:
            most: The number of settings.
        """
        count = Counter(result.status for result in self.results)
        rows = [
            (f"{number}", label(point.scheme), f"{point.width:g}", f"{point.lr:.4g}", _damping(point), f"{value:.5g}")
            for number, (point, value) in enumerate(self.ranked()[:most], 1)
        ]
        title = f"{self.name}: {', '.join(f'{number} {status}' for status, number in count.items())}"
        columns = ("", "scheme", "width", "learning rate", "damping", self.metric)
        return Table(title, columns, tuple(rows) or (("", "-", "-", "-", "-", "no run finished"),))

    def ranked(self, scheme: str | None = None, width: float | None = None) -> list[tuple[Point, float]]:
        """Return settings and their means over seeds, best first, without settings of which a seed did not finish.

        Args:
            scheme: Only of this scheme.
            width: Only of this width.

        Returns:
            Points, with the seed of ``config``, and means of the metric.
        """
        values: dict[Point, list[float]] = defaultdict(list)
        for result in self.results:
            point, value = result.point, result.value(self.metric)
            if scheme in (None, point.scheme) and width in (None, point.width):
                ended = result.status == FINISHED and value is not None
                values[replace(point, seed=self.config.seed)].append(value if ended and value is not None else math.nan)
        means = {setting: statistics.fmean(of_seeds) for setting, of_seeds in values.items()}
        finished = [(setting, mean) for setting, mean in means.items() if not math.isnan(mean)]
        return sorted(finished, key=lambda pair: pair[1], reverse=not lowest_is_best(self.metric))

    def plot(self, axis: str | None = None) -> Figure:
        """Draw the metric against what was tuned, one line per width; it needs matplotlib.

        Args:
            axis: "lr" or "damping"; by default the first one that was tuned.

        Returns:
            The figure.

        Raises:
            StudyError: No run has ended, or the axis was not tuned.
            ValueError: matplotlib is not installed.
        """
        from mukron.study.drawing import draw_transfer

        if axis is not None and axis not in self.over:
            raise StudyError(f"plot({axis!r}): this study tuned {', '.join(self.over)}")
        return draw_transfer(self, axis or self.over[0])

    def _summary(self) -> list[str]:
        ended = Counter(result.status for result in self.results)
        widths = ", ".join(f"{width:g}" for width in self.widths) or "none"
        runs = ", ".join(f"{number} {status}" for status, number in ended.items()) or "no run has ended"
        lines = [
            f"{self.name}: {self.config.model} on {self.config.data}, {self.config.method}",
            f"widths {widths}; {runs}",
        ]
        if ranked := self.ranked():
            point, value = ranked[0]
            damping = "" if point.damping is None else f", damping {point.damping:.4g}"
            where = f"{label(point.scheme)}, width {point.width:g}"
            lines.append(f"best {self.metric} {value:.4g}: learning rate {point.lr:.4g}{damping} ({where})")
        return lines + ([] if self.certificate is None else self.certificate._summary()[1:])

    def _tables(self) -> list[Table]:
        return [self.ranking(5)] if self.certificate is None else [self.certificate.table()]

    def to_dict(self) -> Data:
        """Return plain data for JSON."""
        content = {"name": self.name, "config": self.config.to_dict(), "over": list(self.over), "metric": self.metric}
        certificate = None if self.certificate is None else self.certificate.to_dict()
        results = [result.to_dict() for result in self.results]
        return stamp(
            KIND, VERSION, {**content, "made": dict(self.made), "certificate": certificate, "results": results}
        )

    @classmethod
    def from_dict(cls, data: object, source: str = "study") -> StudyRecord:
        """Read what ``to_dict`` returned.

        Args:
            data: What ``to_dict`` returned.
            source: Names the data in errors.
        """
        content = check_stamp(data, KIND, VERSION, source)
        config = RunConfig.from_dict(content.get("config"), source)
        with damaged(source):
            fields_of(content, "study", "name", "over", "metric", "results", "certificate", "made")
            results = tuple(map(Result.from_dict, read_as(list[Any], content["results"], "results")))
            _check_schemes(results, config)
            over = read_as(tuple[str, ...], content["over"], "over")
            if not over or not {*over} <= {"lr", "damping"}:
                raise ValueError(f"over: expected lr, damping or both, found {list(over)}")
            return cls(
                name=read_as(str, content["name"], "name"),
                config=config,
                over=over,
                metric=read_as(str, content["metric"], "metric"),
                results=results,
                certificate=None if content["certificate"] is None else Certificate.from_dict(content["certificate"]),
                made=read_as(dict[str, Any], content["made"], "made"),
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON.

        Args:
            path: The path of the JSON file.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StudyRecord:
        """Read a study.json.

        Args:
            path: The path of the file.

        Raises:
            StudyError: The file cannot be read.
        """
        try:
            return cls.from_dict(read_json(path), str(path))
        except OSError as error:
            raise StudyError(f"{path}: cannot be read: {error.strerror}; expected a study's study.json") from error


def _check_schemes(results: Sequence[Result], config: RunConfig) -> None:
    """Every scheme is one that the config can be run in, with a damping if it has a rule."""
    for point in {(result.point.scheme, result.point.damping is None): result.point for result in results}.values():
        if "/" in point.scheme and point.damping is None:
            raise ValueError(f"result: scheme {point.scheme!r} and damping {point.damping} do not fit")
        if "/" in point.scheme or point.damping is None:  # a ridge of kernel regression has no rule
            point.config(config)


def _damping(point: Point) -> str:
    return "-" if point.damping is None else f"{point.damping:.4g}"
