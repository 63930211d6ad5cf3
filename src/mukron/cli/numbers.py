"""Lists of numbers as people type them: 0.01,0.03  2^-9:2^-2  64:1024  1:1000:10."""

from __future__ import annotations

MOST = 1000  # more is a slip


def read_numbers(text: str, option: str, ends: bool = False) -> list[float]:
    """Numbers separated by commas; FROM:TO counts by doubling, FROM:TO:TIMES by another factor; or only its ends."""
    try:
        return [number for part in text.split(",") for number in _range(part, ends)]
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        said = f" ({error})" if str(error).startswith("from") else ""
        raise ValueError(
            f"{option} {text!r}: expected numbers, as in 0.01,0.03 or 2^-9:2^-2 or 1:1000:10{said}"
        ) from None


def _range(text: str, ends: bool) -> list[float]:
    low, *rest = (_number(part) for part in text.split(":"))
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
        if len(numbers) > MOST:
            raise ValueError(f"from {low:g} to {high:g} by factors of {times:g} are more than {MOST}")
    if numbers[-1] < high * (1 - 1e-9):
        raise ValueError(f"from {low:g} by factors of {times:g} one comes to {numbers[-1]:g}, not to {high:g}")
    return numbers


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    return float(base) ** float(exponent) if power else float(base)
