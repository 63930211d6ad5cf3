"""Readers: functions from a value as JSON or the command line gives it to the value that is kept.

A reader returns the value in its one spelling, or raises a ValueError that says what is allowed. Functions such as
``number`` and ``one_of`` make readers; ``optional`` and ``names`` make a reader of another one.

>>> from mukron import readers as read
>>> read.number(above=0)(1)
1.0
>>> read.optional(read.one_of(("mc", "exact")))(None)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from numbers import Integral, Rational, Real
from types import MappingProxyType
from typing import Any

from mukron.spelling import meant

Reader = Callable[[Any], Any]
Parser = Callable[[str], Any]  # from text such as "ema:0.95" to an object such as EMA(0.95)

EXACT = re.compile(
    r"[-+]?([0-9]{1,30}/[0-9]{1,30}|([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][-+]?[0-9]{1,2})?)"
)
ZERO_DENOMINATOR = re.compile("/0+$")
LARGEST_EXACT = 10**160  # numerators and denominators of exact numbers are below: more than what EXACT lets through
SHOWN_CHARACTERS = 100  # characters of a value in an error


def text(value: Any) -> str:
    """A name: text that is not empty.

    Args:
        value: The value as it was given.

    Returns:
        The text.

    Example:
        >>> text('kfac')
        'kfac'
    """
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def flag(value: Any) -> bool:
    """True or false, and no number.

    Args:
        value: The value as it was given.

    Returns:
        The value.

    Example:
        >>> flag(True)
        True
    """
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def whole(least: int | None = None) -> Reader:
    """A whole number of 64 bits, not below ``least``.

    Args:
        least: The lowest number that is allowed; None: any.

    Returns:
        A reader.

    Example:
        >>> whole(least=1)(3)
        3
    """
    allowed = "" if least is None else f" from {least} on"
    lowest = -(2**63) if least is None else least

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not lowest <= int(value) < 2**63:
            raise ValueError(f"expected a whole number{allowed}")
        return int(value)

    return read


def number(least: float = 0.0, below: float = math.inf, above: float | None = None) -> Reader:
    """A finite number; floats that are whole stay floats, so that 1 and 1.0 are one value.

    Args:
        least: The lowest number that is allowed.
        below: Numbers must be below this.
        above: Numbers must be above this; None: ``least`` alone counts.

    Returns:
        A reader.

    Example:
        >>> number(above=0)(1)
        1.0
    """
    allowed = f"above {above:g}" if above is not None else f"not below {least:g}"
    allowed += f" and below {below:g}" if below < math.inf else ""

    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            number = math.inf
        if not (least <= number < below) or (above is not None and not number > above):
            raise ValueError(f"expected a number {allowed}")
        return number + 0.0  # there is one zero

    return read


def one_of(known: Collection[str]) -> Reader:
    """One of these names.

    Args:
        known: The names.

    Returns:
        A reader.

    Example:
        >>> one_of(('mc', 'exact'))('mc')
        'mc'
    """

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"known: {', '.join(known)}")
        return value

    return read


def optional(read: Reader) -> Reader:
    """None, or what ``read`` reads.

    Args:
        read: Reads values that are not None.

    Returns:
        A reader.

    Example:
        >>> optional(whole())(None) is None
        True
    """
    return lambda value: None if value is None else read(value)


def names(read: Reader) -> Reader:
    """A list of what ``read`` reads, as a tuple.

    Args:
        read: Reads one item.

    Returns:
        A reader.

    Example:
        >>> names(text)(['fc1', 'fc2'])
        ('fc1', 'fc2')
    """

    def read_all(values: Any) -> tuple[str, ...]:
        if isinstance(values, str) or not isinstance(values, (tuple, list)):
            raise ValueError("expected a list of names")
        return tuple(map(read, values))

    return read_all


def options(values: Any) -> Mapping[str, Any]:
    """JSON values by name, which nobody can change.

    Args:
        values: Values by name.

    Returns:
        A mapping that cannot be changed.

    Example:
        >>> dict(options({'depth': 3}))
        {'depth': 3}
    """
    if not isinstance(values, Mapping):
        raise ValueError("expected values by name")
    read: Mapping[str, Any] = frozen(values)
    return read


def frozen(value: Any) -> Any:
    """JSON data that nobody can change.

    Args:
        value: The value as it was given.

    Returns:
        The same data, with lists as tuples and dictionaries as read-only mappings.

    Example:
        >>> frozen([1, [2]])
        (1, (2,))
    """
    if isinstance(value, Mapping):
        return MappingProxyType({text(name): frozen(item) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return whole()(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value) + 0.0  # there is one zero
    raise ValueError(f"{value!r} is nothing that JSON can hold")


def exact_number(value: Any) -> Fraction:
    """An exact number, bounded: Python would compute for hours with one such as 1e999999999.

    All places that read fractions, exponents and powers read them by this function.

    Args:
        value: A number, or text such as "1/2", "0.25" or "1e-3".

    Returns:
        The fraction; of a float, that of the decimal number which Python writes for it.

    Raises:
        ValueError: It is no number, or it has more than 30 digits or an exponent of three digits.

    Example:
        >>> exact_number("1/2"), exact_number(0.1), exact_number(3)
        (Fraction(1, 2), Fraction(1, 10), Fraction(3, 1))
    """
    number = None
    if isinstance(value, Rational) and not isinstance(value, bool):
        number = Fraction(value)
    elif isinstance(value, (str, Real)):
        match = EXACT.fullmatch(str(value).strip())
        number = Fraction(match[0]) if match and not ZERO_DENOMINATOR.search(match[0]) else None
    if number is None or max(abs(number.numerator), number.denominator) >= LARGEST_EXACT:
        raise ValueError(f"expected a short number, as in 1/2 or 0.25, got {shown(value)}")
    return number


def parsed(parse: Parser) -> Reader:
    """Text that ``parse`` accepts. It is kept as text, since a run's configuration is JSON.

    Args:
        parse: Raises a ValueError if it does not accept the text.

    Returns:
        A reader.

    Example:
        >>> parsed(float)('0.5')
        '0.5'
    """

    def read(value: Any) -> str:
        parse(text(value))
        return str(value)

    return read


def named(what: str, kinds: Mapping[str, Callable[..., Any]]) -> Parser:
    """A parser of NAME or NAME:NUMBER, for settings whose type is the choice.

    Args:
        what: What is chosen, for errors.
        kinds: By name, the class to make, from the number or from nothing.

    Returns:
        The parser.

    Example:
        >>> parse = named("step", {"constant": lambda: 1.0, "power": lambda exponent=2: exponent})
        >>> parse("power"), parse("power:0.5")
        (2, 0.5)
    """

    def parse(value: str) -> Any:
        name, colon, written = value.strip().lower().partition(":")
        if name not in kinds:
            raise ValueError(f"unknown {what} {value!r}; known: {', '.join(kinds)}, each with or without :NUMBER")
        try:
            return kinds[name](*([_plain_number(written)] if colon else []))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what} {value!r}: {error}; expected {name} or {name}:NUMBER") from error

    return parse


def _plain_number(written: str) -> float:
    try:
        return int(written)
    except ValueError:
        return float(written)


# For errors.


def nearest(name: object, known: Collection[str]) -> str:
    """A remark that names the known word which was probably meant, if there is one.

    Args:
        name: What was written.
        known: The names that exist.

    Returns:
        The remark, or empty text.

    Example:
        >>> nearest('kfca', ('kfac', 'foof'))
        " (did you mean 'kfac'?)"
    """
    word = meant(name, known)
    return "" if word is None else f" (did you mean {word!r}?)"


def shown(value: Any) -> str:
    """A value as an error shows it, however long it is.

    Args:
        value: The value as it was given.

    Returns:
        Its text, cut off where it is too long.

    Example:
        >>> shown('x' * 1000)[-5:]
        'xx...'
    """
    try:
        written = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "(a huge number)"
    return written if len(written) <= SHOWN_CHARACTERS else f"{written[:SHOWN_CHARACTERS]}..."
