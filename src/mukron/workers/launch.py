"""How this process was started: by itself, or by torchrun as one of several that train together.

torchrun tells a process its place by environment variables. Reading them needs no torch.
"""

from __future__ import annotations

import os

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched() -> int:
    """Return how many processes torchrun started together with this one.

    Returns:
        The number, over all machines; 1 if this process was started by itself.

    Example:
        >>> launched()
        1
    """
    return _number("WORLD_SIZE", 1) if all(name in os.environ for name in SET_BY_TORCHRUN) else 1


def local_rank() -> int:
    """Return this process's number among those of its machine; 0 if it was started by itself.

    Returns:
        The number.

    Example:
        >>> local_rank()
        0
    """
    return _number("LOCAL_RANK", 0) if launched() > 1 else 0


def launched_rank() -> int:
    """Return this process's number among all of them; 0 if it was started by itself.

    Returns:
        The number.

    Example:
        >>> launched_rank()
        0
    """
    return _number("RANK", 0) if launched() > 1 else 0


def restarted() -> bool:
    """Return whether torchrun has started these processes again, since one of them had ended too early.

    Returns:
        Whether it has.

    Example:
        >>> restarted()
        False
    """
    return launched() > 1 and _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def refuse_torchrun(what: str, instead: str) -> None:
    """Refuse work that several processes of torchrun would all do again, each by itself.

    Args:
        what: The work, for the message.
        instead: What to do.

    Raises:
        ValueError: torchrun has started several processes.

    Example:
        >>> refuse_torchrun("a study", "give it --workers")
    """
    if (processes := launched()) > 1:
        raise ValueError(
            f"{what} was started by torchrun in {processes} processes, and only the training of one run works there; "
            f"start it without torchrun: {instead}"
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
