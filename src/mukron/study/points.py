"""The points of a study, which are trained once, and their results.

A **scheme** of a study is written SCHEME or SCHEME/DAMPING, as in "sp/heuristic:1e-3": a parametrization and the rule
that turns a damping number into a layer's damping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mukron.damping import Rule
from mukron.study.errors import StudyError
from mukron.theory import get_scheme
from mukron.train import RunConfig
from mukron.train.records import DIVERGED, FINISHED, LOW_IS_BEST
from mukron.train.rows import EpochRow, check_rows
from mukron.typed import fields_of, read_as

PRUNED = "pruned"  # the status of a run that was given up
ENDINGS = (FINISHED, DIVERGED, PRUNED)


@dataclass(frozen=True)
class Point:
    """One training run of a study.

    Attributes:
        scheme: A parametrization and its damping rule, as in "mup/rescaled:1".
        width: The network's width.
        lr: The learning rate, as tuned at the base width.
        damping: The number of the scheme's rule; None for methods without damping.
        seed: The seed of all random numbers.

    Example:
        >>> Point("mup/rescaled:1", width=128, lr=0.02, damping=0.5, seed=0).config(RunConfig()).damping.text()
        'rescaled:0.5'
    """

    scheme: str
    width: float
    lr: float
    damping: float | None
    seed: int

    def config(self, config: RunConfig) -> RunConfig:
        """Return the run at this point.

        Args:
            config: What the study trains.

        Returns:
            The same with the scheme, width, learning rate, damping and seed of this point.
        """
        scheme, _, rule = self.scheme.partition("/")
        damping: Any = config.damping
        if self.damping is not None:
            damping = dataclasses.replace(Rule.parse(rule), rho=self.damping)  # type: ignore[type-var]
        return config.replace(scheme=scheme, width=self.width, lr=self.lr, damping=damping, seed=self.seed)

    def text(self) -> str:
        """The point in one line, as trackers call it."""
        damping = "" if self.damping is None else f" damping={self.damping:g}"
        return f"{self.scheme.partition('/')[0]} width={self.width:g} lr={self.lr:g}{damping} seed={self.seed}"


POINT_FIELDS = tuple(field.name for field in dataclasses.fields(Point))  # the fields of a run that a study varies


@dataclass(frozen=True)
class Result:
    """The result of training a point.

    Attributes:
        point: What was trained.
        status: "finished", "diverged" or "pruned" (given up, as it fell behind the others).
        rows: One row per epoch, as in ``mukron.train.Run``.
        reason: Why it did not finish.
        seconds: The time that training took.

    Example:
        >>> point = Point("mup/rescaled:1", width=128, lr=0.02, damping=1.0, seed=0)
        >>> Result(point, "finished", [{"epoch": 1, "train_loss": 0.5}]).value("train_loss")
        0.5
    """

    point: Point
    status: str
    rows: Sequence[EpochRow] = ()
    reason: str = ""
    seconds: float = 0.0

    def value(self, metric: str, epoch: int | None = None) -> float | None:
        """Return a metric at the end of an epoch.

        Args:
            metric: A column of the rows, as in "train_loss".
            epoch: The epoch, from 1; the last one if not given.

        Returns:
            The value; None if there is no such epoch, or it has no finite value of the metric.
        """
        rows = [row for row in self.rows if epoch is None or row["epoch"] == epoch]
        return rows[-1].get(metric) if rows else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        content = {**dataclasses.asdict(self.point), "status": self.status, "reason": self.reason}
        return {**content, "seconds": self.seconds, "rows": [dict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Read what ``to_dict`` returned.

        Args:
            data: What ``to_dict`` returned.
        """
        content = dict(fields_of(data, "result", *POINT_FIELDS))
        point = {name: content.pop(name) for name in POINT_FIELDS}
        result: Result = read_as(cls, {**content, "point": point}, "result")
        check_rows(result.rows, "row")
        if result.status not in ENDINGS:
            raise ValueError(f"result: {result.status!r} is no status; known: {', '.join(ENDINGS)}")
        if min(result.point.width, result.point.lr) <= 0 or (result.point.damping or 0) < 0:
            raise ValueError(f"result: expected width and lr above 0 and damping from 0 on, found {result.point}")
        return result


def read_scheme(text: str, method: str) -> tuple[str, float | None]:
    """A scheme in its canonical spelling, and its damping number: "sp/heuristic" -> "sp/heuristic:0.001", 0.001."""
    name, _, rule = text.strip().partition("/")
    damping: Any = rule or None
    try:
        name = get_scheme(name).name
        config = RunConfig(method=method, scheme=name, damping=damping)
    except ValueError as error:
        raise StudyError(
            f"scheme {text!r}: {error}; expected SCHEME or SCHEME/DAMPING, as in sp/heuristic:1e-3"
        ) from None
    if config.damping is None:
        config = config.replace(damping=config.spec.damping)
    if config.damping is None:
        return name, None
    return f"{name}/{config.damping.text()}", config.damping.rho


def label(scheme: str) -> str:
    """A scheme's name in tables and figures: "sp/heuristic:0.001" -> "SP, heuristic"."""
    name, slash, rule = scheme.partition("/")
    shown = {"sp": "SP", "mup": "muP", "ntk": "NTK"}.get(name, name)
    return shown + (f", {rule.partition(':')[0]}" if slash else "")


def lowest_is_best(metric: str) -> bool:
    """Whether a low value is best: it is of losses, in bits per byte too, but not of anything else (accuracies)."""
    return metric.endswith(LOW_IS_BEST)
