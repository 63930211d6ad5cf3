"""A reading: one quantity, layer by layer, whose exponent in the width tells whether all is well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mukron.diagnose.record import FROZEN, UNUSED, Record, Row
from mukron.exponents import Exponent, fit_exponent
from mukron.table import Table

TOLERANCE = 0.25  # half-way to 1/2, the nearest exponent that a wrong scheme or a wrong damping gives
UNCLEAR = "unclear"
STILL = "stands still"
NO_PART = "no part"  # its gradient is nothing but rounding: a bias before a batch norm
ROUNDING = 1e-5  # of the largest update in the same run
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
    largest = _largest(record, reading) if reading is UPDATE else {}
    for layer in record.layers(reading.quantity):
        role = record.roles.get(layer, record.roles.get(layer.rpartition(".")[0], ""))
        predicted = record.predicted.get(f"{reading.quantity}/{layer}")
        rows = record.select(reading.quantity, layer)
        measured, word = _word(reading, rows, tolerance)
        if layer in record.idle and (word == STILL or record.idle[layer] == UNUSED):
            word = record.idle[layer]
        elif rows and all(0 < row.value < ROUNDING * largest.get((row.width, row.seed), 0) for row in rows):
            measured, word = None, NO_PART
        ok = word in (reading.fine, NO_PART, FROZEN, UNUSED)
        verdicts.append(Verdict(reading.title, layer, role, measured, predicted, word, ok))
    return verdicts


def _largest(record: Record, reading: Reading) -> dict[tuple[float, int], float]:
    """Of each run, over all layers."""
    found: dict[tuple[float, int], float] = {}
    for row in record.rows:
        if (row.quantity, row.step) == (reading.quantity, record.steps):
            found[row.width, row.seed] = max(row.value, found.get((row.width, row.seed), 0.0))
    return found


def _word(reading: Reading, rows: Sequence[Row], tolerance: float) -> tuple[Exponent | None, str]:
    if not rows:
        return None, UNCLEAR
    if any(not math.isfinite(row.value) for row in rows):
        return None, reading.high
    moved = [row for row in rows if row.value > 0]
    if len(moved) < len(rows):  # at some widths or at all
        return None, STILL
    if len({row.width for row in moved}) < 2:
        return None, UNCLEAR
    exponent = fit_exponent([row.width for row in moved], [row.value for row in moved])
    if abs(exponent.slope) <= tolerance and -2 * tolerance < exponent.low <= exponent.high < 2 * tolerance:
        return exponent, reading.fine  # and the nearest wrong exponent is not in the interval
    if exponent.low > tolerance:
        return exponent, reading.high
    if exponent.high < -tolerance:
        return exponent, reading.low
    return exponent, UNCLEAR


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
