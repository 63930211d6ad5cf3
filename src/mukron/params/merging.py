"""Rows of a table of parameters that say the same, in one line: ``blocks.0-3.attention.{query,key,value}.weight``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SIGMAS = 4.0  # of sampling error: measured standard deviations that differ by less are one number
LARGEST_DIFFERENCE = 0.1  # however few numbers were measured
LONGEST_NAME = 64  # of a merged row

Segments = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ParameterRow:
    """The row of one parameter, or of several that are alike.

    Attributes:
        name: The parameter's name.
        cells: What the row says, apart from the name and the initial standard deviation.
        std: The measured standard deviation of the initial values; 0: they are constant; None: not known.
        numbers: How many numbers it was measured on.
        digits: The significant digits that the standard deviation is shown with.
        members: The names that a merged row stands for; empty for the row of one parameter.

    Example:
        >>> ParameterRow("fc1.weight", ("input",), 0.125, 64).std_text
        '0.125'
    """

    name: str
    cells: tuple[str, ...]
    std: float | None
    numbers: int
    digits: int = 4
    members: tuple[str, ...] = ()

    @property
    def std_text(self) -> str:
        """The standard deviation as a cell."""
        return "as drawn" if self.std is None else f"{self.std:.{self.digits}g}" if self.std else "constant"


def merged(rows: Sequence[ParameterRow]) -> list[ParameterRow]:
    """Merge rows whose cells are equal and whose names differ in numbers, or are those of siblings.

    A merged name stands for exactly the names that it can be read as: each choice from its ranges and braces is one of
    the rows. Standard deviations are measured, and equal if they differ by no more than their sampling error; the row
    shows their root mean square.

    Args:
        rows: A row per parameter.

    Returns:
        The merged rows, each at the place of the first one in it.

    Example:
        >>> rows = [ParameterRow(f"blocks.{i}.norm{j}.weight", ("vector",), 0, 8) for i in range(3) for j in (1, 2)]
        >>> [row.name for row in merged(rows)]
        ['blocks.0-2.norm{1,2}.weight']
    """
    groups = [_Group((row,), _segments(row.name)) for row in rows]
    for numbers in (True, False):  # first all blocks, then siblings
        count = 0
        while count != len(groups):
            count = len(groups)
            for position in range(max((len(group.segments) for group in groups), default=0)):
                groups = _merged_at(groups, position, numbers)
    place = {row.name: number for number, row in enumerate(rows)}
    groups.sort(key=lambda group: min(place[row.name] for row in group.rows))
    return [group.row() for group in groups]


def merged_names(names: Iterable[str]) -> list[str]:
    """Merge names that differ in numbers, or are those of siblings.

    Args:
        names: The names.

    Returns:
        Fewer names, which stand for exactly these.

    Example:
        >>> merged_names(["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.norm.bias"])
        ['blocks.0-1.norm.{weight,bias}']
    """
    return [row.name for row in merged([ParameterRow(name, (), None, 0) for name in names])]


@dataclass(frozen=True)
class _Group:
    """Rows that are merged; their names are all choices of one word per segment."""

    rows: tuple[ParameterRow, ...]
    segments: Segments

    def row(self) -> ParameterRow:
        if len(self.rows) == 1:
            return self.rows[0]
        first, numbers = self.rows[0], sum(row.numbers for row in self.rows)
        std = first.std and math.sqrt(sum(row.numbers * (row.std or 0) ** 2 for row in self.rows) / numbers)
        members = tuple(row.name for row in self.rows)
        return replace(first, name=_name(self.segments), std=std, numbers=numbers, members=members)

    def with_(self, other: _Group, position: int) -> _Group | None:
        """Both groups as one that takes its words at a position from either; None if their rows are not alike."""
        words = (*self.segments[position], *other.segments[position])
        if _is_number(words[0]):
            words = tuple(sorted(words, key=int))
        segments = (*self.segments[:position], words, *self.segments[position + 1 :])
        rows = (*self.rows, *other.rows)
        alike = _same_std(rows) and (_is_number(words[0]) or len(_name(segments)) <= LONGEST_NAME)
        return _Group(rows, segments) if alike else None


def _merged_at(groups: Iterable[_Group], position: int, numbers: bool) -> list[_Group]:
    """Merge groups that differ in one segment alone, in numbers or in words."""
    result: list[_Group] = []
    alike: dict[tuple[object, ...], list[int]] = {}  # places in the result
    for group in groups:
        if position >= len(group.segments) or _is_number(group.segments[position][0]) != numbers:
            result.append(group)
            continue
        others = (group.segments[:position], group.segments[position + 1 :])
        places = alike.setdefault((group.rows[0].cells, others), [])
        for place in places:
            if (both := result[place].with_(group, position)) is not None:
                result[place] = both
                break
        else:
            places.append(len(result))
            result.append(group)
    return result


def _same_std(rows: Sequence[ParameterRow]) -> bool:
    stds = [row.std for row in rows]
    known = [std for std in stds if std]
    if len(known) < len(stds):
        return all(std == stds[0] for std in stds)
    error = math.sqrt(1 / min(max(row.numbers, 1) for row in rows))  # of a difference: sqrt(2) / sqrt(2 n)
    return max(known) - min(known) <= min(SIGMAS * error, LARGEST_DIFFERENCE) * min(known)


def _segments(name: str) -> Segments:
    """The words between dots; none if the name has characters that merged names are written with."""
    return () if re.search(r"[{},-]", name) else tuple((word,) for word in name.split("."))


def _is_number(word: str) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]*", word) is not None


def _name(segments: Segments) -> str:
    return ".".join(_segment(list(words)) for words in segments)


def _segment(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    if _is_number(words[0]):
        ranges = _ranges([int(word) for word in words], shortest=2)
        return ranges[0] if len(ranges) == 1 else f"{{{','.join(ranges)}}}"
    stems = [re.fullmatch(r"(.*?[^0-9])(0|[1-9][0-9]*)", word) for word in words]
    if all(stem is not None and stems[0] is not None and stem[1] == stems[0][1] for stem in stems):
        ends = sorted(int(stem[2]) for stem in stems if stem is not None)
        return f"{stems[0][1]}{{{','.join(_ranges(ends, shortest=3))}}}"  # type: ignore[index]
    return f"{{{','.join(words)}}}"


def _ranges(numbers: list[int], shortest: int) -> list[str]:
    """1, 2, 3, 5 -> "1-3", "5"; runs that are too short are listed."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) >= shortest else map(str, run)
    return texts
