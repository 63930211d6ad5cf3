"""One batch's factor, gathered over micro-batches in the form that is cheapest for its size."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.linalg import DiagonalFactor, Factor, MatrixFactor, RowsFactor


def rows_are_cheaper(rows: int, d: int, other: int) -> bool:
    """Whether N rows cost less than a d x d matrix, in multiplications of one refreshed step.

    rows:    N^2 d (Gram matrix) + N^3 / 3 (Cholesky) + 2 N d other (apply to a d x other gradient) + N^2 other
    matrix:  N d^2 (form)        + d^3     (inverse)  + d^2 other   (apply)
    """
    as_rows = rows**2 * d + rows**3 / 3 + 2 * rows * d * other + rows**2 * other
    as_matrix = rows * d**2 + d**3 + d**2 * other
    return as_rows < as_matrix


class Accumulator:
    """M = sum of x x^T over all rows x, divided by a count: rows while they are few, a matrix once they are many."""

    def __init__(self, d: int, other: int, form: str = "auto") -> None:
        self.d, self.other, self.form = d, other, form
        self.rows: list[Tensor] = []
        self.matrix: Tensor | None = None
        self.count = 0

    def add(self, X: Tensor, count: int) -> None:
        """X [groups, N, d]."""
        self.rows.append(X)
        self.count += count
        self._settle()

    def add_matrix(self, M: Tensor, count: int) -> None:
        """The sum of x x^T over rows that were never held together."""
        self.matrix = M if self.matrix is None else self.matrix + M
        self.count += count
        self._settle()

    def empty(self) -> Accumulator:
        return Accumulator(self.d, self.other, self.form)

    def merge(self, other: Accumulator) -> None:
        self.rows = self.rows + other.rows
        self.count += other.count
        if other.matrix is not None:
            self.matrix = other.matrix if self.matrix is None else self.matrix + other.matrix
        self._settle()

    def _settle(self) -> None:
        total = sum(rows.shape[-2] for rows in self.rows)
        as_rows = rows_are_cheaper(total, self.d, self.other) if self.form == "auto" else self.form == "rows"
        if self.matrix is not None or not as_rows:
            for rows in self.rows:
                product = torch.bmm(rows.mT, rows)
                self.matrix = product if self.matrix is None else self.matrix + product
            self.rows = []

    def factor(self, scale: float = 1.0) -> Factor:
        """``scale`` multiplies every row."""
        if self.matrix is not None:
            return MatrixFactor(self.matrix * (scale**2 / self.count))
        X = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, dim=-2)
        return RowsFactor(X, self.count / scale**2)  # the rows themselves: who has them too may know it


class FrequencyAccumulator:
    """M = diag(how often each index came), divided by a count."""

    def __init__(self, d: int) -> None:
        self.d = d
        self.frequencies: Tensor | None = None
        self.count = 0

    def add(self, indices: Tensor, count: int, dtype: torch.dtype) -> None:
        frequencies = torch.bincount(indices.flatten(), minlength=self.d).to(dtype).unsqueeze(0)
        self.frequencies = frequencies if self.frequencies is None else self.frequencies + frequencies
        self.count += count

    def empty(self) -> FrequencyAccumulator:
        return FrequencyAccumulator(self.d)

    def merge(self, other: FrequencyAccumulator) -> None:
        both = [each for each in (self.frequencies, other.frequencies) if each is not None]
        self.frequencies = both[0] if len(both) == 1 else both[0] + both[1]
        self.count += other.count

    def factor(self, scale: float = 1.0) -> Factor:
        assert self.frequencies is not None
        return DiagonalFactor(self.frequencies * (scale**2 / self.count))
