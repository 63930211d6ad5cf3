"""What a study consists of: points, each trained once, and what became of them.

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
from mukron.train import RunConfig, records
from mukron.train.records import Row

FINISHED, DIVERGED, PRUNED = records.FINISHED, records.DIVERGED, "pruned"


@dataclass(frozen=True)
class Point:
    """One training run of a study."""

    scheme: str  # as ``read_scheme`` writes it
    width: float
    lr: float
    damping: float | None  # the number of the scheme's rule; None for methods that have no damping
    seed: int

    def config(self, config: RunConfig) -> RunConfig:
        """The run itself: what the study trains, at this point."""
        scheme, _, rule = self.scheme.partition("/")
        damping: Any = config.damping
        if self.damping is not None:
            damping = dataclasses.replace(Rule.parse(rule), rho=self.damping)  # type: ignore[type-var]
        return config.replace(scheme=scheme, width=self.width, lr=self.lr, damping=damping, seed=self.seed)


@dataclass(frozen=True)
class Result:
    """What became of a point."""

    point: Point
    status: str  # "finished", "diverged" or "pruned" (given up, as it fell behind)
    rows: Sequence[Row] = ()  # its epochs, as ``mukron.train.Run`` has them
    reason: str = ""  # why it did not finish
    seconds: float = 0.0

    def value(self, metric: str, epoch: int | None = None) -> float | None:
        """The metric at the end of an epoch, the last one if none is named; None if there is none."""
        rows = [row for row in self.rows if epoch is None or row["epoch"] == epoch]
        return rows[-1].get(metric) if rows else None

    def to_dict(self) -> dict[str, Any]:
        content = {**dataclasses.asdict(self.point), "status": self.status, "reason": self.reason}
        return {**content, "seconds": self.seconds, "rows": [dict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        point = Point(*(data[each.name] for each in dataclasses.fields(Point)))
        return cls(point, data["status"], data["rows"], data["reason"], data["seconds"])


def read_scheme(text: str, method: str) -> tuple[str, float | None]:
    """A scheme in its one spelling, and its damping number: "sp/heuristic" -> "sp/heuristic:0.001", 0.001."""
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
    """For people: "sp/heuristic:0.001" -> "SP, heuristic"."""
    name, slash, rule = scheme.partition("/")
    shown = {"sp": "SP", "mup": "muP", "ntk": "NTK"}.get(name, name)
    return shown + (f", {rule.partition(':')[0]}" if slash else "")


def lowest_is_best(metric: str) -> bool:
    """Losses want to be low, all else (accuracies, correlations) high."""
    return metric.endswith("loss")
