"""What was probably meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LONGEST_COMPARED = 100  # characters; the comparison of long texts takes long
USUAL_SPELLINGS = {"learning_rate": "lr", "step_size": "lr", "wd": "weight_decay"}  # in other libraries


def meant(name: object, known: Collection[str], alike: float = 0.6) -> str | None:
    """The known name that was probably meant: one that other libraries call so, or that is spelt much alike.

    Args:
        name: What was written.
        known: The names that exist.
        alike: How much alike two spellings must be, from 0 to 1.

    Returns:
        The name; None if there is none.

    Example:
        >>> meant("dampening", ("lr", "damping")), meant("learning_rate", ("lr", "damping")), meant("x", ("lr",))
        ('damping', 'lr', None)
    """
    other = USUAL_SPELLINGS.get(str(name))
    if other is not None and other in known:
        return other
    close = difflib.get_close_matches(str(name)[:LONGEST_COMPARED], known, n=1, cutoff=alike)
    return close[0] if close else None
