"""Was it transferred?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mukron.study.curves import AXES, Measure
from mukron.study.errors import StudyError
from mukron.study.judgement import CANNOT_TELL, MOVES, TRANSFERS, Judgement, Regret, Wider, judge, setting_text
from mukron.study.optimum import Interval, Optimum
from mukron.study.points import PRUNED, Result, label
from mukron.table import Table

__all__ = [
    "CANNOT_TELL",
    "MOVES",
    "TRANSFERS",
    "Certificate",
    "Interval",
    "Judgement",
    "Optimum",
    "Regret",
    "Wider",
    "certify",
]


@dataclass(frozen=True)
class Certificate:
    """For every scheme, whether the best settings stay where they are when the width grows."""

    metric: str
    judgements: tuple[Judgement, ...]

    @property
    def exit_code(self) -> int:
        """0: all transfer, 1: one does not, 4: one cannot be told. SP is there to compare with, unless it is alone."""
        judged = [each for each in self.judgements if not each.scheme.startswith("sp")] or self.judgements
        verdicts = {each.verdict for each in judged}
        return 1 if MOVES in verdicts else 0 if verdicts == {TRANSFERS} else 4

    def table(self) -> Table:
        """A row for each scheme (and axis), the reasons below."""
        widths = [optimum.width for each in self.judgements for optimum in each.optima]
        narrow, wide = min(widths, default=math.nan), max(widths, default=math.nan)
        columns = ("scheme", f"best at {narrow:g}", f"at {wide:g}", "drift [95%]", f"regret at {wide:g}")
        rows = [
            (
                self._name(each),
                _best(each, narrow),
                _best(each, wide),
                "-" if each.drift is None else str(each.drift),
                _regret(each, wide),
                " / ".join(one.answer for one in each.wider) or "-",
                each.verdict,
            )
            for each in self.judgements
        ]
        notes = [
            "Drift: change of log2 of the best setting per doubling of the width. Regret: in units of the seed noise. "
            "Wider is better: early / late."
        ]
        notes += [f"{self._name(each)}: {each.verdict}. {_sentences(each)}" for each in self.judgements]
        axes = dict.fromkeys(AXES[each.axis] for each in self.judgements)
        title = f"Does the best {' and '.join(axes)} transfer? ({self.metric})"
        return Table(title, (*columns, "wider is better", "verdict"), tuple(rows), tuple(notes))

    def _name(self, judgement: Judgement) -> str:
        """The scheme's label, all of it where two share one, and the axis where there are two."""
        alike = {each.scheme for each in self.judgements if label(each.scheme) == label(judgement.scheme)}
        name = label(judgement.scheme) if len(alike) == 1 else judgement.scheme
        return name if len({each.axis for each in self.judgements}) == 1 else f"{name}: {AXES[judgement.axis]}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinite numbers: those are the texts "inf" and "-inf"."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Certificate:
        return cls(data["metric"], tuple(_judgement(each) for each in data["judgements"]))


def certify(results: Sequence[Result], over: Sequence[str] = ("lr",), metric: str = "train_loss") -> Certificate:
    """Judge every scheme on every axis that was tuned: see ``Judgement``."""
    unknown = [axis for axis in over if axis not in AXES]
    if unknown or not over:
        raise StudyError(f"over={', '.join(unknown) or 'nothing'}: expected lr, damping or both")
    if all(result.status == PRUNED for result in results):
        raise StudyError("no run has ended, so there is nothing to certify; run the study first")
    measure = Measure.of(results, metric)
    schemes: dict[str, list[Result]] = {}
    for result in results:
        schemes.setdefault(result.point.scheme, []).append(result)
    judgements = [
        judge(scheme, sorted(found, key=_order), axis, measure) for scheme, found in schemes.items() for axis in over
    ]
    return Certificate(metric, tuple(judgements))


def _order(result: Result) -> tuple[float, ...]:
    """Runs end in any order; the same ones give the same certificate."""
    point = result.point
    return point.width, point.lr, point.damping or 0.0, point.seed


def _best(judgement: Judgement, width: float) -> str:
    """The best that was run; with <= or >= where better ones may lie beyond."""
    for each in judgement.optima:
        if each.width == width:
            beyond = "<= " if math.isinf(each.best.low) else ">= " if math.isinf(each.best.high) else ""
            return beyond + setting_text(each.measured)
    return "-"


def _regret(judgement: Judgement, width: float) -> str:
    for each in judgement.regret:
        if each.width == width:
            if math.isinf(each.loss):
                return "diverges"
            return f"{each.loss:.2g} (one seed)" if each.units is None else f"{each.units:.1f}"
    return "-"


def _sentences(judgement: Judgement) -> str:
    return " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in judgement.reasons)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _judgement(data: Mapping[str, Any]) -> Judgement:
    content = {
        "optima": tuple(
            Optimum(**{**each, "best": _interval(each["best"]), "notes": tuple(each["notes"])})
            for each in data["optima"]
        ),
        "drift": None if data["drift"] is None else _interval(data["drift"]),
        "regret": tuple(
            Regret(**{**each, "loss": float(each["loss"]), "units": _number(each["units"])}) for each in data["regret"]
        ),
        "wider": tuple(
            Wider(**{**each, "values": tuple(map(_point, each["values"])), "worse_at": tuple(each["worse_at"])})
            for each in data["wider"]
        ),
        "reasons": tuple(data["reasons"]),
    }
    return Judgement(**{**data, **content})


def _interval(data: Mapping[str, Any]) -> Interval:
    return Interval(*(float(data[name]) for name in ("value", "low", "high")))


def _point(data: Sequence[Any]) -> tuple[float, float, float | None]:
    width, mean, error = data
    return width, float(mean), error


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
