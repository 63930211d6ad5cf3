"""Layer-wise Gauss-Newton in sample space.

Rows are samples x outputs, R of them. J [R, d_out d_in] holds every output's derivative by the layer's weight, chi the
derivative of the summed loss by the outputs. The update of a gradient G (as a vector g) is

    (J^T diag(chi)^2 J / n + rho I)^-1 g  =  (g - J~^T S J~ g / n) / rho

with J~ = diag(chi) J and S = (J~ J~^T / n + rho I)^-1; 1 / n is the weight of one position in the loss, that of a mean
over n samples. J~ J~^T = chi chi^T o (delta delta^T) o (h h^T) is formed from inputs and signals, not from J itself.
For the batch's own gradient, g = J^T chi / n, it is delta diag(chi~) h^T with chi~ = (diag(chi)^2 K + rho)^-1 chi
(A.4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mukron.linalg.factors import CHOLESKY, INVERSE_EXPONENT, Factor, LowRank, MatrixFactor, Operator
from mukron.linalg.inverses import factorize
from mukron.linalg.solvers import Solver


@dataclass(frozen=True)
class JacobianRows(Operator):
    """The prepared update for one layer; acts on G [groups, d_out, d_in].

    h [groups, rows, positions, d_in] and delta [groups, rows, positions, d_out], the errors multiplied into delta;
    ``lower``: the Cholesky factor of S^-1, with which a solution keeps digits that a product with S would lose.
    """

    h: Tensor
    delta: Tensor
    lower: Tensor
    rho: Tensor
    n: float | Tensor

    @property
    def form(self) -> str:
        return f"sample space, {self.h.shape[1]} rows"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return 2 * self.h.shape[1] * self.h.shape[2] * d_out * d_in

    def right(self, G: Tensor) -> Tensor:
        # J~ g, one number a row: delta^T G h, summed over positions and groups
        along = ((self.delta.flatten(1, 2) @ G) * self.h.flatten(1, 2)).sum((0, 2))
        inner = self._solved(along.reshape(self.h.shape[1:3]).sum(1))
        weighted = (self.delta * inner[None, :, None, None]).flatten(1, 2)
        return (G - weighted.mT @ self.h.flatten(1, 2) / self.n) / self.rho

    def of_own_gradient(self, G: LowRank) -> LowRank:
        """The same for a multiple of the batch's own gradient, G = c J~^T 1, without cancellation: c J~^T S 1."""
        inner = self._solved(self.lower.new_ones(self.h.shape[1])).repeat_interleave(self.h.shape[2])
        return LowRank(G.D * inner[None, :, None], G.H)

    def _solved(self, values: Tensor) -> Tensor:
        return torch.cholesky_solve(values[:, None], self.lower)[:, 0]


def kernel(h: Tensor, delta: Tensor) -> Tensor:
    """J~ J~^T [rows, rows]: the entrywise product of two Gram matrices, one of each side, summed over positions.

    With many positions those are larger than J~ itself, which is then formed.
    """
    rows, positions = h.shape[1:3]
    if rows * positions**2 > h.shape[0] * h.shape[3] * delta.shape[3]:
        J = torch.einsum("grpo,grpi->rgoi", delta, h).flatten(1)
        return J @ J.mT
    h, delta = h.flatten(1, 2), delta.flatten(1, 2)
    products = ((h @ h.mT) * (delta @ delta.mT)).sum(0)
    return products.reshape(rows, positions, rows, positions).sum((1, 3))


class KernelFactor(MatrixFactor):
    """K = J~ J~^T / n as a factor: its trace and eigenvalues are those of the layer's Gauss-Newton matrix."""

    def __init__(self, h: Tensor, delta: Tensor, n: float | Tensor) -> None:
        super().__init__(kernel(h, delta).unsqueeze(0) / n)
        self.h, self.delta, self.n = h, delta, n

    def double(self) -> Factor:
        return KernelFactor(self.h.double(), self.delta.double(), self.n)

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> None:
        return None

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        factorization = factorize(self.M[0], rho[0])
        operator = JacobianRows(self.h, self.delta, factorization.lower, factorization.rho[None], self.n)
        return operator, factorization.rescue
