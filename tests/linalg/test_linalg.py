"""Prepared operators against plain dense algebra in float64, and the errors of every solver."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mukron.linalg import (
    Cholesky,
    DiagonalFactor,
    Eigh,
    FactorizationError,
    Identity,
    Inverse,
    LowRank,
    MatrixFactor,
    Newton,
    Operator,
    RowsFactor,
    add_to_diagonal,
    attempt,
    factorize,
    inverse_root_eigh,
    inverse_root_newton,
)
from mukron.linalg.inverses import inverse_of_lower
from mukron.linalg.kernel import KernelFactor, ParametersFactor
from mukron.linalg.roots import largest_by_squaring

GROUPS, N, D_IN, D_OUT, SAMPLES = 2, 7, 12, 9, 5


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def dense_power(M, rho, e):
    values, vectors = torch.linalg.eigh(M + rho[:, None, None] * torch.eye(M.shape[-1]))
    return vectors @ torch.diag_embed(values ** -float(e)) @ vectors.mT


def factors():
    X = torch.randn(GROUPS, N, D_IN)
    m = torch.rand(GROUPS, D_IN)
    return {
        "rows": (RowsFactor(X, SAMPLES), X.mT @ X / SAMPLES),
        "matrix": (MatrixFactor(X.mT @ X / SAMPLES), X.mT @ X / SAMPLES),
        "diagonal": (DiagonalFactor(m), torch.diag_embed(m)),
    }


@pytest.mark.parametrize("kind", ["rows", "matrix", "diagonal"])
@pytest.mark.parametrize(
    ("solver", "e"), [(Cholesky(), 1), (Eigh(), 1), (Eigh(), "1/4"), (Newton(), "1/4"), (Newton(), "2/3")]
)
def test_a_factor_in_any_form_is_its_matrix(kind, solver, e):
    factor, M = factors()[kind]
    rho, e = torch.tensor([0.3, 2.0]), Fraction(e)
    assert factor.d == D_IN
    assert torch.allclose(factor.trace(), M.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert torch.allclose(factor.largest_eigenvalue(), torch.linalg.eigvalsh(M)[:, -1])
    operator, rescue = factor.prepare(rho, e, solver)
    assert rescue == ""
    P, G = dense_power(M, rho, e), torch.randn(GROUPS, D_OUT, D_IN)
    assert torch.allclose(operator.right(G), G @ P, rtol=1e-9, atol=1e-10)
    assert torch.allclose(operator.left(G.mT), P @ G.mT, rtol=1e-9, atol=1e-10)
    again = Operator.from_state(operator.state())
    assert torch.equal(again.right(G), operator.right(G))


def test_identity():
    G = torch.randn(1, 2, 3)
    assert Identity().right(G) is G


def test_a_low_rank_gradient_is_preconditioned_as_its_matrix():
    D, H, F = torch.randn(1, N, D_OUT), torch.randn(1, N, D_IN), torch.randn(1, N + 2, D_OUT)
    G, rho = D.mT @ H, torch.tensor([0.1])
    for X in (H, H.clone()):  # its own rows by the push-through identity, others by Woodbury's
        A, _ = RowsFactor(X, SAMPLES).prepare(rho)
        B, _ = RowsFactor(F, SAMPLES).prepare(rho)
        expected = B.left(A.right(G))
        assert torch.allclose(LowRank(D, H).right(A).left(B).matrix(), expected, rtol=1e-9)


def test_sample_space_is_accurate_at_small_damping():
    """Own rows do not cancel: at rho = 1e-8 of the largest eigenvalue float32 still has four digits."""
    X, D = torch.randn(1, 64, 512), torch.randn(1, 64, 128)
    rho = 1e-8 * RowsFactor(X, 64).largest_eigenvalue()
    exact = D.mT @ X @ torch.linalg.inv(X.mT @ X / 64 + rho[:, None, None] * torch.eye(512))
    operator, _ = RowsFactor(X.float(), 64).prepare(rho.float())
    low = LowRank(D.float(), operator.X).right(operator).matrix()
    assert float((low - exact).norm() / exact.norm()) < 1e-4


def test_damping_does_not_add_up():
    M = torch.eye(3).expand(1, 3, 3).clone()
    add_to_diagonal(M, torch.tensor([1.0]))
    MatrixFactor(M).prepare(torch.tensor([1.0]))
    assert torch.equal(M[0], torch.eye(3))


@pytest.mark.parametrize(("lowest", "rescue"), [(0.5, ""), (-0.5, "10 x damping"), (-5.0, "100 x damping")])
def test_damping_is_raised_as_far_as_it_must_be(lowest, rescue):
    M = torch.diag(torch.tensor([lowest, 1.0, 2.0]))[None]
    found = factorize(M, torch.tensor([0.1]))
    assert found.rescue == rescue
    damped = M + found.rho[:, None, None] * torch.eye(3)
    assert torch.allclose(found.lower @ found.lower.mT, damped)


def test_a_damping_that_float32_loses_is_rescued_by_float64():
    """A damping that is lost in float32, ten and hundred times over, beside a singular matrix of ones."""
    M, rho = torch.ones(1, 2, 2, dtype=torch.float32), torch.tensor([1e-10], dtype=torch.float32)
    found = factorize(M, rho)
    assert found.rescue == "float64"
    assert found.lower.dtype == torch.float32


@pytest.mark.parametrize("form", ["matrix", "rows"])
def test_an_attempt_says_of_every_group_whether_it_went_well(form):
    """One group that cannot be factorized leaves the others as they are."""
    X = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X[1, 2, 3] = float("nan")
    factor = RowsFactor(X, 4) if form == "rows" else MatrixFactor(X.mT @ X / 4)
    rho = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    ((inverse,), (number,)) = attempt([factor.damped(rho, Fraction(1), Cholesky())])
    operator = factor.operator(Inverse(inverse, rho))
    assert number.isfinite().tolist() == [True, False, True]
    G = torch.randn(3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for group in (0, 2):
        alone = type(factor)(X[group, None], 4) if form == "rows" else MatrixFactor(factor.M[group, None])
        expected = alone.prepare(rho[group, None])[0].right(G[group, None])
        assert torch.allclose(operator.right(G)[group], expected[0], rtol=1e-12)


@pytest.mark.parametrize("d", [1, 64, 65, 257, 700])
def test_the_inverse_of_a_triangular_matrix_by_products(d):
    X = torch.randn(GROUPS, 2 * d, d)
    lower = torch.linalg.cholesky(X.mT @ X / d + 0.1 * torch.eye(d))
    for given in (lower, lower.float()):
        found, size = inverse_of_lower(given, leaf=64), torch.linalg.inv(lower).norm()
        assert (found - torch.linalg.inv(lower)).norm() < 50 * torch.finfo(given.dtype).eps * size
        assert not found.triu(1).any()


def test_what_nothing_rescues_is_an_error():
    with pytest.raises(FactorizationError, match="could not be factorized"):
        factorize(torch.full((1, 2, 2), float("nan")), torch.tensor([1.0]))
    with pytest.raises(FactorizationError):
        factorize(-1000 * torch.eye(2)[None], torch.tensor([1.0]))


@pytest.mark.parametrize("e", ["1/2", "1/4", "1/3", "3/4", "1"])
@pytest.mark.parametrize(("dtype", "condition", "limit"), [(torch.float64, 1e6, 1e-8), (torch.float32, 1e4, 3e-3)])
def test_roots_agree_with_float64(e, dtype, condition, limit):
    """Relative error of both solvers against float64's eigendecomposition, by condition number."""
    Q, _ = torch.linalg.qr(torch.randn(40, 40))
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 40)
    M = (Q * values) @ Q.T
    rho, e = torch.tensor([1 / condition]), Fraction(e)
    exact = dense_power(M[None], rho, e)
    cast, small = M[None].to(dtype), rho.to(dtype)
    newton = inverse_root_newton(cast, small, e, largest=cast.diagonal(dim1=-2, dim2=-1).sum(-1))
    eigh = inverse_root_eigh(*torch.linalg.eigh(cast), small, e)
    for found in (newton, eigh):
        assert float((found.double() - exact).norm() / exact.norm()) < limit


def test_newton_says_when_it_fails():
    with pytest.raises(FactorizationError, match="left an error"):
        inverse_root_newton(torch.eye(3)[None], torch.tensor([1.0]), Fraction(1, 2), torch.tensor([9.0]), steps=1)


HARD = {
    "spread evenly": lambda d: torch.linspace(0, 1, d),
    "over decades": lambda d: torch.logspace(-12, 0, d),
    "two that compete": lambda d: torch.cat([torch.tensor([1.0, 0.992]), torch.zeros(d - 2)]),
    "one among many": lambda d: torch.cat([torch.ones(1), torch.full((d - 1,), 0.992)]),
    "all alike": torch.ones,
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e8])
def test_the_largest_eigenvalue_by_squaring(kind, scale):
    """Short of it by less than 1 percent, never above; at any scale and in float32."""
    d = 300
    Q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0))).Q
    values = HARD[kind](d)
    M = ((Q * values) @ Q.mT * scale).float()
    found = largest_by_squaring(torch.stack([M, 2 * M, torch.zeros_like(M)]))
    assert found[2] == 0
    for share in (found[0] / scale, found[1] / (2 * scale)):
        assert 0.99 < share < 1 + 1e-5


# Gauss-Newton's two forms.


@pytest.mark.parametrize(("positions", "groups", "outputs"), [(1, 1, 1), (1, 1, 5), (3, 1, 5), (2, 2, 4)])
def test_gauss_newton_is_the_same_in_the_space_of_rows_and_of_parameters(positions, groups, outputs):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(groups, 8, positions, 2, generator=generator, dtype=torch.float64)
    h = h.repeat_interleave(outputs, dim=1)
    delta = torch.randn(groups, 8 * outputs, positions, 3, generator=generator, dtype=torch.float64)
    G = torch.randn(groups, 3, 2, generator=generator, dtype=torch.float64)
    J = torch.einsum("grpo,grpi->rgoi", delta, h).flatten(1)
    rho = torch.tensor([0.3], dtype=torch.float64)
    expected = torch.linalg.solve(J.mT @ J / 7 + 0.3 * torch.eye(J.shape[1]).double(), G.flatten()).reshape(G.shape)
    for factor in (KernelFactor(h, delta, 7.0, outputs), ParametersFactor(h, delta, 7.0, outputs)):
        torch.testing.assert_close(factor.prepare(rho)[0].right(G), expected)
        torch.testing.assert_close(factor.trace(), J.square().sum()[None] / 7)
        torch.testing.assert_close(factor.largest_eigenvalue(), torch.linalg.eigvalsh(J @ J.mT)[-1:] / 7)
        assert factor.d == 8 * outputs


def test_gauss_newton_takes_the_smaller_form():
    h, delta = torch.randn(1, 10, 1, 2), torch.randn(1, 10, 1, 3)
    assert type(KernelFactor.of(h, delta, 1.0)) is ParametersFactor
    assert type(KernelFactor.of(h[:, :6], delta[:, :6], 1.0)) is KernelFactor
