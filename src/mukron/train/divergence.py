"""When a run counts as diverged, and why."""

from __future__ import annotations

import math

from mukron.linalg import FactorizationError
from mukron.train.processes import Processes

TOO_LARGE = 1e4  # a run diverged if its loss exceeds this multiple of the first loss, or of 1 if that is smaller
STEP_FAILED_ELSEWHERE = "could not take this step"  # as an optimizer says of another rank


class DivergedError(Exception):
    """The run has diverged; the message says why."""


def trouble_with(loss: float | None, first: float | None, what: str) -> str:
    """Return why a run with this loss counts as diverged, given its first loss; "" if it does not."""
    if loss is None or not math.isfinite(loss):
        if first is None:
            return f"the {what} is not finite before anything is learned; check the data"
        return f"the {what} is not finite; lower the learning rate or raise the damping"
    if first is not None and loss > TOO_LARGE * max(first, 1.0):
        return f"the {what} is {loss:.3g}, and was {first:.3g} at first; lower the learning rate"
    return ""


def failed_factorization(error: RuntimeError, processes: Processes) -> str:
    """Return why a step failed, if that was a factorization, here or on another rank; "" otherwise.

    Args:
        error: What the optimizer's step raised; on one rank or on all of them.
        processes: The processes.
    """
    failed = isinstance(error.__cause__, FactorizationError)
    if processes.size == 1 or not (failed or STEP_FAILED_ELSEWHERE in str(error)):
        return str(error) if failed else ""
    return next(filter(None, processes.of_all(str(error) if failed else "")), "")
