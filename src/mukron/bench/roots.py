"""The benchmark of inverse roots (M + rho I)^-e by every solver: time, and numerical error in float32."""

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

from mukron.bench.measure import SLOW_ROUNDS, Options, ProgressTracker, product_precision, release_memory, synchronize
from mukron.bench.result import MethodResult, new_result
from mukron.linalg import FactorizationError, Matrix, MatrixFactor, Solver, Turned, kept_factor, turn

DAMPINGS = (1e-3, 1e-6)  # relative to the largest eigenvalue
ROOT_EXPONENTS = (Fraction(1, 4), Fraction(1))  # e of Shampoo and of K-FAC
ROOT_NOTES = (
    "median over turns in shuffled order; M: covariance of 2 x width samples, whose eigenvalues fall like 1 / i^2",
    "off by: |ours - truth| / |truth| (Frobenius), the truth by eigh in float64 on the CPU",
    "tracked: in the kept eigenbasis of what M was before its last two percent came, as Shampoo has it",
)
ONLY_EXPONENT = {"cholesky": Fraction(1)}  # solvers that compute one e only


@dataclass(frozen=True)
class RootCase:
    """An inverse root and the solver that computes it.

    Attributes:
        solver: The solver's name.
        e: The exponent of (M + rho I)^-e.
        damping: rho relative to the largest eigenvalue of M.

    Example:
        >>> RootCase("eigh", Fraction(1, 4), 1e-3).name
        'eigh, e = 1/4, damping 0.001'
    """

    solver: str
    e: Fraction
    damping: float

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.solver}, e = {self.e}, damping {self.damping:g}"

    def __call__(self, M: Tensor, rho: Tensor) -> Tensor:
        operator, _ = MatrixFactor(M[None]).prepare(rho[None], self.e, Solver.names[self.solver]())
        assert isinstance(operator, Matrix)
        return operator.P[0]


class TrackedRootCase(RootCase):
    """The root from a tracked eigenbasis: that of M without its newest samples, as in Shampoo from step to step."""

    def __call__(self, M: Tensor, rho: Tensor) -> Tensor:
        before, new = _tracked_state(M)
        state = dict(before)
        factor = kept_factor(state, turn(state, new)).mix(state, 1.0, 1.0)
        operator, _ = factor.prepare(rho[None], self.e)
        assert isinstance(operator, Turned)
        return operator.matrix()[0]


@lru_cache(maxsize=1)
def _tracked_state(M: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Splits M: returns the tracked eigenbasis of an old part, and a new part (a share of M) as rows."""
    new = NEW_SHARE**0.5 * _square_root_rows(M)
    new = new * torch.linspace(0, 2, len(new), dtype=M.dtype, device=M.device)[:, None]  # not proportional to M
    old = M - new.mT @ new
    values, vectors = torch.linalg.eigh(old.double())
    state = {"Q": vectors.to(M)[None], "S": torch.diag(values.clamp_min(0)).to(M)[None], "renewals": 1, "spent": 0}
    return state, new[None]


def _square_root_rows(M: Tensor) -> Tensor:
    """Returns rows X with X^T X = M, multiplied by a random rotation."""
    lower = torch.linalg.cholesky(M.double())
    rotation, _ = torch.linalg.qr(torch.randn(M.shape, generator=torch.Generator().manual_seed(0)).double())
    rows: Tensor = (rotation.to(lower.device) @ lower.mT).to(M)
    return rows


NEW_SHARE = 0.02  # the share of M that is new since the last step
ROOT_CASES = tuple(
    RootCase(solver, e, damping)
    for damping in DAMPINGS
    for e in ROOT_EXPONENTS
    for solver in ("cholesky", "eigh", "newton")
    if ONLY_EXPONENT.get(solver, e) == e
) + tuple(TrackedRootCase("tracked", ROOT_EXPONENTS[0], damping) for damping in DAMPINGS)


def covariance(d: int) -> Tensor:
    """Returns the covariance of 2 d samples whose i-th coordinate has standard deviation 1 / i.

    Args:
        d: The number of coordinates.

    Returns:
        The covariance [d, d] in float64 on the CPU.

    Example:
        >>> covariance(3).shape
        torch.Size([3, 3])
    """
    generator = torch.Generator().manual_seed(d)
    X = torch.randn(2 * d, d, generator=generator, dtype=torch.float64) / torch.arange(1, d + 1)
    return X.mT @ X / (2 * d)


class RootsRun:
    """A run of the benchmark of inverse roots.

    Args:
        options: The options; widths are the sizes of the matrix.
        command: The command that runs it again.

    Example:
        >>> run = RootsRun(Options((4,), rounds=1), "mukron bench roots --widths 4")
        >>> run.result.name
        'roots-cpu'
    """

    def __init__(self, options: Options, command: str) -> None:
        self.options = options
        self.result = new_result(
            "roots",
            f"Inverse roots (M + damping largest(M) I)^-e of M [width, width], {options.precision}",
            "",
            ROOT_NOTES,
            options,
            command,
        )

    def rows(self, track: ProgressTracker[RootCase], rounds: ProgressTracker[int]) -> Iterator[list[MethodResult]]:
        """Measures one size after the other.

        Args:
            track: Shows progress over the roots.
            rounds: Shows progress over the rounds.

        Yields:
            The measurements at one size.
        """
        with product_precision(self.options.precision):
            for width in self.options.widths:
                yield self._measure_width(width, track, rounds)

    def _measure_width(
        self, d: int, track: ProgressTracker[RootCase], rounds: ProgressTracker[int]
    ) -> list[MethodResult]:
        device = self.options.device
        M = covariance(d).float().to(device)
        values, vectors = torch.linalg.eigh(M.double().cpu())
        largest = values[-1].to(M)
        differs: dict[RootCase, float] = {}
        failed: dict[RootCase, str] = {}
        rounds_of: dict[RootCase, int] = {}
        for root in track(ROOT_CASES, f"width {d}: against float64"):
            try:
                computed, elapsed = self._timed(root, M, root.damping * largest)
            except (FactorizationError, torch.OutOfMemoryError) as error:
                failed[root] = str(error).splitlines()[0]
                continue
            exact = (vectors * (values.clamp_min(0) + root.damping * values[-1]).pow(-float(root.e))) @ vectors.mT
            differs[root] = float((computed.double().cpu() - exact).norm() / exact.norm())
            rounds_of[root] = SLOW_ROUNDS if elapsed > 1e3 * self.options.patience else self.options.rounds
        times: dict[RootCase, list[float]] = {root: [] for root in differs}
        order = random.Random(0)
        for number in rounds(range(self.options.rounds), f"width {d}: in turns"):
            for root in order.sample(list(times), len(times)):
                if number < rounds_of[root]:
                    times[root].append(self._timed(root, M, root.damping * largest)[1])
        release_memory(device)
        return [
            MethodResult(
                root.name, d, tuple(times.get(root, ())), differs=differs.get(root), failed=failed.get(root, "")
            )
            for root in ROOT_CASES
        ]

    def _timed(self, root: RootCase, M: Tensor, rho: Tensor) -> tuple[Tensor, float]:
        synchronize(self.options.device)
        start = time.perf_counter()
        computed = root(M, rho)
        synchronize(self.options.device)
        return computed, 1e3 * (time.perf_counter() - start)
