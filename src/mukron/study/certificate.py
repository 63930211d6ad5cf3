"""The certificate of a study: for every scheme, whether the best settings transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mukron.notebook import Shown
from mukron.study.curves import AXES, Measure
from mukron.study.errors import StudyError
from mukron.study.judgement import CANNOT_TELL, MOVES, TRANSFERS, Judgement, Regret, Wider, judge, setting_text
from mukron.study.optimum import Interval, Optimum
from mukron.study.points import PRUNED, Result, label
from mukron.table import Table
from mukron.typed import read_as

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


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    """For every scheme, whether the best settings stay the same when the width grows.

    Attributes:
        metric: What decides which setting is best.
        judgements: One per scheme and tuned axis: optima, drift, regret, verdict and its reasons.

    Example:
        >>> certificate = Certificate("train_loss", judgements=())
        >>> certificate.exit_code  # nothing can be determined from no results
        4

        A study's record has one::

            certificate = certify(record.results, over=("lr",), metric="train_loss")
            print(certificate.table())
    """

    metric: str
    judgements: tuple[Judgement, ...]

    @property
    def exit_code(self) -> int:
        """0 if all schemes transfer, 1 if one does not, 4 if one cannot be determined.

        SP is trained for comparison: it counts only if the study has no other scheme.
        """
        not_sp = [judgement for judgement in self.judgements if not judgement.scheme.startswith("sp")]
        verdicts = {judgement.verdict for judgement in not_sp or self.judgements}
        return 1 if MOVES in verdicts else 0 if verdicts == {TRANSFERS} else 4

    def table(self) -> Table:
        """Return a table with a row for each scheme (and axis) and the reasons below."""
        widths = [optimum.width for judgement in self.judgements for optimum in judgement.optima]
        narrow, wide = min(widths, default=math.nan), max(widths, default=math.nan)
        columns = ("scheme", f"best at {narrow:g}", f"at {wide:g}", "drift [95%]", f"regret at {wide:g}")
        rows = [
            (
                self._name(judgement),
                _best(judgement, narrow),
                _best(judgement, wide),
                "-" if judgement.drift is None else str(judgement.drift),
                _regret(judgement, wide),
                " / ".join(wider.answer for wider in judgement.wider) or "-",
                judgement.verdict,
            )
            for judgement in self.judgements
        ]
        notes = [
            "Drift: change of log2 of the best setting per doubling of the width. Regret: in units of the seed noise. "
            "Wider is better: early / late."
        ]
        notes += [
            f"{self._name(judgement)}: {judgement.verdict}. {_sentences(judgement)}" for judgement in self.judgements
        ]
        axes = dict.fromkeys(AXES[judgement.axis] for judgement in self.judgements)
        title = f"Does the best {' and '.join(axes)} transfer? ({self.metric})"
        return Table(title, (*columns, "wider is better", "verdict"), tuple(rows), tuple(notes))

    def _summary(self) -> list[str]:
        verdicts = [f"{self._name(judgement)}: {judgement.verdict}" for judgement in self.judgements]
        return [f"Do the best settings transfer? ({self.metric})", *(verdicts or ["nothing was judged"])]

    def _tables(self) -> list[Table]:
        return [self.table()] if self.judgements else []

    def _name(self, judgement: Judgement) -> str:
        """The scheme's label, or the whole scheme where two share a label; with the axis where there are two."""
        schemes = {other.scheme for other in self.judgements if label(other.scheme) == label(judgement.scheme)}
        name = label(judgement.scheme) if len(schemes) == 1 else judgement.scheme
        return name if len({other.axis for other in self.judgements}) == 1 else f"{name}: {AXES[judgement.axis]}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which has no infinite numbers: those are the texts "inf" and "-inf"."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Certificate:
        """Read what ``to_dict`` returned.

        Args:
            data: What ``to_dict`` returned.
        """
        certificate: Certificate = read_as(cls, data, "certificate")
        for judgement in certificate.judgements:
            if judgement.axis not in AXES:
                raise ValueError(f"certificate: {judgement.axis!r} is no axis; known: {', '.join(AXES)}")
        return certificate


def certify(results: Sequence[Result], over: Sequence[str] = ("lr",), metric: str = "train_loss") -> Certificate:
    """Judge, for every scheme, whether the best settings are the same at all widths.

    Args:
        results: All runs of a study.
        over: What was tuned: "lr", "damping" or both. The two are judged separately.
        metric: What decides which setting is best: a column of the rows.

    Returns:
        The certificate.

    Raises:
        StudyError: ``over`` is unknown, no run has ended, or no run has the metric.

    Example:
        >>> from mukron.study import Point
        >>> def result(width, lr, loss):
        ...     point = Point("mup/rescaled:1", width, lr, 1.0, seed=0)
        ...     return Result(point, "finished", [{"epoch": 1, "train_loss": loss}])
        >>> losses = {0.5: 0.3, 1.0: 0.2, 2.0: 0.3}
        >>> results = [result(width, lr, loss) for width in (64, 128, 256) for lr, loss in losses.items()]
        >>> certify(results).judgements[0].drift.value
        0.0
    """
    unknown = [axis for axis in over if axis not in AXES]
    if unknown or not over:
        raise StudyError(f"over={', '.join(unknown) or 'nothing'}: expected lr, damping or both")
    if all(result.status == PRUNED for result in results):
        raise StudyError("no run has ended, so there is nothing to certify; run the study first")
    measure = Measure.of(results, metric)
    by_scheme: dict[str, list[Result]] = {}
    for result in results:
        by_scheme.setdefault(result.point.scheme, []).append(result)
    judgements = [
        judge(scheme, sorted(of_scheme, key=_order), axis, measure)
        for scheme, of_scheme in by_scheme.items()
        for axis in over
    ]
    return Certificate(metric, tuple(judgements))


def _order(result: Result) -> tuple[float, ...]:
    """A fixed order: runs end in any order, and the same runs must give the same certificate."""
    point = result.point
    return point.width, point.lr, point.damping or 0.0, point.seed


def _best(judgement: Judgement, width: float) -> str:
    """The best setting that was run, with <= or >= where the optimum may lie beyond the tested range."""
    for optimum in judgement.optima:
        if optimum.width == width:
            beyond = "<= " if math.isinf(optimum.best.low) else ">= " if math.isinf(optimum.best.high) else ""
            return beyond + setting_text(optimum.measured)
    return "-"


def _regret(judgement: Judgement, width: float) -> str:
    for regret in judgement.regret:
        if regret.width == width:
            if math.isinf(regret.loss):
                return "diverges"
            return f"{regret.loss:.2g} (one seed)" if regret.units is None else f"{regret.units:.1f}"
    return "-"


def _sentences(judgement: Judgement) -> str:
    return " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in judgement.reasons)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
