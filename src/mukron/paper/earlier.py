"""Rules of verdicts that were replaced. They decide nothing; the page shows what they gave where that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mukron.diagnose.check import Check
from mukron.diagnose.readings import FEATURES
from mukron.paper.claims import BestOf, ClaimCheck, differ
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Finding
from mukron.study.certificate import MOVES, TRANSFERS

if TYPE_CHECKING:
    from mukron.paper.damped import Cells
    from mukron.paper.optima import Optima


def stays(optima: Optima) -> str:
    """Whether the best setting is the same on the grid, or one setting is as good at every width within noise."""
    if optima.judgement.verdict == TRANSFERS or (optima.same and not optima.open_ended):
        return HOLDS
    if optima.open_ended and not optima.diverged:
        return UNTOLD
    if optima.judgement.verdict == MOVES:
        return FAILS if optima.common is None else IN_PART
    return UNTOLD if optima.common is None else HOLDS


def moves(optima: Optima, direction: int) -> str:
    """Whether the best setting moves: not if it is the same on the grid, however coarse that is."""
    if optima.judgement.verdict == TRANSFERS:
        return FAILS
    if optima.same and not optima.open_ended:
        return UNTOLD if optima.judgement.verdict == MOVES else FAILS
    if optima.judgement.verdict == MOVES and optima.common is None:
        log_ratio = math.log2(optima.bests[-1][1] / optima.bests[0][1])
        return FAILS if direction * log_ratio < 0 and not optima.diverged else HOLDS
    return UNTOLD


def decays(check: Check, layers: Sequence[str]) -> Finding:
    """Whether the exponents of these layers, or of some layer, are below the tolerance, whatever their intervals."""
    slopes = {layer: slope for layer, slope in _slopes(check).items() if not layers or layer in layers}
    low = [layer for layer, slope in slopes.items() if slope < -check.tolerance]
    verdict = HOLDS if len(low) >= (len(layers) or 1) else IN_PART if low else FAILS if slopes else UNTOLD
    return Finding(verdict, "")


def depends_on_width(check: Check) -> Finding:
    """Whether the exponent of some layer is outside the tolerance, whatever its interval."""
    slopes = _slopes(check)
    off = [slope for slope in slopes.values() if abs(slope) > check.tolerance]
    return Finding(HOLDS if off or check.record.broken else FAILS if slopes else UNTOLD, "")


def _slopes(check: Check) -> dict[str, float]:
    judged = (verdict for verdict in check.features if verdict.reading == FEATURES.title)
    return {verdict.layer: verdict.measured.slope for verdict in judged if verdict.measured is not None}


def close(a: BestOf, b: BestOf, within: float) -> ClaimCheck:
    """Whether two best values differ by at most an amount, whatever their noise."""

    def check(evidence: Evidence) -> Finding:
        first, second = a.value(evidence), b.value(evidence)
        if math.isnan(first.mean) or math.isnan(second.mean):
            return Finding(UNTOLD if math.isnan(first.mean) and math.isnan(second.mean) else FAILS, "")
        return Finding(HOLDS if abs(first.mean - second.mean) <= within else FAILS, "")

    return check


def highest_at_one(cells: Cells) -> Finding:
    """Whether no other scaling of the damping is better than d_A = -1 and d_B = 1 by more than noise."""
    finished = {place: cell.value for place, cell in cells.items() if not math.isnan(cell.value.mean)}
    if (1.0, 1.0) not in finished:
        return Finding(FAILS if finished else UNTOLD, "")
    highest = max(finished.values(), key=lambda value: value.mean)
    return Finding(FAILS if differ(highest, finished[1.0, 1.0]) == "above" else HOLDS, "")
