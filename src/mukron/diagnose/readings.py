"""A reading: one quantity, layer by layer, whose exponent in the width tells whether all is well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mukron.diagnose.exponents import Exponent, fit_exponent
from mukron.diagnose.record import Record
from mukron.table import Table

TOLERANCE = 0.25  # half-way to 1/2, the nearest exponent that a wrong scheme or a wrong damping gives
UNCLEAR = "unclear"
STILL = "stands still"
LONG = 24  # rows above which those that are fine are summed up


@dataclass(frozen=True)
class Reading:
    """A quantity of the record, and the words for an exponent below, near and above zero."""

    quantity: str
    title: str
    caption: str
    low: str
    fine: str
    high: str


FEATURES = Reading("features", "features", "change of features", "vanishes", "learns", "explodes")
UPDATE = Reading("update", "own update", "own update, dW h", "vanishes", "learns", "explodes")
DAMPING = Reading("ratio", "damping", "damping / largest eigenvalue", "fades", "valid", "drowns the factor")


@dataclass(frozen=True)
class Verdict:
    """On one layer (or parameter, or factor): the measured exponent, theory's, and a word."""

    reading: str
    layer: str
    role: str
    measured: Exponent | None
    predicted: float | None
    word: str
    ok: bool

    def cells(self) -> tuple[str, ...]:
        predicted = "" if self.predicted is None else f"{self.predicted:+g}" if self.predicted else "0"
        measured = "" if self.measured is None else str(self.measured)
        return self.reading, self.layer, self.role, measured, predicted, self.word


def judge(record: Record, reading: Reading, tolerance: float = TOLERANCE) -> list[Verdict]:
    """A verdict on every layer, from what was measured after the last step."""
    verdicts = []
    for layer in record.layers(reading.quantity):
        role = record.roles.get(layer, record.roles.get(layer.rpartition(".")[0], ""))
        predicted = record.predicted.get(f"{reading.quantity}/{layer}")
        rows = record.select(reading.quantity, layer)
        measured, word = _word(reading, [row.width for row in rows], [row.value for row in rows], tolerance)
        if any(not math.isfinite(row.value) for row in rows):
            word = reading.high
        verdicts.append(Verdict(reading.title, layer, role, measured, predicted, word, word == reading.fine))
    return verdicts


def _word(
    reading: Reading, widths: Sequence[float], values: Sequence[float], tolerance: float
) -> tuple[Exponent | None, str]:
    pairs = [(width, value) for width, value in zip(widths, values, strict=True) if 0 < value < math.inf]
    if not pairs:
        return None, STILL
    if len({width for width, _ in pairs}) < 2:
        return None, UNCLEAR
    exponent = fit_exponent([width for width, _ in pairs], [value for _, value in pairs])
    if abs(exponent.slope) <= tolerance:
        sure = exponent.high - exponent.low <= 4 * tolerance
        return exponent, reading.fine if sure else UNCLEAR
    if exponent.low <= 0 <= exponent.high:
        return exponent, UNCLEAR
    return exponent, reading.high if exponent.slope > 0 else reading.low


def table_of(verdicts: Sequence[Verdict], title: str, notes: Sequence[str] = (), whole: bool = False) -> Table:
    """Row by row; in a long one those that are fine are summed up by role, unless the ``whole`` is wanted."""
    columns = ("", "layer", "role", "exponent [95%]", "theory", "verdict")
    if whole or len(verdicts) <= LONG:
        return Table(title, columns, tuple(each.cells() for each in verdicts), tuple(notes))
    rows = [each.cells() for each in verdicts if not each.ok]
    fine: dict[tuple[str, str, str], list[Verdict]] = {}
    for each in verdicts:
        if each.ok:
            fine.setdefault((each.reading, each.role, each.word), []).append(each)
    for (reading, role, word), alike in fine.items():
        slopes = [each.measured.slope for each in alike if each.measured is not None]
        predicted = {each.cells()[4] for each in alike}
        summary = f"{min(slopes):+.2f} to {max(slopes):+.2f}" if slopes else ""
        rows.append((reading, f"{len(alike)} others", role, summary, " ".join(sorted(predicted)), word))
    return Table(title, columns, tuple(rows), tuple(notes))
