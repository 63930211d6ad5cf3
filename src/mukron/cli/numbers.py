"""Parsing of numbers in options: 0.03, 2^-5, and lists of them, 0.01,0.03  2^-9:2^-2  64:1024  1:1000:10."""

from __future__ import annotations

import math
import re
from typing import Any

import typer

MAX_NUMBERS = 1000  # a longer list is taken for a mistake


def read_numbers(text: str, option: str, ends: bool = False) -> list[float]:
    """Reads numbers separated by commas; FROM:TO goes up by doubling, FROM:TO:TIMES by another factor.

    Args:
        text: The option's value.
        option: The option's name, for the error message.
        ends: Whether to return only the two ends of a range.

    Returns:
        The numbers.

    Raises:
        ValueError: If the text cannot be read or gives too many numbers.

    Example:
        >>> read_numbers("2^-2:1,10", "--lr")
        [0.25, 0.5, 1.0, 10.0]
    """
    try:
        return [number for part in text.split(",") for number in _range(part, ends)]
    except (ValueError, OverflowError) as error:
        reason = f" ({error})" if str(error).startswith("from") else ""
        raise ValueError(
            f"{option} {text!r}: expected numbers, as in 0.01,0.03 or 2^-9:2^-2 or 1:1000:10{reason}"
        ) from None


def _range(text: str, ends: bool) -> list[float]:
    low, *rest = (read_number(part) for part in text.split(":"))
    if not rest:
        return [low]
    high, times = (*rest, 2.0)[:2] if len(rest) < 3 else (0.0, 0.0)
    if not (0 < low <= high and times > 1):
        raise ValueError(f"from {low:g} to {high:g} by factors of {times:g}: the smaller end comes first")
    if ends:
        return [low, high]
    numbers = [low]
    while numbers[-1] * times <= high * (1 + 1e-9):
        numbers.append(numbers[-1] * times)
        if len(numbers) > MAX_NUMBERS:
            raise ValueError(f"from {low:g} to {high:g} by factors of {times:g} are more than {MAX_NUMBERS}")
    if numbers[-1] < high * (1 - 1e-9):
        raise ValueError(f"from {low:g} by factors of {times:g} the last number is {numbers[-1]:g}, not {high:g}")
    return numbers


def read_number(text: str) -> float:
    """Reads one number: 0.1, 1e-3 or a power, 2^-5.

    Args:
        text: The number as it was typed.

    Returns:
        The number.

    Raises:
        ValueError: If it is none, or too large for a float.

    Example:
        >>> read_number("2^-5"), read_number("0.1")
        (0.03125, 0.1)
    """
    base, power, exponent = text.partition("^")
    try:
        number = float(base) ** float(exponent) if power else float(base)
    except (OverflowError, ZeroDivisionError):
        raise ValueError(f"{text} is too large") from None
    if isinstance(number, complex):
        raise ValueError(f"{text} is no real number")
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def is_power(text: str) -> bool:
    """Whether a text is a power of two plain numbers, as 2^-5.

    Args:
        text: Any text.

    Returns:
        Whether it is.

    Example:
        >>> is_power("2^-5"), is_power("0.1"), is_power("cosine")
        (True, False, False)
    """
    plain = r"(\d+\.?\d*|\.\d+)"
    return re.fullmatch(rf"{plain}\^-?{plain}", text) is not None


def _rate(text: str | float) -> float:
    try:
        return read_number(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected one number, as in 0.03 or 2^-5") from None


RATE: dict[str, Any] = {"parser": _rate, "metavar": "FLOAT"}  # arguments of typer.Option for a learning rate
