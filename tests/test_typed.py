"""Plain data is read as what annotations say, and an error says where it is something else."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

from mukron.readers import exact_number
from mukron.typed import MaybeInfinite, MaybeMissing, NullIsInfinite, read_as


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    first: int
    second: str = ""


@dataclass
class Inner:
    ratio: Fraction
    colour: Colour = Colour.RED


@dataclass
class Outer:
    inner: Inner
    pairs: tuple[Pair, ...]
    numbers: Mapping[str, float | None]
    rest: Any = None


READ = [
    (bool, True, True),
    (int, 3, 3),
    (float, 3, 3),
    (float, 0.5, 0.5),
    (float | None, None, None),
    (str, "", ""),
    (int | str, "x", "x"),
    (tuple[int, ...], [1, 2], (1, 2)),
    (tuple[int, str], [1, "x"], (1, "x")),
    (list[int], [1], [1]),
    (Sequence[int], [], ()),
    (dict[str, int], {"x": 1}, {"x": 1}),
    (Fraction, "1/3", Fraction(1, 3)),
    (Colour, "red", Colour.RED),
    (Pair, [1, "x"], Pair(1, "x")),
    (Pair, {"first": 1}, Pair(1)),
    (MaybeInfinite, "-inf", -math.inf),
    (NullIsInfinite, None, math.inf),
    (
        Outer,
        {"inner": {"ratio": 2}, "pairs": [[1]], "numbers": {"x": None}},
        Outer(Inner(Fraction(2)), (Pair(1),), {"x": None}),
    ),
]


@pytest.mark.parametrize(("kind", "data", "value"), READ)
def test_data_of_its_type_is_read(kind, data, value):
    read = read_as(kind, data, "data")
    assert read == value
    assert type(read) is type(value)


WHOLE = {"inner": {"ratio": 2}, "pairs": [[1]], "numbers": {}}
WRONG = [
    (int, True, "data: expected a whole number, found True"),
    (int, 1.0, "data: expected a whole number, found 1.0"),
    (int, 2**63, "expected a whole number"),
    (float, math.nan, "data: expected a finite number, found nan"),
    (float, 10**400, "expected a finite number"),
    (float | None, "x", "data: expected a finite number, found 'x'"),
    (str, None, "data: expected text, found None"),
    (list[int], {"x": 1}, "data: expected a list"),
    (tuple[int, int], [1], "data: expected a list of 2"),
    (tuple[int, ...], [1, "x"], r"data\[1\]: expected a whole number"),
    (dict[str, int], [], "data: expected values by name"),
    (Colour, "blue", "data: 'blue' is not a valid Colour"),
    (Colour, [], "data: "),
    (Fraction, "1e999999999", "data: expected a short number"),
    (MaybeInfinite, math.nan, "data: expected a number"),
    (Outer, {}, "data: there is no 'inner'"),
    (Outer, {**WHOLE, "more": 1}, "data: there is no such entry as 'more'"),
    (Outer, {**WHOLE, "inner": {"ratio": 1, "colour": 7}}, "data.inner.colour: 7 is not"),
    (Outer, {**WHOLE, "pairs": [[1], [1, "x", 2]]}, r"data.pairs\[1\]: expected a list of 2"),
    (Outer, {**WHOLE, "numbers": {"x": "y"}}, "data.numbers.x: expected a finite number, found 'y'"),
]


@pytest.mark.parametrize(("kind", "data", "said"), WRONG)
def test_other_data_is_refused_by_its_place(kind, data, said):
    with pytest.raises(ValueError, match=said):
        read_as(kind, data, "data")


def test_what_is_missing_is_not_a_number():
    assert math.isnan(read_as(MaybeMissing, None, "data"))


@pytest.mark.parametrize(
    ("written", "number"),
    [
        *(("1/2", Fraction(1, 2)), ("-1/2", Fraction(-1, 2)), (" 0.25 ", Fraction(1, 4)), ("1e-3", Fraction(1, 1000))),
        *((0.1, Fraction(1, 10)), (3, Fraction(3)), (Fraction(1, 3), Fraction(1, 3)), (".5", Fraction(1, 2))),
    ],
)
def test_exact_numbers(written, number):
    assert exact_number(written) == number


@pytest.mark.parametrize(
    "written",
    [
        *("1e999999999", "1e-999999999", "1e100", "1/0", "1/00", "1/2/3", "", "x", "nan", "inf", "1_0", "9" * 31, "٣"),
        *(math.inf, math.nan, True, None, [], 10**160, Fraction(1, 10**160), 1e-300),
    ],
)
def test_no_exact_numbers(written):
    with pytest.raises(ValueError, match=r"expected a short number, as in 1/2 or 0\.25, got"):
        exact_number(written)
