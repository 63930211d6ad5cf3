"""Plain data of JSON as the types that a dataclass, a named tuple or an annotation names. Every loader reads by it.

>>> read_as(tuple[float, ...], [1, 2.5], "lr")
(1, 2.5)
>>> read_as(int, "1", "steps")
Traceback (most recent call last):
ValueError: steps: expected a whole number, found '1'
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from mukron.readers import exact_number, shown

Read = Callable[[Any, str], Any]  # from a value and its place, for errors
LARGEST_WHOLE = 2**63 - 1
MaybeMissing = Annotated[float, "or missing"]  # null is read as NaN
NullIsInfinite = Annotated[float, "or null"]
MaybeInfinite = Annotated[float, "or infinite"]  # JSON has no infinite numbers: these are the texts "inf" and "-inf"


def read_as(kind: Any, value: Any, place: str) -> Any:
    """Read plain data as a type. Numbers stay as they are: a whole one is a float too.

    Args:
        kind: A dataclass or a named tuple, whose fields are read from a mapping or, of a named tuple, also from a list;
            ``bool``, ``int``, ``float`` (finite; ``MaybeInfinite`` is one that need not be), ``str``, ``None``,
            ``Fraction``, an enumeration; ``tuple``, ``list``, ``Sequence``, ``dict`` and ``Mapping`` of these; one of
            several; ``Any``.
        value: The data.
        place: The name of the data, for errors.

    Returns:
        The value of this type.

    Raises:
        ValueError: The data is something else. The error names the place, what was expected and what was found.

    Example:
        >>> @dataclasses.dataclass
        ... class Row:
        ...     width: float
        ...     note: str = ""
        >>> read_as(list[Row], [{"width": 64}], "rows")
        [Row(width=64, note='')]
        >>> read_as(Row, {"width": True}, "row")
        Traceback (most recent call last):
        ValueError: row.width: expected a finite number, found True
    """
    return _reader(kind)(value, place)


def fields_of(value: Any, place: str, *names: str) -> Mapping[str, Any]:
    """Check that data is a mapping by name that has these names.

    Args:
        value: The data.
        place: The name of the data, for errors.
        names: What it must have.

    Returns:
        The mapping.

    Raises:
        ValueError: It is no mapping, or lacks a name.

    Example:
        >>> fields_of({"rows": []}, "study", "rows")
        {'rows': []}
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong(place, "values by name", value)
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{place}: there is no {missing[0]!r}")
    return value


def _wrong(place: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{place}: expected {expected}, found {shown(value)}")


def _plain(test: Callable[[Any], bool], expected: str) -> Read:
    def read(value: Any, place: str) -> Any:
        if not test(value):
            raise _wrong(place, expected, value)
        return value

    return read


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_WHOLE


def _is_finite(value: Any) -> bool:
    if isinstance(value, int):
        return _is_whole(value)
    return isinstance(value, float) and math.isfinite(value)


def _maybe_infinite(value: Any, place: str) -> float:
    if value in ("inf", "-inf") or (isinstance(value, float) and math.isinf(value)):
        return float(value)
    if not _is_finite(value):
        raise _wrong(place, 'a number, "inf" or "-inf"', value)
    return float(value)


_float = _plain(_is_finite, "a finite number")
PLAIN_READERS: dict[Any, Read] = {
    Any: lambda value, place: value,
    None: _plain(lambda value: value is None, "null"),
    NoneType: _plain(lambda value: value is None, "null"),
    bool: _plain(lambda value: isinstance(value, bool), "true or false"),
    int: _plain(_is_whole, "a whole number"),
    float: _float,
    str: _plain(lambda value: isinstance(value, str), "text"),
    MaybeInfinite: _maybe_infinite,
    MaybeMissing: lambda value, place: math.nan if value is None else _float(value, place),
    NullIsInfinite: lambda value, place: math.inf if value is None else _float(value, place),
}


@cache
def _reader(kind: Any) -> Read:
    if kind in PLAIN_READERS:
        return PLAIN_READERS[kind]
    if kind is Fraction:
        return _converted(exact_number)
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return _one_of([_reader(part) for part in parts if part is not NoneType], NoneType in parts)
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return _fixed_tuple([_reader(part) for part in parts])
    if origin in (tuple, list, Sequence):
        return _items(list if origin is list else tuple, _reader(parts[0]))
    if origin in (dict, Mapping):
        return _values(_reader(parts[1]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _converted(kind)
    if dataclasses.is_dataclass(kind):
        needed = {field.name: _is_needed(field) for field in dataclasses.fields(kind) if field.init}
        return _record(kind, needed)
    if hasattr(kind, "_field_defaults"):  # a named tuple
        return _record(kind, {name: name not in kind._field_defaults for name in kind._fields}, from_list=True)
    raise TypeError(f"no reader of {kind!r}")


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _converted(convert: Callable[[Any], Any]) -> Read:
    def read(value: Any, place: str) -> Any:
        try:
            return convert(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from None

    return read


def _one_of(readers: Sequence[Read], optional: bool) -> Read:
    def read(value: Any, place: str) -> Any:
        if value is None and optional:
            return None
        for reader in readers[:-1]:
            with suppress(ValueError):
                return reader(value, place)
        return readers[-1](value, place)

    return read


def _items(make: Callable[[Any], Any], reader: Read) -> Read:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong(place, "a list", value)
        return make([reader(item, f"{place}[{number}]") for number, item in enumerate(value)])

    return read


def _fixed_tuple(readers: Sequence[Read]) -> Read:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(readers):
            raise _wrong(place, f"a list of {len(readers)}", value)
        return tuple(reader(item, f"{place}[{n}]") for n, (reader, item) in enumerate(zip(readers, value, strict=True)))

    return read


def _values(reader: Read) -> Read:
    def read(value: Any, place: str) -> Any:
        return {name: reader(item, f"{place}.{name}") for name, item in fields_of(value, place).items()}

    return read


def _record(kind: Any, needed: Mapping[str, bool], from_list: bool = False) -> Read:
    hints = get_type_hints(kind, include_extras=True)
    readers = {name: _reader(hints[name]) for name in needed}
    least = [name for name, is_needed in needed.items() if is_needed]

    def read(value: Any, place: str) -> Any:
        if from_list and isinstance(value, (list, tuple)):
            if not len(least) <= len(value) <= len(readers):
                raise _wrong(place, f"a list of {len(readers)}", value)
            value = dict(zip(readers, value, strict=False))
        content = fields_of(value, place, *least)
        if unknown := [name for name in content if name not in readers]:
            raise ValueError(f"{place}: there is no such entry as {shown(unknown[0])}")
        return kind(**{name: readers[name](item, f"{place}.{name}") for name, item in content.items()})

    return read
