"""Positive semi-definite factors M, and the operators (M + rho I)^-e that are prepared from them.

A factor is held in the form that is cheapest: a matrix, a diagonal, or the rows it is made of. Every form answers the
same questions, with one number a group: trace, largest eigenvalue, and the prepared operator. ``d`` is the size of M.

An operator is a symmetric P, one a group. It acts on matrices G [groups, ., .]:  right(G) = G P,  left(G) = P G.
It holds plain tensors, so that it can be saved (``state``) and restored (``Operator.from_state``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from mukron.linalg.inverses import FactorizationError, Inverse, invert
from mukron.linalg.roots import inverse_root_eigh, inverse_root_newton, largest_by_squaring
from mukron.linalg.solvers import Cholesky, Newton, Solver

INVERSE_EXPONENT = Fraction(1)  # the e of a plain inverse, (M + rho I)^-1
CHOLESKY = Cholesky()
LARGE_ON_GPU = 256  # from this size on a decomposition on a GPU costs many times what products do
State = dict[str, Any]


class Factor:
    """A positive semi-definite matrix M a group."""

    d: int
    tracked: ClassVar[bool] = False  # holds a basis that outlives the step, whatever the memory

    def trace(self) -> Tensor:
        raise NotImplementedError

    def largest_eigenvalue(self) -> Tensor:
        raise NotImplementedError

    def double(self) -> Factor:
        """The same factor in float64."""
        raise NotImplementedError

    def mix(self, kept: State, old: float, new: float) -> Factor:
        """M <- old M_kept + new M, kept for the next step in ``kept``."""
        raise NotImplementedError

    def append(self, kept: State, batches: int) -> Factor:
        """The mean of the last ``batches`` factors, which are held in ``kept``."""
        raise NotImplementedError

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        """(M + rho I)^-e, and how a failed factorization was rescued ("" if none failed)."""
        damped = self.damped(rho, e, solver)
        assert damped is not None
        (inverse,) = invert([damped])
        if isinstance(inverse, FactorizationError):
            raise inverse
        return self.operator(inverse), inverse.rescue

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> tuple[Tensor, Tensor] | None:
        """The matrix and damping whose inverse is all that ``operator`` needs; None: call ``prepare`` instead.

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
        """Eigenvalues, eigenvectors, and how they were rescued."""
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
        """From the decomposition; for a large matrix on a GPU, where that is slow, by squaring."""
        if self.M.is_cuda and self.d >= LARGE_ON_GPU and "eigh" not in self.__dict__:
            return largest_by_squaring(self.M)
        return self.eigh[0][..., -1].clamp_min(0)

    def double(self) -> Factor:
        return MatrixFactor(self.M.double())

    def mix(self, kept: State, old: float, new: float) -> Factor:
        kept["M"] = _mixed(kept.get("M"), self.M, old, new)
        return MatrixFactor(kept["M"])

    def append(self, kept: State, batches: int) -> Factor:
        kept["batches"] = [*kept.get("batches", []), self.M][-batches:]
        return MatrixFactor(torch.stack(kept["batches"]).mean(0))

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        if isinstance(solver, Cholesky) and e == 1:
            return super().prepare(rho, e, solver)
        if isinstance(solver, Newton):
            return Matrix(inverse_root_newton(self.M, rho, e, largest=self.trace())), ""
        values, vectors, rescue = self.eigh
        return Matrix(inverse_root_eigh(values, vectors, rho, e)), rescue

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> tuple[Tensor, Tensor] | None:
        return (self.M, rho) if isinstance(solver, Cholesky) and e == 1 else None

    def operator(self, inverse: Inverse) -> Operator:
        return Matrix(inverse.matrix)


class DiagonalFactor(Factor):
    """M = diag(m), m [groups, d]."""

    def __init__(self, m: Tensor) -> None:
        self.m, self.d = m, m.shape[-1]

    def trace(self) -> Tensor:
        return self.m.sum(-1)

    def largest_eigenvalue(self) -> Tensor:
        return self.m.amax(-1)

    def double(self) -> Factor:
        return DiagonalFactor(self.m.double())

    def mix(self, kept: State, old: float, new: float) -> Factor:
        kept["m"] = _mixed(kept.get("m"), self.m, old, new)
        return DiagonalFactor(kept["m"])

    def append(self, kept: State, batches: int) -> Factor:
        kept["batches"] = [*kept.get("batches", []), self.m][-batches:]
        return DiagonalFactor(torch.stack(kept["batches"]).mean(0))

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        return Diagonal((self.m + rho.unsqueeze(-1)).pow(-float(e))), ""


class RowsFactor(Factor):
    """M = X^T X / n, held as its rows X [groups, N, d]: no d x d matrix is formed."""

    def __init__(self, X: Tensor, n: float | Tensor) -> None:
        self.X, self.n, self.d = X, n, X.shape[-1]

    @cached_property
    def gram(self) -> Tensor:
        """X X^T / n [groups, N, N], whose nonzero eigenvalues are those of M."""
        if isinstance(self.n, Tensor):  # a number that is not known here yet
            return torch.bmm(self.X, self.X.mT) / self.n
        return torch.baddbmm(self.X.new_empty(()), self.X, self.X.mT, beta=0, alpha=1 / self.n)

    def trace(self) -> Tensor:
        return self._trace

    @cached_property
    def _trace(self) -> Tensor:
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1)

    def matrix(self) -> MatrixFactor:
        return MatrixFactor(self.X.mT @ self.X / self.n)

    def largest_eigenvalue(self) -> Tensor:
        try:
            values = torch.linalg.eigvalsh(self.gram)
        except LinAlgError:
            values = MatrixFactor(self.gram).eigh[0]  # which has more ways
        largest: Tensor = values[..., -1].clamp_min(0)
        return largest

    def double(self) -> Factor:
        return RowsFactor(self.X.double(), self.n)

    def mix(self, kept: State, old: float, new: float) -> Factor:
        return self.matrix().mix(kept, old, new)

    def append(self, kept: State, batches: int) -> Factor:
        """Rows are kept divided by the root of their count, so that the mean of batches is a plain one."""
        kept["batches"] = [*kept.get("batches", []), self.X / self.n**0.5][-batches:]
        rows = [X.to(self.X.dtype) for X in kept["batches"]]
        return RowsFactor(torch.cat(rows, dim=-2), len(rows))

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        return super().prepare(rho, e, solver) if e == 1 else self.matrix().prepare(rho, e, solver)

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> tuple[Tensor, Tensor] | None:
        return (self.gram, rho) if e == 1 else None

    def operator(self, inverse: Inverse) -> Operator:
        return SampleSpace(self.X, inverse.matrix, inverse.rho, self.n)


def _mixed(kept: Tensor | None, M: Tensor, old: float, new: float) -> Tensor:
    if kept is None or old == 0:
        return M if new == 1 else new * M
    return old * kept.to(M.dtype) + (M if new == 1 else new * M)


class Operator:
    """A symmetric matrix that is applied and never looked at."""

    kinds: ClassVar[dict[str, type[Operator]]] = {}

    def __init_subclass__(cls) -> None:
        Operator.kinds[cls.__name__] = cls

    def right(self, G: Tensor) -> Tensor:
        raise NotImplementedError

    def left(self, G: Tensor) -> Tensor:
        return self.right(G.mT).mT

    # P = Q C Q^T for those that keep a basis Q; without one, Q = I and C = P

    def inside(self, G: Tensor) -> Tensor:
        """G C."""
        return self.right(G)

    def back(self, G: Tensor) -> Tensor:
        """G Q^T."""
        return G

    def lies_in(self, Q: Tensor | None) -> bool:
        """Whether Q is its basis."""
        return Q is None

    @property
    def form(self) -> str:
        """What is held, for people."""
        return type(self).__name__.lower()

    @property
    def memory(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.state().values() if isinstance(t, Tensor))

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        """Multiplications to apply it to a gradient of that size."""
        return 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what it holds; None: it holds nothing."""
        for field in fields(self):  # type: ignore[arg-type]
            if isinstance(held := getattr(self, field.name), Tensor):
                return held.dtype
        return None

    def to(self, place: torch.device | torch.dtype) -> Operator:
        """The same operator on that device or in that dtype; Lightning moves the state of optimizers by it."""
        state = {name: value.to(place) if isinstance(value, Tensor) else value for name, value in self.state().items()}
        return Operator.from_state(state)

    def double(self) -> Operator:
        """The same operator in float64."""
        return self.to(torch.float64)

    def state(self) -> State:
        return {"kind": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}  # type: ignore[arg-type]

    @staticmethod
    def from_state(state: State) -> Operator:
        return Operator.kinds[str(state["kind"])](**{name: value for name, value in state.items() if name != "kind"})


@dataclass(frozen=True)
class Identity(Operator):
    """P = I."""

    def right(self, G: Tensor) -> Tensor:
        return G


@dataclass(frozen=True)
class Matrix(Operator):
    """P itself [groups, d, d]."""

    P: Tensor

    @property
    def form(self) -> str:
        return f"matrix {self.P.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return d_out * d_in * (d_in if in_side else d_out)

    def right(self, G: Tensor) -> Tensor:
        return torch.bmm(G, self.P)

    def left(self, G: Tensor) -> Tensor:
        return torch.bmm(self.P, G)


@dataclass(frozen=True)
class Diagonal(Operator):
    """P = diag(p), p [groups, d]."""

    p: Tensor

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return d_out * d_in

    def right(self, G: Tensor) -> Tensor:
        return G * self.p.unsqueeze(-2)


@dataclass(frozen=True)
class SampleSpace(Operator):
    """P = (X^T X / n + rho I)^-1 for few rows X [groups, N, d], N < d, without a d x d matrix.

    S = (X X^T / n + rho I)^-1 is N x N, and by Woodbury's identity  P = (I - X^T S X / n) / rho. The subtraction
    cancels: beside the result, rounding is as large as an eigenvalue of X^T X / n beside rho.
    """

    X: Tensor
    S: Tensor
    rho: Tensor
    n: float | Tensor

    @property
    def form(self) -> str:
        return f"sample space, {self.X.shape[-2]} rows of {self.X.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return 2 * self.X.shape[-2] * d_out * d_in

    def right(self, G: Tensor) -> Tensor:
        # G P = (G - (G X^T S) X / n) / rho
        S, alpha = self._over_n()
        along = torch.bmm(torch.bmm(G, self.X.mT), S)
        return torch.baddbmm(G, along, self.X, alpha=alpha).div_(self.rho[:, None, None])

    def left(self, G: Tensor) -> Tensor:
        S, alpha = self._over_n()
        along = torch.bmm(S, torch.bmm(self.X, G))
        return torch.baddbmm(G, self.X.mT, along, alpha=alpha).div_(self.rho[:, None, None])

    def _over_n(self) -> tuple[Tensor, float]:
        """-S / n, as a matrix and a number that multiplies it."""
        return (self.S / self.n, -1.0) if isinstance(self.n, Tensor) else (self.S, -1 / self.n)

    def own_rows(self, D: Tensor) -> Tensor:
        """What turns D^T X into D^T X P, with no division by rho:  X P = S X  (the push-through identity)."""
        return torch.bmm(self.S, D)


@dataclass(frozen=True)
class LowRank:
    """A gradient as a product: G = D^T H, signals D [groups, N, d_out] and inputs H [groups, N, d_in] of one batch."""

    D: Tensor
    H: Tensor

    def right(self, operator: Operator) -> LowRank:
        if isinstance(operator, SampleSpace) and same(operator.X, self.H):
            return LowRank(operator.own_rows(self.D), self.H)
        return LowRank(self.D, operator.right(self.H))

    def left(self, operator: Operator) -> LowRank:
        if isinstance(operator, SampleSpace) and same(operator.X, self.D):  # the empirical Fisher's
            return LowRank(operator.own_rows(self.D), self.H)
        return LowRank(operator.right(self.D), self.H)

    def matrix(self) -> Tensor:
        return self.D.mT @ self.H

    def to(self, dtype: torch.dtype) -> LowRank:
        return self if self.D.dtype == dtype == self.H.dtype else LowRank(self.D.to(dtype), self.H.to(dtype))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def total_count(counts: Sequence[float | Tensor]) -> float | Tensor:
    """What a sum over samples or rows of several passes is divided by: 1 where none counts, and the sum is zero."""
    total = sum(counts)
    return total.clamp_min(1.0) if isinstance(total, Tensor) else total
