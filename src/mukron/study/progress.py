"""The progress of a study: the trials that have ended, and the estimated time for the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mukron.study.design import Design
from mukron.study.store import ENDED, RUNNING, Entry
from mukron.train.records import DIVERGED

FEWEST_TRIALS = 3  # trials from which the duration of the others is estimated


@dataclass(frozen=True)
class StudyProgress:
    """The progress of a study.

    Attributes:
        done: Trials that have ended.
        total: Trials of the whole study.
        running: Trials that are running, including those of other commands and machines.
        diverged: Trials that have ended because they diverged.
        seconds_left: The estimated time until the study is done; None while too few trials have ended.

    Example:
        >>> StudyProgress(done=3, total=10, running=2, diverged=0, seconds_left=None).total
        10
    """

    done: int
    total: int
    running: int
    diverged: int
    seconds_left: float | None


def standing_of_study(at: StudyProgress) -> tuple[float, float, str]:
    """What a progress bar shows of a study."""
    left = "" if at.seconds_left is None else f", about {at.seconds_left / 60:.0f} min left"
    return at.done, at.total, f"runs, {at.running} running, {at.diverged} diverged{left}"


def progress_of(design: Design, entries: Sequence[Entry], workers: int) -> StudyProgress:
    """Return the progress, given all trials of the storage and the number of processes of this command."""
    by_state = design.by_state(entries)
    ended, running = by_state[ENDED], by_state[RUNNING]
    diverged = sum(entry.result is not None and entry.result.status == DIVERGED for entry in ended)
    left = _seconds_of_work_left(design, ended, running)
    side_by_side = max(1.0, sum(1 / entry.together for entry in running), workers)
    total = max(design.total, len(ended) + len(running))  # the storage may hold more settings than a search asks for
    return StudyProgress(len(ended), total, len(running), diverged, None if left is None else left / side_by_side)


def _seconds_of_work_left(design: Design, ended: Sequence[Entry], running: Sequence[Entry]) -> float | None:
    """The median duration at each width times the runs left there.

    A width at which nothing has ended takes the duration of the nearest one times a power of the ratio of widths. The
    power is fitted to the durations so far and kept between 0 and 2.
    """
    if len(ended) < FEWEST_TRIALS:
        return None
    durations: dict[float, list[float]] = {}
    for entry in ended:
        durations.setdefault(entry.point.width, []).append(entry.seconds)
    medians = {width: statistics.median(seconds) for width, seconds in durations.items()}
    low, high = min(medians), max(medians)
    timed = low < high and min(medians[low], medians[high]) > 0  # trials of earlier versions have no times
    power = math.log(medians[high] / medians[low]) / math.log(high / low) if timed else 1.0
    power = min(max(power, 0.0), 2.0)
    runs_per_width = design.total / len(design.widths)
    seconds_left = 0.0
    for width in design.widths:
        nearest = min(medians, key=lambda known: (abs(known - width), known))
        duration = medians[nearest] * (width / nearest) ** power
        half_done = sum(entry.point.width == width for entry in running) / 2
        seconds_left += duration * max(0.0, runs_per_width - len(durations.get(width, ())) - half_done)
    return seconds_left
