"""A sum of outer products over the rows of one or more passes, in the form that is cheaper: rows, or a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.curvature.forms import AUTO, as_rows
from mukron.linalg import Factor, MatrixFactor, RowsFactor


class Accumulator:
    """The sum of x x^T over all rows x, divided by a count: rows while they are few, a matrix once they are many."""

    def __init__(self, d: int, other: int, form: str = AUTO) -> None:
        self.d, self.other, self.form, self.count = d, other, form, 0
        self.rows: list[Tensor] = []
        self.matrix: Tensor | None = None

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
        """One without rows, for the same factor."""
        return Accumulator(self.d, self.other, self.form)

    def merged(self, other: Accumulator) -> Accumulator:
        total = self.empty()
        total.rows, total.count, total.matrix = self.rows + other.rows, self.count + other.count, self.matrix
        if other.matrix is not None:
            total.matrix = other.matrix if total.matrix is None else total.matrix + other.matrix
        total._settle()
        return total

    def settle(self, form: str) -> None:
        """Hold it in another form from here on."""
        self.form = form
        self._settle()

    def packed(self) -> Accumulator:
        """For a message: of a matrix the upper triangle, which says all of it."""
        if self.matrix is None:
            return self
        small = self.empty()
        small.rows, small.count, small.matrix = self.rows, self.count, self.matrix[:, _upper(self.matrix)]
        return small

    def unpacked(self) -> Accumulator:
        """What ``packed`` was made of."""
        if self.matrix is not None and self.matrix.ndim == 2:
            M = self.matrix.new_zeros(len(self.matrix), self.d, self.d)
            M[:, _upper(M)] = self.matrix
            self.matrix = M + M.triu(1).mT
        return self

    def _settle(self) -> None:
        N = sum([X.shape[-2] for X in self.rows])
        if self.matrix is not None or not as_rows(N, self.d, self.other, self.form):
            self._sum_up()

    def _sum_up(self) -> None:
        for X in self.rows:
            product = torch.bmm(X.mT, X)
            self.matrix = product if self.matrix is None else self.matrix + product
        self.rows = []

    def as_matrix(self) -> Tensor:
        """The sum itself; it is held as a matrix from here on."""
        if self.matrix is None:
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
            return MatrixFactor(self.matrix * (weight / self.count))
        return RowsFactor(self.joined(), self.count / weight)


def _upper(M: Tensor) -> Tensor:
    """Which entries of a matrix are on its diagonal or above."""
    return torch.ones(M.shape[-2:], dtype=torch.bool, device=M.device).triu()
