"""Inverse roots of factors that change a little from step to step, in an eigenbasis that is kept.

A factor M = Q S Q^T is held as S in a basis Q in which it was diagonal some steps ago; what comes in is turned into
that basis first. Small eigenvalues keep their digits so, and few steps need an eigendecomposition:

* ``TrackedFactor``: S is a matrix. With lambda the diagonal of S + rho I and E the rest, to first order

      (S + rho I)^-e = diag(lambda^-e) + F o E,    F_ij = (lambda_i^-e - lambda_j^-e) / (lambda_i - lambda_j),

  which is off by the square of E_ij / sqrt(lambda_i lambda_j), however close eigenvalues are. The error is measured.
  One above the tolerance is corrected by products or, where they do not help or have cost as much since the basis was
  made, by a new basis.
* ``ThinFactor``: what comes in has few rows (a bias has one, an output layer one a class): S = diag(D) + Z^T Z, and
  (S + rho I)^-e is a sum over poles, each solved by Woodbury's identity. Exact; renewed when Z has ``MAX_THIN_ROWS``
  rows.

What is kept lies in a plain dict of tensors, so that it can be saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from mukron.linalg.factors import CHOLESKY, INVERSE_EXPONENT, Factor, Matrix, MatrixFactor, Operator, State
from mukron.linalg.roots import largest_by_squaring
from mukron.linalg.solvers import Solver, Tracked

ROOT_TOLERANCE = Tracked().tolerance  # of (S + rho I)^-e, in the worst direction seen
REACH = 0.2  # an error up to which corrections converge fast
MAX_THIN_ROWS = 64  # the rows of Z above which a thin factor is renewed
PROBE_VECTORS = 2  # random vectors on which the error of a root is measured
POLES, MARGIN = 48, 10.0  # MARGIN: how far beyond the spectrum poles reach, in powers of Euler's number
CORRECTION_COST, RENEWAL_COST, RENEWAL_COST_ON_GPU = 3, 9, 36  # prices, in matrix products


class KeptFactor(Factor):
    """A factor in a basis that outlives it; ``rows`` are what this step brings, M_new = rows^T rows in that basis."""

    tracked = True

    def __init__(self, kept: State, rows: Tensor, tolerance: float = ROOT_TOLERANCE, applied_to: int = 0) -> None:
        self.kept, self.rows, self.tolerance, self.d = kept, rows, tolerance, rows.shape[-1]
        self.applied_to = applied_to
        self._prepared: tuple[Operator, str] | None = None

    def mix(self, kept: State, old: float, new: float) -> KeptFactor:
        for name, value in self.kept.items():
            kept.setdefault(name, value)
        self.kept = kept
        self._mix(old, new)
        return self

    def double(self) -> Factor:
        return self  # its operators are accurate to their tolerance, which is far above rounding

    def _mix(self, old: float, new: float) -> None:
        raise NotImplementedError

    def prepare(self, rho: Tensor, e: Fraction = INVERSE_EXPONENT, solver: Solver = CHOLESKY) -> tuple[Operator, str]:
        """Once: it may renew the basis, which is then no longer the one of M."""
        if self._prepared is None:
            operator, rescue = self._prepare(rho, e)
            if isinstance(operator, Turned) and self.applied_to > self.d:
                operator = Matrix(operator.matrix())  # it will be applied often enough to be multiplied out
            self._prepared = operator, rescue
        return self._prepared

    def _prepare(self, rho: Tensor, e: Fraction) -> tuple[Operator, str]:
        raise NotImplementedError

    def renewed(self, vectors: Tensor) -> None:
        """The basis is now that of the eigenvectors of S."""
        Q = self.kept["Q"] @ vectors if self.kept["renewals"] else vectors
        self.kept["renewals"] += 1
        if self.kept["renewals"] % 8 == 0:  # one Newton-Schulz step, so that rounding does not add up
            Q = 1.5 * Q - 0.5 * Q @ (Q.mT @ Q)
        self.kept["Q"] = Q


def kept_factor(kept: State, rows: Tensor, tolerance: float = ROOT_TOLERANCE, applied_to: int = 0) -> KeptFactor:
    """The form that suits what comes in.

    tolerance: relative error of its root in the worst direction seen. applied_to: rows that its root will be applied
    to before it is made again, if it serves several steps.
    """
    return (ThinFactor if is_thin(*rows.shape[-2:]) else TrackedFactor)(kept, rows, tolerance, applied_to)


def is_thin(rows: int, d: int) -> bool:
    return 4 * rows <= MAX_THIN_ROWS and 16 * rows <= d


def turn(kept: State, rows: Tensor) -> Tensor:
    """Rows [groups, n, d] in the basis that is kept; the first ones begin with the plain one."""
    if "Q" not in kept:
        groups, _, d = rows.shape
        kept.update(Q=torch.eye(d, dtype=rows.dtype, device=rows.device).repeat(groups, 1, 1), renewals=0)
        return rows
    turned: Tensor = rows @ kept["Q"]
    return turned


class TrackedFactor(KeptFactor, MatrixFactor):
    """S as a matrix; ``M`` is S, whose trace and eigenvalues are those of the factor."""

    def _mix(self, old: float, new: float) -> None:
        S = self.kept.get("S")
        # nothing says that S is near its diagonal: it is new, or was kept without ever being prepared
        self.strange = S is None or old == 0 or "spent" not in self.kept
        if S is None:
            self.M = new * (self.rows.mT @ self.rows)
        else:
            self.M = torch.baddbmm(S, self.rows.mT, self.rows, beta=old, alpha=new)
        self.kept["S"] = self.M

    def largest_eigenvalue(self) -> Tensor:
        if self.strange:
            return super().largest_eigenvalue()
        return _largest(lambda v: self.M @ v, self.M.diagonal(dim1=-2, dim2=-1))

    def _prepare(self, rho: Tensor, e: Fraction) -> tuple[Operator, str]:
        root = None if self.strange else self._near(rho, e)
        if root is not None:
            return Turned(self.kept["Q"], root), ""
        values, vectors, rescue = self.eigh
        values = values.clamp_min(0)
        self.renewed(vectors)
        self.kept.update(S=torch.diag_embed(values), spent=0)
        return Turned(self.kept["Q"], (values + rho.unsqueeze(-1)).pow(-float(e))), rescue

    def _near(self, rho: Tensor, e: Fraction) -> Tensor | None:
        """(S + rho I)^-e from its first-order form, or None where that does not come within the tolerance."""
        if e.numerator != 1 or e.denominator % 2:
            return None  # corrections and their residual are made for even roots
        S, half, shift = self.M, e.denominator // 2, rho[..., None, None]
        damped = S.diagonal(dim1=-2, dim2=-1) + rho.unsqueeze(-1)
        C = divided_differences(damped, e).mul_(S)
        C.diagonal(dim1=-2, dim2=-1).copy_(damped.pow(-float(e)))
        V, limit = self._directions(), REACH
        price = RENEWAL_COST_ON_GPU if S.is_cuda else RENEWAL_COST
        while True:
            error = float(e) * float(_residual(S, shift, C, half, V))  # one synchronisation a factor
            if error <= self.tolerance:
                return C
            if not error < limit or self.kept["spent"] + CORRECTION_COST > price:
                return None
            # C <- C - R / J with R = C^(p/2) (S + rho I) C^(p/2) - I, and J the derivative of R by C at the diagonal
            power = torch.linalg.matrix_power(C, half)
            R = (power @ S + shift * power) @ power
            R.diagonal(dim1=-2, dim2=-1).sub_(1)
            C = C - R / _slope(damped, e)
            self.kept["spent"] += CORRECTION_COST
            limit = error / 2

    def _directions(self) -> Tensor:
        """Where to look for an error: at random, and along what is new, where first order is worst."""
        d, dtype, device = self.d, self.M.dtype, self.M.device
        # mixed with the weights that the other side's root would give them, more or less
        weights = self.rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny).rsqrt()
        new = self.rows.mT @ (_probes(self.rows.shape[-2], dtype, device) * weights)
        return torch.cat([_probes(d, dtype, device).expand(len(new), -1, -1), new], dim=-1)


class ThinFactor(KeptFactor):
    """S = diag(D) + Z^T Z for few rows Z."""

    def _mix(self, old: float, new: float) -> None:
        kept, rows = self.kept, self.rows * new**0.5
        if "D" not in kept:
            kept.update(D=torch.zeros_like(rows[..., 0, :]), Z=rows)
        else:
            kept["D"] = old * kept["D"]
            kept["Z"] = torch.cat([old**0.5 * kept["Z"], rows], dim=-2) if old else rows
        self.D, self.Z = kept["D"], kept["Z"]

    def trace(self) -> Tensor:
        trace: Tensor = self.D.sum(-1) + self.Z.square().sum((-2, -1))
        return trace

    def largest_eigenvalue(self) -> Tensor:
        D, Z = self.D.unsqueeze(-1), self.Z
        return _largest(lambda v: D * v + Z.mT @ (Z @ v), self.D + Z.square().sum(-2))

    def _prepare(self, rho: Tensor, e: Fraction) -> tuple[Operator, str]:
        if self.Z.shape[-2] <= MAX_THIN_ROWS and e < 1:
            return Poles.prepare(self.kept["Q"], self.D, self.Z, rho, float(e)), ""
        values, vectors, rescue = MatrixFactor(torch.diag_embed(self.D) + self.Z.mT @ self.Z).eigh
        values = values.clamp_min(0)
        self.renewed(vectors)
        self.kept.update(D=values, Z=self.Z[..., :0, :])
        return Turned(self.kept["Q"], (values + rho.unsqueeze(-1)).pow(-float(e))), rescue


@dataclass(frozen=True)
class InBasis(Operator):
    """P = Q C Q^T; says what C is by ``inside``."""

    Q: Tensor

    def back(self, G: Tensor) -> Tensor:
        turned: Tensor = G @ self.Q.mT
        return turned

    def lies_in(self, Q: Tensor | None) -> bool:
        return self.Q is Q

    def right(self, G: Tensor) -> Tensor:
        return self.back(self.inside(G @ self.Q))


@dataclass(frozen=True)
class Turned(InBasis):
    """C is a matrix [groups, d, d] or a diagonal [groups, d]."""

    C: Tensor

    @property
    def form(self) -> str:
        return f"{'eigenbasis' if self.C.ndim == 2 else 'kept basis'} {self.Q.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return (self.C.ndim) * d_out * d_in * (d_in if in_side else d_out)

    def inside(self, G: Tensor) -> Tensor:
        return G * self.C.unsqueeze(-2) if self.C.ndim == 2 else G @ self.C

    def matrix(self) -> Tensor:
        return self.back(self.inside(self.Q))


@dataclass(frozen=True)
class Poles(InBasis):
    """C = (diag(D) + Z^T Z)^-e for few rows Z, 0 < e < 1, as a sum over poles s of (diag(D) + Z^T Z + s I)^-1.

    x^-e = sin(pi e) / pi  integral of s^-e / (s + x) ds,  by the trapezoidal rule in log s. Its two tails are geometric
    series and are added in closed form, as ``constant`` and as a pole at 0.
    """

    D: Tensor  # damped
    Z: Tensor
    poles: Tensor  # [groups, POLES + 1]
    weights: Tensor
    constant: Tensor
    lower: Tensor  # Cholesky factors of I + Z (D + s)^-1 Z^T, [groups, POLES + 1, rows, rows]

    @classmethod
    def prepare(cls, Q: Tensor, D: Tensor, Z: Tensor, rho: Tensor, e: float) -> Poles:
        # in float64: Woodbury's identity loses as many digits as D + rho and Z^T Z differ in size
        D, Z = D.double() + rho.double().unsqueeze(-1), Z.double()
        low = D.amin(-1).log() - MARGIN
        high = (D.amax(-1) + Z.square().sum((-2, -1))).log() + MARGIN
        h = ((high - low) / (POLES - 1)).unsqueeze(-1)
        u = low.unsqueeze(-1) + h * torch.arange(POLES, device=D.device)
        scale = math.sin(math.pi * e) / math.pi * h
        before = ((1 - e) * low.unsqueeze(-1)).exp() / torch.expm1((1 - e) * h)
        after = (-e * high.unsqueeze(-1)).exp() / torch.expm1(e * h)
        poles = torch.cat([torch.zeros_like(h), u.exp()], dim=-1)
        weights = scale * torch.cat([before, ((1 - e) * u).exp()], dim=-1)
        K = (Z.unsqueeze(1) / (D.unsqueeze(1) + poles.unsqueeze(-1)).unsqueeze(-2)) @ Z.mT.unsqueeze(1)
        K.diagonal(dim1=-2, dim2=-1).add_(1)
        lower = torch.linalg.cholesky_ex(K)[0]
        return cls(Q, D, Z, poles, weights, (scale * after).squeeze(-1), lower)

    @property
    def form(self) -> str:
        return f"kept basis {self.Q.shape[-1]}, {self.Z.shape[-2]} rows"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return 2 * d_out * d_in * (d_in if in_side else d_out)

    def inside(self, G: Tensor) -> Tensor:
        X = G.double()
        inverse = 1 / (self.D.unsqueeze(1) + self.poles.unsqueeze(-1)).unsqueeze(-2)
        Y = X.unsqueeze(1) * inverse  # [groups, poles, n, d]
        inner = torch.cholesky_solve(self.Z.unsqueeze(1) @ Y.mT, self.lower)
        Y = Y - (inner.mT @ self.Z.unsqueeze(1)) * inverse
        total = self.constant[:, None, None] * X + (self.weights[..., None, None] * Y).sum(1)
        return total.to(G.dtype)


def divided_differences(x: Tensor, e: Fraction) -> Tensor:
    """(x_i^-e - x_j^-e) / (x_i - x_j) for positive x [..., d], without cancellation.

    With e = s / p and b = x^(1/p):  - sum_k<s b_i^k b_j^(s-1-k) / (b_i^s b_j^s sum_k<p b_i^k b_j^(p-1-k)).
    """
    s, p = e.numerator, e.denominator
    b = x.pow(1 / p)
    return _mixed_powers(b, range(s)).neg_().div_(_mixed_powers(b, range(s, s + p)))


def _mixed_powers(b: Tensor, exponents: range) -> Tensor:
    """sum over k of b_i^k b_j^l where k runs through the exponents upwards and l downwards, [..., d, d]."""
    powers = torch.stack([b.pow(k) for k in exponents], dim=-1)
    return powers @ powers.flip(-1).mT


def _slope(x: Tensor, e: Fraction) -> Tensor:
    """The derivative of C^(p/2) A C^(p/2) by C where both are diagonal, A = diag(x) and C = diag(x^-1/p)."""
    root = x.sqrt()
    return _mixed_powers(x.pow(-float(e)), range(e.denominator // 2)) * (root.unsqueeze(-1) + root.unsqueeze(-2))


def _residual(S: Tensor, rho: Tensor, C: Tensor, half: int, V: Tensor) -> Tensor:
    """The norm of R = C^half (S + rho I) C^half - I, as far as V, R V show it: the largest over all groups."""
    sizes = []
    for _ in range(2):
        V = V / V.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(V.dtype).tiny)
        W = _repeated(C, half, V)
        V = _repeated(C, half, S @ W + rho * W) - V
        sizes.append(V.norm(dim=-2).amax())
    return torch.maximum(*sizes)


def _repeated(C: Tensor, times: int, V: Tensor) -> Tensor:
    """C^times V."""
    for _ in range(times):
        V = C @ V
    return V


@lru_cache(maxsize=64)
def _probes(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs [d, PROBE_VECTORS], the same each time."""
    generator = torch.Generator().manual_seed(d)
    return (2 * torch.randint(2, (d, PROBE_VECTORS), generator=generator) - 1).to(device, dtype)


def _largest(times: Callable[[Tensor], Tensor], diagonal: Tensor, steps: int = 6) -> Tensor:
    """The largest eigenvalue of an S that is near its diagonal, never above it, by Lanczos' method.

    It starts where the diagonal is largest, with a little of everything else.
    """
    tiny = torch.finfo(diagonal.dtype).tiny
    start = 0.1 / diagonal.shape[-1] ** 0.5 * _probes(diagonal.shape[-1], diagonal.dtype, diagonal.device)[:, :1]
    start = start.repeat(len(diagonal), 1, 1).scatter_(-2, diagonal.argmax(-1)[:, None, None], 1.0)
    new, K, images = times(start), start[..., :0], start[..., :0]
    for _ in range(steps):
        for _ in range(2):  # once more, since the first leaves rounding behind
            new = new / new.norm(dim=-2, keepdim=True).clamp_min(tiny)
            new = new - K @ (K.mT @ new)
        size = new.norm(dim=-2, keepdim=True)
        # what shrinks in the second round too is rounding alone: S has no more directions to show
        K = torch.cat([K, torch.where(size > 0.5, new / size.clamp_min(tiny), 0.0)], dim=-1)
        new = times(K[..., -1:])
        images = torch.cat([images, new], dim=-1)
    return largest_by_squaring(K.mT @ images)
