"""Refuse arguments of wrong types by their names, where Python would say something else, later."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: Any) -> None:
    """Refuse an argument that is no finite number; True and False are none.

    Args:
        name: The argument.
        value: What was given for it.

    Example:
        >>> check_number("lr", 0.1)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_whole(name: str, value: Any) -> None:
    """Refuse an argument that is no whole number.

    Args:
        name: The argument.
        value: What was given for it.

    Example:
        >>> check_whole("factor_every", 10)
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r:.80}")


def check_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str = "") -> None:
    """Refuse an argument of another type.

    Args:
        name: The argument.
        value: What was given for it.
        kind: The type that it must have, or several.
        wanted: What it must be, in words; the type's name by default.

    Example:
        >>> check_type("design", "study", dict)
        Traceback (most recent call last):
        TypeError: design must be a dict, got 'study'
    """
    if not isinstance(value, kind):
        named = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{name} must be {wanted or f'a {named}'}, got {value!r:.80}")


def check_flag(name: str, value: Any) -> None:
    """Refuse an argument that is neither True nor False.

    Args:
        name: The argument.
        value: What was given for it.

    Example:
        >>> check_flag("nesterov", False)
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")
