"""Verdicts on each layer, from the exponent with which a quantity grows with the width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mukron.diagnose.record import FED, FROZEN, SOURCE, UNUSED, Measurement, Record
from mukron.exponents import Exponent, fit_exponent
from mukron.table import Table
from mukron.theory import Role, get_method

EXPONENT_TOLERANCE = 0.25  # half of 1/2, the smallest exponent that a wrong scheme or a wrong damping gives
UNCLEAR = "unclear"
STILL = "stands still"
ROUNDED = "rounded away"  # steps are too small for the dtype of the parameter: --set dtype=float64 shows them
EARLY = "not judged"  # the first steps do not follow the law yet: see ``_is_early``
NO_PART = "no part"  # its gradient is only rounding errors, as that of a bias before a batch norm
EVEN = 0.1  # the smallest entry of a parameter over their root mean square, above which none of them is small
ROUNDING_ERROR = 1e-5  # relative to the largest update in the same run
LONG_TABLE = 24  # the number of rows above which rows without a failure are summed up


@dataclass(frozen=True)
class Reading:
    """A quantity of the record, with the words for an exponent below, near and above zero."""

    quantity: str
    title: str
    caption: str
    low: str
    fine: str
    high: str


FEATURES = Reading("features", "features", "change of features", "vanishes", "learns", "explodes")
UPDATE = Reading("update", "own update", "own update, dW h", "vanishes", "learns", "explodes")
ATTENTION = Reading("attention", "attention", "change of attention logits", "vanishes", "learns", "explodes")
DESCENT = Reading("descent", "descent", "change of the output along the descent", "vanishes", "learns", "explodes")
LEARNING = (FEATURES, ATTENTION, UPDATE, DESCENT)  # what a check judges
LOGITS = Reading("logits", "logits", "initial attention logits", "falls", "divided by d", "not divided by d")
NOUNS = {UPDATE.title: "parameters", ATTENTION.title: "modules", LOGITS.title: "modules"}  # else layers
DAMPING = Reading("ratio", "damping", "damping / largest eigenvalue", "fades", "valid", "drowns the factor")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one layer, parameter or curvature factor: its measured and predicted exponent, and a word.

    Attributes:
        reading: The quantity that was measured, as tables call it.
        layer: The layer, parameter or curvature factor.
        role: The role of the layer's weight; empty if it is not known.
        measured: The fitted exponent; None if none can be fitted.
        predicted: The exponent that theory predicts; None if there is none.
        word: The verdict, such as ``"learns"``, ``"vanishes"`` or ``"explodes"``.
        ok: Whether the layer passes.

    Example:
        >>> from mukron.diagnose import Verdict
        >>> Verdict("features", "fc1", "input", None, 0.0, "unclear", ok=False).cells()
        ('features', 'fc1', 'input', '', '0', 'unclear')
    """

    reading: str
    layer: str
    role: str
    measured: Exponent | None
    predicted: float | None
    word: str
    ok: bool

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table that shows this verdict."""
        predicted = "" if self.predicted is None else f"{self.predicted:+g}" if self.predicted else "0"
        measured = "" if self.measured is None else str(self.measured)
        return self.reading, self.layer, self.role, measured, predicted, self.word


def judge(record: Record, reading: Reading, tolerance: float = EXPONENT_TOLERANCE) -> list[Verdict]:
    """Judge every layer by what was measured after the last step."""
    verdicts = []
    may_fall = bool(record.layers(DESCENT.quantity)) and reading is FEATURES  # of an output: see ``Descent``
    largest = _largest_by_run(record, reading) if reading is UPDATE else {}
    for layer in record.layers(reading.quantity):
        role = record.roles.get(layer, record.roles.get(layer.rpartition(".")[0], ""))
        predicted = record.predicted.get(f"{reading.quantity}/{layer}")
        rows = record.select(reading.quantity, layer)
        measured, word = _judge_layer(reading, rows, tolerance, may_fall and role == Role.OUTPUT.value)
        if layer in record.idle and (word == STILL or record.idle[layer] == UNUSED):
            word = record.idle[layer]
        elif reading is UPDATE and word == STILL and _rounds(record, layer):
            word = ROUNDED
        elif reading is UPDATE and (_is_rounding(rows, largest) or _has_no_gradient(record, layer)):
            measured, word = None, NO_PART
        elif word != reading.fine and _is_early(record, reading, layer, tolerance, word == reading.high):
            word = EARLY
        ok = word in (reading.fine, NO_PART, FROZEN, UNUSED, EARLY, ROUNDED)
        verdicts.append(Verdict(reading.title, layer, role, measured, predicted, word, ok))
    return verdicts


def judge_logits(record: Record, tolerance: float = EXPONENT_TOLERANCE) -> list[Verdict]:
    """Judge the initial size of attention logits where the size d of a head grows.

    Queries and keys are independent at first, so a sum of d products has the size d^1/2, and d^-1/2 if divided by d.
    """
    verdicts = []
    for layer in record.layers(LOGITS.quantity):
        rows = record.select(LOGITS.quantity, layer)
        if not head_grows(record, layer) or not all(0 < row.value < math.inf for row in rows):
            continue
        exponent = fit_exponent([row.width for row in rows], [row.value for row in rows])
        word = LOGITS.fine if exponent.slope <= -tolerance else LOGITS.high if exponent.low > -tolerance else UNCLEAR
        verdicts.append(Verdict(LOGITS.title, layer, "", exponent, -0.5, word, word == LOGITS.fine))
    return verdicts


def head_grows(record: Record, layer: str) -> bool:
    """Return whether the heads of a module are larger at the largest width than at the smallest."""
    sizes = {row.width: row.value for row in record.select("head_dim", layer)}
    return sizes.get(record.widths[-1], 0.0) > sizes.get(record.widths[0], math.inf)


def _is_early(record: Record, reading: Reading, layer: str, tolerance: float, grows: bool) -> bool:
    """Return whether a layer makes attention logits whose first steps follow no law with this method.

    Where the size of heads grows, the derivative of the loss by a logit is a sum of d products of a value and of the
    derivative by what is made of it. These are independent at first, so the sum is too small by the root of d until
    training has aligned them. That shows in steps whose size depends on that of the gradient.
    """
    method = get_method(record.method) if record.method else None
    if method is not None and method.scale_free:
        return False
    if grows and (method is None or not method.e_B):
        return False  # too small a derivative lets steps fall; those that divide by its square may grow
    early = [verdict.layer for verdict in judge_logits(record, tolerance) if verdict.ok]
    if reading is ATTENTION:
        return layer in early
    kinds = (SOURCE, FED) if reading is FEATURES else (SOURCE,)  # what attention goes into changes with it
    early_layers = {found for name in early for kind in kinds for found in record.layers(f"{kind}{name}")}
    return bool(early_layers & {layer, layer.rpartition(".")[0] if reading is UPDATE else layer})


def _is_rounding(rows: Sequence[Measurement], largest: Mapping[tuple[float, int], float]) -> bool:
    """Return whether updates are that small beside the largest one in the same run."""
    return any(row.value for row in rows) and all(
        row.value < ROUNDING_ERROR * largest.get((row.width, row.seed), 0) for row in rows
    )


def _rounds(record: Record, parameter: str) -> bool:
    """Return whether a parameter may stand still since its steps are too small for its dtype.

    It has a gradient in every run, and no small entries, which would show even the smallest step: a norm's gain.
    """
    gradients, evenness = record.select("gradient", parameter), record.select("evenness", parameter)
    moving = bool(gradients) and all(row.value > 0 for row in gradients)
    return moving and bool(evenness) and all(row.value > EVEN for row in evenness)


def _has_no_gradient(record: Record, parameter: str) -> bool:
    """Return whether a parameter's gradient is rounding beside those of its module's other parameters.

    Adam makes full steps of it: the bias of an attention's keys, which its softmax does not depend on.
    """
    owner = parameter.rpartition(".")[0]
    siblings: dict[tuple[float, int], float] = {}
    for row in record.rows:
        if (row.quantity, row.step) == ("gradient", record.steps) and row.layer.rpartition(".")[0] == owner:
            siblings[row.width, row.seed] = max(row.value, siblings.get((row.width, row.seed), 0.0))
    rows = record.select("gradient", parameter)
    return bool(rows) and all(row.value < ROUNDING_ERROR * siblings[row.width, row.seed] for row in rows)


def _largest_by_run(record: Record, reading: Reading) -> dict[tuple[float, int], float]:
    """Return the largest value over all layers, by the run's width and seed."""
    largest: dict[tuple[float, int], float] = {}
    for row in record.rows:
        if (row.quantity, row.step) == (reading.quantity, record.steps):
            largest[row.width, row.seed] = max(row.value, largest.get((row.width, row.seed), 0.0))
    return largest


def _judge_layer(
    reading: Reading, rows: Sequence[Measurement], tolerance: float, may_fall: bool
) -> tuple[Exponent | None, str]:
    if not rows:
        return None, UNCLEAR
    if any(not math.isfinite(row.value) for row in rows):
        return None, reading.high
    moved = [row for row in rows if row.value > 0]
    if len(moved) < len(rows):  # at some widths, or at all of them
        return None, STILL
    if len({row.width for row in moved}) < 2:
        return None, UNCLEAR
    exponent = fit_exponent([row.width for row in moved], [row.value for row in moved])
    lowest = -math.inf if may_fall else -tolerance
    if lowest <= exponent.slope <= tolerance and 2 * lowest < exponent.low <= exponent.high < 2 * tolerance:
        return exponent, reading.fine  # the interval excludes the nearest wrong exponent
    if exponent.low > tolerance:
        return exponent, reading.high
    if exponent.high < lowest:
        return exponent, reading.low
    return exponent, UNCLEAR


def table_of(verdicts: Sequence[Verdict], title: str, notes: Sequence[str] = (), whole: bool = False) -> Table:
    """Tabulate verdicts; a long table sums up those without a failure by role, unless the whole is asked for."""
    columns = ("", "layer", "role", "exponent [95%]", "theory", "verdict")
    if whole or len(verdicts) <= LONG_TABLE:
        return Table(title, columns, tuple(verdict.cells() for verdict in verdicts), tuple(notes))
    rows = [verdict.cells() for verdict in verdicts if not verdict.ok]
    passed: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.ok:
            passed.setdefault((verdict.reading, verdict.role, verdict.word), []).append(verdict)
    for (reading, role, word), group in passed.items():
        slopes = [verdict.measured.slope for verdict in group if verdict.measured is not None]
        predicted = {verdict.cells()[4] for verdict in group}
        summary = f"{min(slopes):+.2f} to {max(slopes):+.2f}" if slopes else ""
        summary = str(group[0].measured) if len(group) == 1 and slopes else summary
        what = group[0].layer if len(group) == 1 else f"{len(group)} {NOUNS.get(reading, 'layers')}"
        rows.append((reading, what, role, summary, " ".join(sorted(predicted)), word))
    return Table(title, columns, tuple(rows), tuple(notes))
