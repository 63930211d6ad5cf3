"""Layer-wise Gauss-Newton, in sample space or, where a block has fewer parameters than there are rows, in their space.

Rows are samples x outputs, R of them. J [R, d_out d_in] holds every output's derivative by the layer's weight, chi the
derivative of the summed loss by the outputs. The update of a gradient G (as a vector g) is

    (J^T diag(chi)^2 J / n + rho I)^-1 g  =  (g - J~^T S J~ g / n) / rho

with J~ = diag(chi) J and S = (J~ J~^T / n + rho I)^-1; 1 / n is the weight of one position in the loss, that of a mean
over n samples. J~ J~^T = chi chi^T o (delta delta^T) o (h h^T) is formed from inputs and signals, not from J itself.
For the batch's own gradient, g = J^T chi / n, it is delta diag(chi~) h^T with chi~ = (diag(chi)^2 K + rho)^-1 chi
(A.4.3). A bias, and the weight of a small layer, have fewer parameters than there are rows: there J~^T J~ is formed.
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


@dataclass(frozen=True)
class JacobianColumns(Operator):
    """The prepared update of a block with few parameters; ``lower``: the Cholesky factor of J~^T J~ / n + rho I."""

    lower: Tensor

    @property
    def form(self) -> str:
        return f"matrix {self.lower.shape[-1]} of all parameters"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return (d_out * d_in) ** 2

    def right(self, G: Tensor) -> Tensor:
        return torch.cholesky_solve(G.reshape(-1, 1), self.lower).reshape(G.shape)

    def of_own_gradient(self, G: LowRank) -> Tensor:
        """The same for a multiple of the batch's own gradient."""
        return self.right(G.matrix())


def jacobian(h: Tensor, delta: Tensor) -> Tensor:
    """J~ [rows, parameters]."""
    return torch.einsum("grpo,grpi->rgoi", delta, h).flatten(1)


def kernel(h: Tensor, delta: Tensor, outputs: int = 1) -> Tensor:
    """J~ J~^T [rows, rows]: the entrywise product of two Gram matrices, one of each side, summed over positions.

    With many positions those are larger than J~ itself, which is then formed. ``outputs``: rows come in so many of one
    sample, with the same inputs, whose products are formed once.
    """
    rows, positions = h.shape[1:3]
    if rows * positions**2 > h.shape[0] * h.shape[3] * delta.shape[3]:
        J = jacobian(h, delta)
        return J @ J.mT
    groups, samples = h.shape[0], rows // outputs
    h, delta = h[:, ::outputs].flatten(1, 2), delta.flatten(1, 2)
    of_inputs = (h @ h.mT).view(groups, samples, 1, positions, samples, 1, positions)
    of_signals = (delta @ delta.mT).view(groups, *(samples, outputs, positions) * 2)
    return (of_inputs * of_signals).sum((0, 3, 6)).view(rows, rows)


class KernelFactor(MatrixFactor):
    """K = J~ J~^T / n as a factor: its trace and eigenvalues are those of the layer's Gauss-Newton matrix."""

    def __init__(self, h: Tensor, delta: Tensor, n: float | Tensor, outputs: int = 1) -> None:
        super().__init__(self._matrix(h, delta, outputs).unsqueeze(0) / n)
        self.h, self.delta, self.n, self.outputs, self.d = h, delta, n, outputs, h.shape[1]

    @staticmethod
    def of(h: Tensor, delta: Tensor, n: float | Tensor, outputs: int = 1) -> KernelFactor:
        """The factor in the smaller of its two forms; rows come in so many outputs of one sample."""
        few = h.shape[0] * h.shape[3] * delta.shape[3] < h.shape[1]
        return (ParametersFactor if few else KernelFactor)(h, delta, n, outputs)

    def _matrix(self, h: Tensor, delta: Tensor, outputs: int) -> Tensor:
        return kernel(h, delta, outputs)

    def double(self) -> Factor:
        return type(self)(self.h.double(), self.delta.double(), self.n, self.outputs)

    def damped(self, rho: Tensor, e: Fraction, solver: Solver) -> None:
        return None

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        factorization = factorize(self.M[0], rho[0])
        operator = JacobianRows(self.h, self.delta, factorization.lower, factorization.rho[None], self.n)
        return operator, factorization.rescue


class ParametersFactor(KernelFactor):
    """J~^T J~ / n, smaller than K and with the same trace and eigenvalues; its size ``d`` is still that of K."""

    def _matrix(self, h: Tensor, delta: Tensor, outputs: int) -> Tensor:
        J = jacobian(h, delta)
        return J.mT @ J

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        factorization = factorize(self.M[0], rho[0])
        return JacobianColumns(factorization.lower), factorization.rescue
