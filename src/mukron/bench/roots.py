"""Inverse roots (M + rho I)^-e by every solver: time, and what float32 loses."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mukron.bench.measure import FEW, Options, Track, products, release, synchronize
from mukron.bench.result import Row, begun
from mukron.linalg import SOLVERS, FactorizationError, Matrix, MatrixFactor, Turned, kept_factor, turn

DAMPINGS = (1e-3, 1e-6)  # of the largest eigenvalue
POWERS = (Fraction(1, 4), Fraction(1))  # Shampoo's and K-FAC's
NOTES = (
    "median over turns in shuffled order; M: covariance of 2 x width samples, whose eigenvalues fall like 1 / i^2",
    "off by: |ours - truth| / |truth| (Frobenius), the truth by eigh in float64 on the CPU",
    "tracked: in the kept eigenbasis of what M was before its last two percent came, as Shampoo has it",
)
ONLY = {"cholesky": Fraction(1)}  # a solver of one power alone


@dataclass(frozen=True)
class Root:
    """One way to one root."""

    solver: str
    e: Fraction
    damping: float

    @property
    def name(self) -> str:
        return f"{self.solver}, e = {self.e}, damping {self.damping:g}"

    def __call__(self, M: Tensor, rho: Tensor) -> Tensor:
        operator, _ = MatrixFactor(M[None]).prepare(rho[None], self.e, self.solver)
        assert isinstance(operator, Matrix)
        return operator.P[0]


class TrackedRoot(Root):
    """In the eigenbasis of M before its last few samples came: as Shampoo finds it from one step to the next."""

    def __call__(self, M: Tensor, rho: Tensor) -> Tensor:
        basis, new = _before(M)
        kept = dict(basis)
        factor = kept_factor(kept, turn(kept, new)).mix(kept, 1.0, 1.0)
        operator, _ = factor.prepare(rho[None], self.e)
        assert isinstance(operator, Turned)
        return operator.matrix()[0]


@lru_cache(maxsize=1)
def _before(M: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The kept basis of M less a fiftieth of it that has its own directions, and that fiftieth as rows."""
    new = SHARE**0.5 * _root_of(M)
    new = new * torch.linspace(0, 2, len(new), dtype=M.dtype, device=M.device)[:, None]  # more of some than of others
    old = M - new.mT @ new
    values, vectors = torch.linalg.eigh(old.double())
    kept = {"Q": vectors.to(M)[None], "S": torch.diag(values.clamp_min(0)).to(M)[None], "renewals": 1, "spent": 0}
    return kept, new[None]


def _root_of(M: Tensor) -> Tensor:
    """Rows X with X^T X = M, of no order."""
    lower = torch.linalg.cholesky(M.double())
    turned, _ = torch.linalg.qr(torch.randn(M.shape, generator=torch.Generator().manual_seed(0)).double())
    rows: Tensor = (turned.to(lower.device) @ lower.mT).to(M)
    return rows


SHARE = 0.02  # of M that is new
ROOTS = tuple(
    Root(solver, e, damping) for damping in DAMPINGS for e in POWERS for solver in SOLVERS if ONLY.get(solver, e) == e
) + tuple(TrackedRoot("tracked", POWERS[0], damping) for damping in DAMPINGS)


def covariance(d: int) -> Tensor:
    """Of 2 d samples in float64 on the CPU; the standard deviations of the coordinates fall like 1 / i."""
    generator = torch.Generator().manual_seed(d)
    X = torch.randn(2 * d, d, generator=generator, dtype=torch.float64) / torch.arange(1, d + 1)
    return X.mT @ X / (2 * d)


class RootsRun:
    """One run; ``rows`` come size by size."""

    def __init__(self, options: Options, command: str) -> None:
        self.options = options
        self.result = begun(
            "roots",
            f"Inverse roots (M + damping largest(M) I)^-e of M [width, width], {options.precision}",
            "",
            NOTES,
            options,
            command,
        )

    def rows(self, track: Track[Root], rounds: Track[int]) -> Iterator[list[Row]]:
        with products(self.options.precision):
            for width in self.options.widths:
                yield self._at(width, track, rounds)

    def _at(self, d: int, track: Track[Root], rounds: Track[int]) -> list[Row]:
        device = self.options.device
        M = covariance(d).float().to(device)
        values, vectors = torch.linalg.eigh(M.double().cpu())
        largest = values[-1].to(M)
        differs: dict[Root, float] = {}
        failed: dict[Root, str] = {}
        last: dict[Root, int] = {}  # the round until which it is measured
        for root in track(ROOTS, f"width {d}: against float64"):
            try:
                found, taken = self._timed(root, M, root.damping * largest)
            except (FactorizationError, torch.OutOfMemoryError) as error:
                failed[root] = str(error).splitlines()[0]
                continue
            truth = (vectors * (values.clamp_min(0) + root.damping * values[-1]).pow(-float(root.e))) @ vectors.mT
            differs[root] = float((found.double().cpu() - truth).norm() / truth.norm())
            last[root] = FEW if taken > 1e3 * self.options.patience else self.options.rounds
        times: dict[Root, list[float]] = {root: [] for root in differs}
        order = random.Random(0)
        for number in rounds(range(self.options.rounds), f"width {d}: in turns"):
            for root in order.sample(list(times), len(times)):
                if number < last[root]:
                    times[root].append(self._timed(root, M, root.damping * largest)[1])
        release(device)
        return [
            Row(root.name, d, tuple(times.get(root, ())), differs=differs.get(root), failed=failed.get(root, ""))
            for root in ROOTS
        ]

    def _timed(self, root: Root, M: Tensor, rho: Tensor) -> tuple[Tensor, float]:
        synchronize(self.options.device)
        start = time.perf_counter()
        found = root(M, rho)
        synchronize(self.options.device)
        return found, 1e3 * (time.perf_counter() - start)
