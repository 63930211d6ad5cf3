"""Sums of x x^T over the rows of all passes, as rows or as a matrix."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from mukron.curvature.forms import AUTO, as_rows
from mukron.linalg import Factor, MatrixFactor, RowsFactor, total_count


class Accumulator:
    """The sum of x x^T over all rows x, divided by a count: rows while they are few, a matrix once they are many."""

    def __init__(self, d: int, other: int, form: str = AUTO) -> None:
        self.d, self.other, self.form = d, other, form
        self.rows, self.counts = list[Tensor](), tuple[float | Tensor, ...]()  # counts by pass
        self.parts: list[Tensor] = []  # matrices, one for each pass: their sum is made when it is wanted

    @property
    def matrix(self) -> Tensor | None:
        """The sum, if it is held as a matrix."""
        if len(self.parts) > 1:
            self.parts = [reduce(torch.add, self.parts)]
        return self.parts[0] if self.parts else None

    @matrix.setter
    def matrix(self, M: Tensor | None) -> None:
        self.parts = [] if M is None else [M]

    def add(self, X: Tensor, count: float | Tensor | None) -> None:
        """X [groups, N, d]; None: they were counted before."""
        self.rows.append(X)
        self.counts += () if count is None else (count,)
        self.settle()

    def add_matrix(self, M: Tensor, count: int) -> None:
        """The sum of x x^T over rows that were never held together."""
        self.matrix = M if self.matrix is None else self.matrix + M
        self.counts += (count,)
        self.settle()

    def empty(self) -> Accumulator:
        """One without rows, for the same factor."""
        return Accumulator(self.d, self.other, self.form)

    def merged(self, other: Accumulator) -> Accumulator:
        total = self.empty()
        total.rows, total.parts = self.rows + other.rows, self.parts + other.parts
        total.counts = self.counts + other.counts
        total.settle()
        return total

    def settle(self) -> None:
        N = sum([X.shape[-2] for X in self.rows])
        if self.parts or not as_rows(N, self.d, self.other, self.form):
            self._sum_up()

    def _sum_up(self) -> None:
        for X in self.rows:
            product = torch.bmm(X.mT, X)
            self.matrix = product if self.matrix is None else self.matrix + product
        self.rows = []

    def as_matrix(self) -> Tensor:
        """The sum itself; it is held as a matrix from here on."""
        self._sum_up()
        assert self.matrix is not None
        return self.matrix

    def joined(self) -> Tensor:
        """All rows as one tensor, the same one each time."""
        if len(self.rows) > 1:
            self.rows = [torch.cat(self.rows, dim=-2)]
        return self.rows[0]

    def factor(self, weight: float | Tensor = 1.0) -> Factor:
        """``weight`` multiplies it."""
        if self.matrix is not None:
            return MatrixFactor(self.matrix * (weight / total_count(self.counts)))
        return RowsFactor(self.joined(), total_count(self.counts) / weight)
