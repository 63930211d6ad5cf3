"""The eigenbasis of a factor that changes a little from step to step, with no inverse and no root.

M = Q diag(lambda) Q^T.   The first Q is by ``eigh``; a later one by ``eigh`` or, at the price of one QR factorization,

Q <- the orthonormal factor of M Q           (one round of orthogonal iteration, kept warm from step to step)
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mukron.linalg.factors import (
    CHOLESKY,
    INVERSE_EXPONENT,
    DiagonalFactor,
    Factor,
    Identity,
    MatrixFactor,
    Operator,
    State,
)
from mukron.linalg.solvers import QR, Solver


@dataclass(frozen=True)
class Basis(Operator):
    """An orthonormal basis Q [groups, d, d]; unlike other operators it is no symmetric matrix.

    right(G) = G Q and left(G) = Q^T G are G in the basis; ``turned_back`` undoes them.
    """

    Q: Tensor

    @property
    def form(self) -> str:
        return f"basis {self.Q.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return 3 * d_out * d_in * (d_in if in_side else d_out)  # the gradient and its average there, the move back

    def right(self, G: Tensor) -> Tensor:
        return G @ self.Q


class BasisFactor(MatrixFactor):
    """M [groups, d, d], of which the eigenbasis alone is wanted; ``kept`` holds the last one."""

    tracked = True

    def __init__(self, M: Tensor, kept: State) -> None:
        super().__init__(M)
        self.kept = kept

    def mix(self, kept: State, old: float, new: float) -> Factor:
        super().mix(kept, old, new)
        return BasisFactor(kept["M"], kept)

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> None:
        return None

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        """The basis, largest eigenvalues first; damping and power have no part in it."""
        last, rescue = self.kept.get("Q"), ""
        if last is None or not isinstance(solver, QR):
            _, vectors, rescue = self.eigh
            Q = vectors.flip(-1)
        else:
            Q = torch.linalg.qr(self.M @ last.to(self.M.dtype))[0]
        self.kept["Q"] = Q
        return Basis(Q), rescue


class PlainFactor(DiagonalFactor):
    """A side that keeps its own coordinates; its diagonal shows whether numbers are finite."""

    def mix(self, kept: State, old: float, new: float) -> Factor:
        super().mix(kept, old, new)
        return PlainFactor(kept["m"])

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        return Identity(), ""


def turned(G: Tensor, L: Operator, R: Operator) -> Tensor:
    """Q_L^T G Q_R."""
    return R.right(L.left(G))


def turned_back(G: Tensor, L: Operator, R: Operator) -> Tensor:
    """Q_L G Q_R^T."""
    G = L.Q @ G if isinstance(L, Basis) else G
    return G @ R.Q.mT if isinstance(R, Basis) else G


def carried(V: Tensor, before: tuple[Operator, Operator], now: tuple[Operator, Operator]) -> Tensor:
    """Mean squares of a matrix's entries in one pair of bases, in another pair.

    With O = Q_before^T Q_now an entry there is sum_kl O_ki O_lj G_kl. Where entries are uncorrelated, as they are in an
    eigenbasis, the mean of its square is sum_kl O_ki^2 O_lj^2 V_kl. O^2 is doubly stochastic, so the sum of V stays.
    """
    for left, (old, new) in zip((True, False), zip(before, now, strict=True), strict=True):
        if isinstance(old, Basis) and isinstance(new, Basis) and old.Q is not new.Q:
            squares = (old.Q.to(new.Q.dtype).mT @ new.Q).square()
            V = squares.mT @ V if left else V @ squares
    return V
