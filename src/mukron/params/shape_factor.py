"""What Muon multiplies a learning rate by for a matrix's shape, under the names that torch has for it."""

from __future__ import annotations

from collections.abc import Sequence

ADJUSTMENTS = ("original", "match_rms_adamw")
ADAMS_RMS = 0.2  # of the entries of a step


def shape_factor(shape: Sequence[float], adjust_lr_fn: str) -> float:
    """What torch's Muon multiplies the learning rate of a matrix [out, in] by.

    Args:
        shape: The matrix's sizes.
        adjust_lr_fn: The name that torch has for it: "original" or "match_rms_adamw".

    Returns:
        The factor.

    Raises:
        ValueError: There is no such name.

    Example:
        >>> shape_factor((256, 64), "original")
        2.0
    """
    check_adjustment(adjust_lr_fn)
    d_out, d_in = shape
    return float(max(1.0, d_out / d_in) ** 0.5 if adjust_lr_fn == "original" else ADAMS_RMS * max(d_out, d_in) ** 0.5)


def check_adjustment(adjust_lr_fn: str) -> None:
    """Refuse a name that torch does not have.

    Args:
        adjust_lr_fn: The name.

    Raises:
        ValueError: There is no such name.
    """
    if adjust_lr_fn not in ADJUSTMENTS:
        raise ValueError(f"unknown adjust_lr_fn {adjust_lr_fn!r}; known: {', '.join(map(repr, ADJUSTMENTS))}")
