"""Positive semi-definite factors, in the form that is cheapest: a matrix, a diagonal, or the rows they are made of.

Every form answers the same questions, one number a group: trace, largest eigenvalue, and the prepared inverse
(M + rho I)^-e. ``d`` is the size of the matrix M, whatever is held.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from mukron.linalg.cholesky import FactorizationError
from mukron.linalg.inverses import Inverse, invert
from mukron.linalg.operators import Diagonal, Matrix, Operator, SampleSpace
from mukron.linalg.roots import inverse_root_eigh, inverse_root_newton, largest_by_squaring

ONE = Fraction(1)
SOLVERS = ("cholesky", "eigh", "newton")
LARGE = 256  # from this size on a decomposition on a GPU costs many times what products do


class Factor:
    """A positive semi-definite matrix M a group."""

    d: int

    def trace(self) -> Tensor:
        raise NotImplementedError

    def largest_eigenvalue(self) -> Tensor:
        raise NotImplementedError

    def prepare(self, rho: Tensor, e: Fraction = ONE, solver: str = "cholesky") -> tuple[Operator, str]:
        """(M + rho I)^-e, and the rung of the ladder that was needed ("" if none)."""
        damped = self.damped(rho, e, solver)
        assert damped is not None
        (found,) = invert([damped])
        if isinstance(found, FactorizationError):
            raise found
        return self.operator(found), found.rung

    def damped(self, rho: Tensor, e: Fraction, solver: str) -> tuple[Tensor, Tensor] | None:
        """The matrix and damping whose inverse is all that ``operator`` needs; None: ``prepare`` goes its own way.

        So the inverses of many factors can be made at once.
        """
        return None

    def operator(self, inverse: Inverse) -> Operator:
        raise NotImplementedError


class MatrixFactor(Factor):
    """M itself [groups, d, d]."""

    def __init__(self, M: Tensor) -> None:
        self.M, self.d = M, M.shape[-1]

    def trace(self) -> Tensor:
        return self._trace

    @cached_property
    def _trace(self) -> Tensor:
        return self.M.diagonal(dim1=-2, dim2=-1).sum(-1)

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor, str]:
        """Eigenvalues, eigenvectors, and the rung of the ladder that gave them."""
        try:
            return *torch.linalg.eigh(self.M), ""
        except LinAlgError:
            pass
        try:  # float64 on the CPU has converged where a GPU's float32 has not
            values, vectors = torch.linalg.eigh(self.M.double().cpu())
        except LinAlgError as error:
            raise FactorizationError(f"a {list(self.M.shape)} matrix has no eigendecomposition: {error}") from error
        return values.to(self.M), vectors.to(self.M), "float64 on the CPU"

    def largest_eigenvalue(self) -> Tensor:
        """From the decomposition; of a large matrix on a GPU, where that is slow, by squaring."""
        if self.M.is_cuda and self.d >= LARGE and "eigh" not in self.__dict__:
            return largest_by_squaring(self.M)
        return self.eigh[0][..., -1].clamp_min(0)

    def prepare(self, rho: Tensor, e: Fraction = ONE, solver: str = "cholesky") -> tuple[Operator, str]:
        if solver == "cholesky" and e == 1:
            return super().prepare(rho, e, solver)
        if solver == "newton":
            return Matrix(inverse_root_newton(self.M, rho, e, largest=self.trace())), ""
        values, vectors, rung = self.eigh
        return Matrix(inverse_root_eigh(values, vectors, rho, e)), rung

    def damped(self, rho: Tensor, e: Fraction, solver: str) -> tuple[Tensor, Tensor] | None:
        return (self.M, rho) if solver == "cholesky" and e == 1 else None

    def operator(self, inverse: Inverse) -> Operator:
        return Matrix(inverse.matrix)


class DiagonalFactor(Factor):
    """M = diag(m), m [groups, d]."""

    def __init__(self, m: Tensor) -> None:
        self.m, self.d = m, m.shape[-1]

    def trace(self) -> Tensor:
        return self._trace

    @cached_property
    def _trace(self) -> Tensor:
        return self.m.sum(-1)

    def largest_eigenvalue(self) -> Tensor:
        return self.m.amax(-1)

    def prepare(self, rho: Tensor, e: Fraction = ONE, solver: str = "cholesky") -> tuple[Operator, str]:
        return Diagonal((self.m + rho.unsqueeze(-1)).pow(-float(e))), ""


class RowsFactor(Factor):
    """M = X^T X / n, held as its rows X [groups, N, d]: no d x d matrix is ever formed."""

    def __init__(self, X: Tensor, n: float) -> None:
        self.X, self.n, self.d = X, n, X.shape[-1]

    @cached_property
    def gram(self) -> Tensor:
        """X X^T / n [groups, N, N], whose eigenvalues are those of M, but for zeros."""
        return torch.baddbmm(self.X.new_empty(()), self.X, self.X.mT, beta=0, alpha=1 / self.n)

    def trace(self) -> Tensor:
        return self._trace

    @cached_property
    def _trace(self) -> Tensor:
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1)

    def largest_eigenvalue(self) -> Tensor:
        try:
            values = torch.linalg.eigvalsh(self.gram)
        except LinAlgError:
            values = MatrixFactor(self.gram).eigh[0]  # which knows other ways
        largest: Tensor = values[..., -1].clamp_min(0)
        return largest

    def prepare(self, rho: Tensor, e: Fraction = ONE, solver: str = "cholesky") -> tuple[Operator, str]:
        if e != 1:
            return MatrixFactor(self.X.mT @ self.X / self.n).prepare(rho, e, solver)
        return super().prepare(rho, e, solver)

    def damped(self, rho: Tensor, e: Fraction, solver: str) -> tuple[Tensor, Tensor] | None:
        return (self.gram, rho) if e == 1 else None

    def operator(self, inverse: Inverse) -> Operator:
        return SampleSpace(self.X, inverse.matrix, inverse.rho, self.n)
