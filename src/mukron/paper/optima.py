"""Checks of claims on where the best setting of every width lies: does it stay, and is it inside its grid?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mukron.paper import earlier
from mukron.paper.claims import BestOf, ClaimCheck, beats, differ, noise_of, power_text, revised, scheme_of, value_of
from mukron.paper.effects import PER_DOUBLING, effect_of
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Finding
from mukron.study.certificate import MOVES, TRANSFERS, Judgement
from mukron.study.judgement import RULED_OUT
from mukron.study.numbers import best, settings
from mukron.study.record import StudyRecord


def _judgement(record: StudyRecord, scheme: str, axis: str) -> Judgement | None:
    if record.certificate is None:
        return None
    return next(
        (
            judgement
            for judgement in record.certificate.judgements
            if (judgement.scheme, judgement.axis) == (scheme, axis)
        ),
        None,
    )


def _bests(record: StudyRecord, scheme: str, axis: str) -> list[tuple[float, float]]:
    """Returns pairs of a width and its best setting on the grid."""
    pairs = [(width, best(settings(record, scheme, width), record.metric)) for width in record.widths]
    return [(width, setting.at(axis)) for width, setting in pairs if setting is not None]


def _describe_bests(bests: Sequence[tuple[float, float]]) -> str:
    if len({value for _, value in bests}) == 1:
        return f"best at {power_text(bests[0][1])} at every width from {bests[0][0]:g} to {bests[-1][0]:g}"
    return "best at " + ", ".join(f"{power_text(value)} (width {width:g})" for width, value in bests)


def _common_setting(record: StudyRecord, scheme: str, axis: str) -> float | None:
    """Returns a setting that is as good as each width's best within the noise of the seeds; None with one seed."""
    alike_by_value: dict[float, list[bool]] = {}
    for width in record.widths:
        complete = [setting for setting in settings(record, scheme, width) if setting.whole]
        best_setting = best(complete, record.metric)
        for setting in complete:
            assert best_setting is not None
            alike = differ(value_of(record, best_setting), value_of(record, setting)) == "alike"
            alike_by_value.setdefault(setting.at(axis), []).append(alike)
    common = [setting for setting, alike in alike_by_value.items() if len(alike) == len(record.widths) and all(alike)]
    return common[0] if common and noise_of(record, record.metric) is not None else None


@dataclass(frozen=True)
class Optima:
    """The best settings of a scheme over the widths.

    Attributes:
        bests: Pairs of a width and its best setting on the grid.
        judgement: The judgement of the study's certificate.
        common: If the bests differ, a setting that is as good at every width, if there is one.
        diverged: Widths at which every run diverged.
        open_ended: Widths whose best may lie beyond the grid.
        resolution: The grid's step beside the best setting over the doublings of the width, in log2: a drift by more
            than this per doubling moves the best setting by more than a step.
    """

    bests: Sequence[tuple[float, float]]
    judgement: Judgement
    common: float | None
    diverged: Sequence[float]
    open_ended: Sequence[float]
    resolution: float

    @property
    def same(self) -> bool:
        """Whether the best setting is the same at every width."""
        return len({setting for _, setting in self.bests}) == 1 and not self.diverged

    @property
    def resolved(self) -> bool:
        """Whether the grid and the seeds would show a drift of ``RULED_OUT`` per doubling."""
        drift = self.judgement.drift
        bounded = drift is not None and math.isfinite(drift.low) and math.isfinite(drift.high)
        return bounded and self.resolution <= RULED_OUT

    @property
    def shown_to_stay(self) -> bool:
        """Whether it is certified that the best setting stays, or a grid that would show a drift shows none."""
        verdict = self.judgement.verdict
        on_the_grid = self.same and not self.open_ended and self.resolved and verdict != MOVES
        return verdict == TRANSFERS or on_the_grid

    def describe(self, part: str) -> str:
        """Returns where the best settings are, as findings show it.

        Args:
            part: The study's name.

        Returns:
            The text.
        """
        phrases = [f"{part}: {_describe_bests(self.bests)}"]
        if self.judgement.drift is not None:
            phrases.append(f"drift {self.judgement.drift} per doubling")
        if self.diverged:
            phrases.append(f"at {_width_list(self.diverged)} every run diverged")
        if self.open_ended:
            phrases.append(f"at {_width_list(self.open_ended)} the best may lie beyond the grid")
        phrases.append(f"certificate: {self.judgement.verdict}")
        if self.same and self.judgement.verdict != TRANSFERS:
            phrases.append(f"the grid resolves {self.resolution:.2g} per doubling (needed: {RULED_OUT:g})")
        if self.common is not None:
            phrases.append(f"{power_text(self.common)} is as good at every width, within the noise of the seeds")
        return "; ".join(phrases)


def _width_list(widths: Sequence[float]) -> str:
    return ", ".join(f"{width:g}" for width in widths)


def find_optima(record: StudyRecord, scheme: str, axis: str) -> Optima | None:
    """Finds the best settings of a scheme over the widths.

    Args:
        record: The study.
        scheme: The scheme as the study names it.
        axis: "lr" or "damping".

    Returns:
        The best settings, or None if too little was run.
    """
    judgement, bests = _judgement(record, scheme, axis), _bests(record, scheme, axis)
    if judgement is None or not bests:
        return None
    diverged = [width for width in record.widths if width not in dict(bests)]
    same = len({setting for _, setting in bests}) == 1
    common = None if same or diverged else _common_setting(record, scheme, axis)
    open_ended = [optimum.width for optimum in judgement.optima if optimum.open]
    return Optima(bests, judgement, common, diverged, open_ended, _resolution(record, scheme, axis, bests))


def _resolution(record: StudyRecord, scheme: str, axis: str, bests: Sequence[tuple[float, float]]) -> float:
    """Returns the largest step of the grid beside a best setting, over the doublings between the widths."""
    doublings = math.log2(bests[-1][0] / bests[0][0])
    steps = []
    for width, own in bests:
        places = sorted({math.log2(setting.at(axis)) for setting in settings(record, scheme, width)})
        place = places.index(math.log2(own))
        steps += [places[upper] - places[upper - 1] for upper in (place, place + 1) if 0 < upper < len(places)]
    return max(steps) / doublings if steps and doublings else math.inf


def _by_optima(part: str, scheme: str | None, axis: str, verdict: Callable[[Optima], str]) -> ClaimCheck:
    """Returns a check whose verdict follows from the best settings."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        optima = find_optima(record, scheme_of(record, scheme), axis)
        if optima is None:
            return Finding(UNTOLD, f"{part}: too little was run to tell")
        drift = optima.judgement.drift
        effect = None if drift is None else effect_of(drift.value, drift.low, drift.high, PER_DOUBLING)
        return Finding(verdict(optima), optima.describe(part), effect=effect)

    return check


STAYS_RULE = (
    "Earlier, the best setting stayed if it was the same on the grid at every width, or if one setting was as good at "
    "every width within noise. Now it is certified to stay, or is the same on a grid that resolves a quarter of a "
    "power of two per doubling; else it cannot be determined."
)
MOVES_RULE = (
    "Earlier, the claim failed if the best setting was the same on the grid at every width. Now it fails only if the "
    "setting is shown to stay, by the rule of those claims."
)


def stays(part: str, scheme: str | None = None, axis: str = "lr") -> ClaimCheck:
    """Checks that the best setting is the same at every width.

    It holds if the study's certificate says so, or if the best settings are the same on a grid that resolves a drift of
    a quarter of a power of two per doubling. It fails if the certificate says that they move, in part if one setting is
    as good at every width within noise. Else it cannot be determined.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.
        axis: "lr" or "damping".

    Returns:
        The check.
    """

    def verdict(optima: Optima) -> str:
        if optima.shown_to_stay:
            return HOLDS
        if optima.judgement.verdict != MOVES or optima.same or (optima.open_ended and not optima.diverged):
            return UNTOLD
        return FAILS if optima.common is None else IN_PART

    return revised(_by_optima(part, scheme, axis, verdict), _by_optima(part, scheme, axis, earlier.stays), STAYS_RULE)


def moves(part: str, scheme: str | None = None, axis: str = "lr", direction: int = 0) -> ClaimCheck:
    """Checks that the best setting moves with the width, by the study's certificate.

    Args:
        part: The study's name in the evidence.
        scheme: The scheme or its beginning; None for the first.
        axis: "lr" or "damping".
        direction: -1 if it is claimed to fall, 1 if to rise, 0 for either.

    Returns:
        The check.
    """

    def verdict(optima: Optima) -> str:
        if optima.shown_to_stay:
            return FAILS
        if optima.judgement.verdict == MOVES and optima.common is None and (not optima.same or optima.open_ended):
            log_ratio = math.log2(optima.bests[-1][1] / optima.bests[0][1])
            return FAILS if direction * log_ratio < 0 and not optima.diverged else HOLDS
        return UNTOLD

    def before(optima: Optima) -> str:
        return earlier.moves(optima, direction)

    return revised(_by_optima(part, scheme, axis, verdict), _by_optima(part, scheme, axis, before), MOVES_RULE)


# muP against SP, each tuned.

ASKED_STRICTLY = (
    "Earlier, equal within noise counted as holding, and a best learning rate or damping at the edge of its grid was "
    "not minded. Now muP has to be better, and neither best may lie beyond its grid."
)


def outperforms(better: str, worse: str, axis: str = "lr") -> ClaimCheck:
    """Checks that at the widest one study beats another, each tuned on a grid that holds its best setting.

    It is not determined where the two are equal within the noise of the seeds, or where the one that is behind may
    have its best setting beyond the grid.

    Args:
        better: Name of the study claimed to be better.
        worse: Name of the study it is compared with.
        axis: What was tuned: "lr" or "damping".

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        finding = beats(BestOf(better), BestOf(worse))(evidence)
        a, b = (BestOf(part).value(evidence).mean for part in (better, worse))
        gap = (
            f"{100 * (a - b):+.2f} points: " if math.isfinite(a - b) and BestOf(better).value(evidence).accuracy else ""
        )
        behind = {HOLDS: worse, FAILS: better}.get(finding.verdict)
        record = evidence.study(behind or worse)
        if behind is None or not may_lie_beyond(record, record.schemes[0], record.widths[-1], axis):
            return replace(finding, measured=gap + finding.measured)
        measured = f"{gap}{finding.measured}; the best of {behind} may lie beyond its grid"
        return Finding(UNTOLD, measured, effect=finding.effect)

    return check


def may_lie_beyond(record: StudyRecord, scheme: str, width: float, axis: str = "lr") -> bool:
    """Returns whether the best setting of a width may lie beyond a grid of several settings.

    Args:
        record: The study.
        scheme: The scheme as the study names it.
        width: The width.
        axis: "lr" or "damping".

    Returns:
        Whether it may; not if no run finished.
    """
    setting = best(settings(record, scheme, width), record.metric)
    tried = {each.at(axis) for each in settings(record)}
    if setting is None or len(tried) < 2:
        return False
    optima = find_optima(record, scheme, axis)
    if optima is None:  # one width: no certificate
        return setting.at(axis) in (min(tried), max(tried))
    return width in optima.open_ended


# Divergence.


def edge_rises(part: str, which: str) -> ClaimCheck:
    """Checks that the damping at which training begins or ceases to diverge grows with the width.

    It holds if the edge never falls and is higher at the widest than at the narrowest, fails if it is lower there, and
    is not determined if the two are equal. An edge at the end of the grid may lie beyond it, which only adds to the
    difference from an edge inside.

    Args:
        part: The study's name in the evidence.
        which: "least" or "largest" of the dampings at which every seed finished.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        record = evidence.study(part)
        choose = min if which == "least" else max
        edges, open_ended = {}, []
        for width in record.widths:
            rows = settings(record, record.schemes[0], width)
            finished = [setting.at("damping") for setting in rows if setting.whole]
            if not finished:
                return Finding(UNTOLD, f"{part}: at width {width:g} every run diverged")
            edges[width] = choose(finished)
            if edges[width] == choose(setting.at("damping") for setting in rows):
                open_ended.append(width)
        shown = ", ".join(f"{power_text(edge)} (width {width:g})" for width, edge in edges.items())
        measured = f"{part}: {which} damping that does not diverge: {shown}"
        if open_ended:
            measured += f"; at {_width_list(open_ended)} at the end of the grid"
        values = list(edges.values())
        if len(values) < 2 or values[-1] == values[0]:
            return Finding(UNTOLD, measured)
        if values[-1] < values[0]:
            return Finding(FAILS, measured)
        return Finding(HOLDS if values == sorted(values) else IN_PART, measured)

    return check
