"""A table as data: it prints as text, and the command line can draw it."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))


@dataclass(frozen=True, repr=False)
class Table:
    """A table of text. Print it, or read its columns and rows.

    Attributes:
        title: The line above the table.
        columns: The heads of the columns.
        rows: The cells, row by row.
        notes: Lines below the table.

    Example:
        >>> from mukron.table import Table
        >>> print(Table("Squares", ("x", "x^2"), (("1", "1"), ("12", "144"))))
        Squares
        <BLANKLINE>
        x   x^2
        --  ---
        1   1
        12  144
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of characters in a line."""
        return sum(self._widths) + 2 * (len(self.columns) - 1)

    @property
    def _widths(self) -> list[int]:
        return [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    def __str__(self) -> str:
        widths = self._widths
        lines = [self.title, "", _line(self.columns, widths), "  ".join("-" * width for width in widths)]
        lines += [_line(row, widths) for row in self.rows]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])

    __repr__ = __str__


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def bytes_(number: float) -> str:
    """A number of bytes as a cell, with its unit.

    Args:
        number: The number.

    Returns:
        The cell.

    Example:
        >>> bytes_(3 * 2**30)
        '3 GiB'
    """
    size, unit = next(pair for pair in UNITS if number >= pair[0] or pair is UNITS[-1])
    return f"{number / size:.{4 if number >= 1000 * size else 3}g} {unit}"
