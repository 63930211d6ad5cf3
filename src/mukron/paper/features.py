"""Checks of claims on coordinate checks: how the change of features, and damping, scale with the width.

A layer counts as scaling with the width if the whole interval of its exponent lies outside the tolerance, and as not
doing so if its exponent lies within the tolerance and its interval excludes the nearest wrong exponent. Between the
two it is not determined.
"""

from __future__ import annotations

from collections.abc import Mapping

from mukron.diagnose.check import Check
from mukron.diagnose.readings import DAMPING, FEATURES, Verdict
from mukron.exponents import Exponent, fit_exponent
from mukron.paper import earlier
from mukron.paper.claims import ClaimCheck, revised
from mukron.paper.effects import worst_exponent
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Finding
from mukron.theory import Role

EVERY_LAYER_RULE = (
    "Earlier, the exponent of one layer outside the tolerance was enough. Now every layer is judged, by the interval "
    "of its exponent; the claim holds in part if only some layers depend on the width."
)
INTERVAL_RULE = "Earlier, a layer decayed if its exponent was below the tolerance. Now the whole interval has to be."


def learns(part: str) -> ClaimCheck:
    """Checks that the change of every layer's features does not depend on the width.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        verdicts = [judged for judged in coordinate_check.features if judged.reading == FEATURES.title]
        if not verdicts:
            return Finding(UNTOLD, f"{part}: nothing was read")
        slopes = ", ".join(
            f"{judged.layer} {judged.measured.slope:+.2f}" for judged in verdicts if judged.measured is not None
        )
        off = [judged for judged in verdicts if judged.word in (FEATURES.low, FEATURES.high)]
        if coordinate_check.record.broken or off:
            verdict = IN_PART if len(off) < len(verdicts) else FAILS
        else:
            verdict = HOLDS if all(judged.ok for judged in verdicts) else UNTOLD
        effect = worst_exponent({layer: (each, 0.0) for layer, each in _feature_exponents(coordinate_check).items()})
        return Finding(verdict, f"{part}: exponents of the features' change in the width: {slopes}", effect=effect)

    return check


def decays(part: str, *layers: str) -> ClaimCheck:
    """Checks that the change of features decays as the width grows: the whole interval of the exponent is negative.

    Args:
        part: The coordinate check's name in the evidence.
        layers: The layers it is claimed of; some layer if none is named.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        slopes = {
            layer: exponent
            for layer, exponent in _feature_exponents(coordinate_check).items()
            if layer in (layers or (layer,))
        }
        tolerance = coordinate_check.tolerance
        low = [layer for layer, exponent in slopes.items() if exponent.high < -tolerance]
        not_low = [layer for layer, exponent in slopes.items() if exponent.low > -tolerance]
        least = len(layers) or 1
        if len(low) >= least:
            verdict = HOLDS
        elif not slopes or len(slopes) - len(not_low) >= least:
            verdict = UNTOLD
        else:
            verdict = IN_PART if low else FAILS
        effect = worst_exponent({layer: (exponent, 0.0) for layer, exponent in slopes.items()})
        measured = f"{part}: exponents of the features' change in the width: {_shown(slopes)}"
        return Finding(verdict, measured, effect=effect)

    def before(evidence: Evidence) -> Finding:
        return earlier.decays(evidence.check(part), layers)

    return revised(check, before, INTERVAL_RULE)


def depends_on_width(part: str) -> ClaimCheck:
    """Checks that the change of every layer's features depends on the width, rising or falling.

    It holds in part if that of some layer does, fails if that of no layer does, and is else not determined.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        slopes, tolerance = _feature_exponents(coordinate_check), coordinate_check.tolerance
        off = [layer for layer, exponent in slopes.items() if _is_off(exponent, 0.0, tolerance)]
        level = [layer for layer, exponent in slopes.items() if _is_near(exponent, 0.0, tolerance)]
        if slopes and len(off) == len(slopes):
            verdict = HOLDS
        elif off or coordinate_check.record.broken:
            verdict = IN_PART
        else:
            verdict = FAILS if slopes and len(level) == len(slopes) else UNTOLD
        which = f"; of {len(slopes)} layers {len(off)} depend on it and {len(level)} do not" if slopes else ""
        effect = worst_exponent({layer: (exponent, 0.0) for layer, exponent in slopes.items()})
        measured = f"{part}: exponents of the features' change in the width: {_shown(slopes)}{which}"
        return Finding(verdict, measured, effect=effect)

    def before(evidence: Evidence) -> Finding:
        return earlier.depends_on_width(evidence.check(part))

    return revised(check, before, EVERY_LAYER_RULE)


def _feature_exponents(check: Check) -> dict[str, Exponent]:
    judged = (verdict for verdict in check.features if verdict.reading == FEATURES.title)
    return {verdict.layer: verdict.measured for verdict in judged if verdict.measured is not None}


def _is_off(exponent: Exponent, predicted: float, tolerance: float) -> bool:
    """Whether an exponent is another one than predicted, beyond doubt."""
    return exponent.low > predicted + tolerance or exponent.high < predicted - tolerance


def _is_near(exponent: Exponent, predicted: float, tolerance: float) -> bool:
    """Whether an exponent is the predicted one, and the nearest wrong one is excluded."""
    near = abs(exponent.slope - predicted) <= tolerance
    return near and predicted - 2 * tolerance < exponent.low <= exponent.high < predicted + 2 * tolerance


def _shown(exponents: Mapping[str, Exponent]) -> str:
    return ", ".join(f"{layer} {exponent}" for layer, exponent in exponents.items()) or "none"


# Damping.


def damping_exponents(part: str) -> ClaimCheck:
    """Checks that the damping of every curvature factor scales as the theory says: like its largest eigenvalue.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        record, tolerance = coordinate_check.record, coordinate_check.tolerance
        exponents, compared, right, wrong = [], {}, 0, 0
        for factor in record.layers("damping"):
            predicted = record.predicted.get(f"largest/{factor}")
            rows = [row for row in record.select("damping", factor) if row.value > 0]
            if predicted is None or len({row.width for row in rows}) < 2:
                continue
            exponent = fit_exponent([row.width for row in rows], [row.value for row in rows])
            exponents.append(f"{factor} {exponent} (theory {predicted:+g})")
            compared[factor] = exponent, predicted
            right += _is_near(exponent, predicted, tolerance)
            wrong += _is_off(exponent, predicted, tolerance)
        measured = f"{part}: exponents of the damping in the width: {', '.join(exponents) or 'none'}"
        effect = worst_exponent(compared)
        if exponents and right == len(exponents):
            return Finding(HOLDS, measured, effect=effect)
        return Finding((IN_PART if right else FAILS) if wrong else UNTOLD, measured, effect=effect)

    return check


def damping_valid(part: str) -> ClaimCheck:
    """Checks that no factor's damping outgrows or loses touch with its largest eigenvalue as the width grows.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        verdicts = evidence.check(part).damping
        valid = [verdict for verdict in verdicts if verdict.ok]
        off = [verdict for verdict in verdicts if verdict.word in (DAMPING.low, DAMPING.high)]
        fitted = {verdict.layer: (verdict.measured, 0.0) for verdict in verdicts if verdict.measured is not None}
        verdict = (IN_PART if valid else FAILS) if off else UNTOLD
        if verdicts and len(valid) == len(verdicts):
            verdict = HOLDS
        return Finding(verdict, _ratios(part, verdicts), effect=worst_exponent(fitted))

    return check


def damping_valid_inside_only(part: str) -> ClaimCheck:
    """Checks that damping is valid in every hidden layer, and in no input or output layer.

    A layer's damping is valid if that of all its factors is. The claim holds if all layers are as claimed, in part if
    only some are, and fails if none is.

    Args:
        part: The coordinate check's name in the evidence.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        coordinate_check = evidence.check(part)
        layers: dict[str, list[Verdict]] = {}
        for verdict in coordinate_check.damping:
            layers.setdefault(verdict.layer.rpartition(".")[0], []).append(verdict)
        right = wrong = 0
        for layer, verdicts in layers.items():
            valid = all(verdict.ok for verdict in verdicts)
            invalid = any(verdict.word in (DAMPING.low, DAMPING.high) for verdict in verdicts)
            hidden = coordinate_check.record.roles.get(layer) == Role.HIDDEN.value
            right += valid if hidden else invalid
            wrong += invalid if hidden else valid
        measured = _ratios(part, coordinate_check.damping)
        if layers and right == len(layers):
            return Finding(HOLDS, measured)
        return Finding((IN_PART if right else FAILS) if wrong else UNTOLD, measured)

    return check


def _ratios(part: str, verdicts: list[Verdict]) -> str:
    texts = [f"{verdict.layer} {verdict.measured or 'not finite'} ({verdict.word})" for verdict in verdicts]
    return f"{part}: exponents of damping over the largest eigenvalue in the width: {', '.join(texts) or 'none'}"


# What studies record.


def column_exponent(part: str, column: str, predicted: float, tolerance: float = 0.25) -> ClaimCheck:
    """Checks that a recorded quantity scales as a power of the width, at the first epoch and at the last.

    Args:
        part: The study's name in the evidence.
        column: The quantity's name in the epochs.
        predicted: The exponent of the width.
        tolerance: The largest difference of the fitted exponent from it.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        fitted = {}
        for when, pick in (("first", 0), ("last", -1)):
            points = []
            for result in record.results:
                values = [row[column] for row in result.rows if row.get(column)]
                if values and result.status == "finished":
                    points.append((result.point.width, values[pick]))
            if len({width for width, _ in points}) > 1:
                fitted[when] = fit_exponent([width for width, _ in points], [value for _, value in points])
        slopes = {when: exponent.slope for when, exponent in fitted.items()}
        if not slopes:
            return Finding(UNTOLD, f"{column}: not read at two widths")
        right = [abs(slope - predicted) <= tolerance for slope in slopes.values()]
        exponents = ", ".join(f"{slope:+.2f} at the {when} epoch" for when, slope in slopes.items())
        verdict = HOLDS if all(right) else IN_PART if any(right) else FAILS
        effect = worst_exponent({when: (exponent, predicted) for when, exponent in fitted.items()})
        return Finding(verdict, f"{column}: exponent {exponents} (theory {predicted:+g})", effect=effect)

    return check
