"""What a Muon multiplies a learning rate by for a matrix's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

ADAMS_RMS = 0.2  # of the entries of a step


def _at_least_one(d_out: float, d_in: float) -> float:
    return float(max(1.0, d_out / d_in) ** 0.5)


def _as_adams(d_out: float, d_in: float) -> float:
    return float(ADAMS_RMS * max(d_out, d_in) ** 0.5)


ADJUSTMENTS = ("original", "match_rms_adamw")  # torch's names, which ``mukron.Muon`` takes
# Of every Muon that groups are made for, under the name that it has there.
SCALINGS: dict[str, Callable[[float, float], float]] = {
    "original": _at_least_one,  # torch, Keller Jordan, pytorch_optimizer
    "match_rms_adamw": _as_adams,  # torch, Moonshot; pytorch_optimizer's use_adjusted_lr=True
    "rms_norm": _as_adams,  # dion
    "spectral_norm": lambda d_out, d_in: float((d_out / d_in) ** 0.5),  # dion's default
    "none": lambda d_out, d_in: 1.0,
}


def shape_factor(shape: Sequence[float], scaling: str) -> float:
    """What a Muon multiplies the learning rate of a matrix [out, in] by.

    Args:
        shape: The matrix's sizes.
        scaling: A name in ``SCALINGS``.

    Returns:
        The factor.

    Raises:
        ValueError: There is no such name.

    Example:
        >>> shape_factor((256, 64), "original")
        2.0
    """
    check_scaling("scaling", scaling, SCALINGS)
    d_out, d_in = shape
    return SCALINGS[scaling](d_out, d_in)


def check_scaling(argument: str, name: str, known: Sequence[str] | dict[str, Callable[[float, float], float]]) -> None:
    """Refuse the name of a scaling that is unknown.

    Args:
        argument: The argument that it was given as.
        name: The name.
        known: The names that are known.

    Raises:
        ValueError: There is no such name.
    """
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {argument} {name!r}; known: {', '.join(map(repr, known))}")
