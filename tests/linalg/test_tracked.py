"""Roots in a kept basis against plain eigendecompositions in float64, and which way each kind of change takes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mukron.linalg import tracked
from mukron.linalg.tracked import ROOT_TOLERANCE, Poles, ThinFactor, Turned, divided_differences, kept_factor, turn
from mukron.memory import EMA, Batch, Sum

QUARTER = Fraction(1, 4)
D = 40


def root(M, rho, e):
    values, vectors = torch.linalg.eigh(M)
    return (vectors * (values.clamp_min(0) + rho).pow(-float(e)).unsqueeze(-2)) @ vectors.mT


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def settled(d=D, groups=1, dtype=torch.float64):
    """A factor with a spread of eigenvalues, as it is after its first refresh; and its kept state."""
    kept, rows = {}, draw(groups, 2 * d, d, dtype=dtype) * torch.logspace(-2, 0, d, dtype=dtype)
    factor = kept_factor(kept, turn(kept, rows)).mix(kept, 1.0, 1.0)
    factor.prepare(torch.full((groups,), 1e-4, dtype=dtype), QUARTER)
    return kept, rows.mT @ rows


def follow(kept, rows, old=1.0, e=QUARTER):
    factor = kept_factor(kept, turn(kept, rows)).mix(kept, old, 1.0)
    operator, rescue = factor.prepare(rows.new_full(rows.shape[:1], 1e-4), e)
    assert rescue == ""
    return operator


def off(P, expected):
    """Root mean square of the relative error, P = X^1/2 (I + error) X^1/2."""
    half = root(expected, 0.0, Fraction(1, 2))
    error = half @ P @ half - torch.eye(P.shape[-1], dtype=P.dtype)
    return float(error.square().sum((-2, -1)).div(P.shape[-1]).amax().sqrt())


@pytest.mark.parametrize("e", ["1/4", "1/2", "1", "2/3", "3/4", "2"])
def test_divided_differences_of_close_equal_and_far_numbers(e):
    e = Fraction(e)
    x = torch.tensor([1.0, 1.0, 1 + 1e-6, 1.5, 1e-6, 1e-6 * (1 + 1e-5), 1e3], dtype=torch.float32)
    wide = x.double()
    gap = wide.unsqueeze(-1) - wide
    middle = (wide.unsqueeze(-1) + wide) / 2
    near = gap.abs() < 1e-4 * middle
    plain = (wide.unsqueeze(-1).pow(-float(e)) - wide.pow(-float(e))) / gap.where(~near, 1.0)
    expected = plain.where(~near, -float(e) * middle.pow(-float(e) - 1))
    assert torch.allclose(divided_differences(x, e).double(), expected, rtol=2e-6)


@pytest.mark.parametrize("e", ["1/4", "1/2"])
@pytest.mark.parametrize(("size", "way"), [(1e-3, "first"), (0.1, "corrected"), (3.0, "renewed")])
def test_larger_changes_take_the_dearer_way_and_all_are_within_the_tolerance(size, way, e):
    e = Fraction(e)
    kept, M = settled()
    # a change of a given relative size in every direction: rows that are white in the factor's own measure
    rows = (size**0.5 * draw(1, D, D, seed=1) / D**0.5 * 2) @ root(M, 0.0, Fraction(-1, 2))
    operator = follow(kept, rows, e=e)
    assert isinstance(operator, Turned)
    found = "renewed" if kept["renewals"] > 1 else "corrected" if kept["spent"] else "first"
    assert found == way
    assert off(operator.matrix(), root(M + rows.mT @ rows, 1e-4, e)) <= 2 * ROOT_TOLERANCE


def test_corrections_are_not_made_for_longer_than_a_renewal_would_cost():
    kept, M = settled()
    white = root(M, 0.0, Fraction(-1, 2))
    ways = []
    for seed in range(12):
        before = kept["renewals"], kept["spent"]
        follow(kept, (draw(1, D, D, seed=seed + 1) / D**0.5) @ white)
        ways.append("renewed" if kept["renewals"] > before[0] else "corrected" if kept["spent"] > before[1] else "")
    assert 1 <= ways.count("renewed") <= 4, ways
    assert ways.count("corrected") >= 2, ways
    assert kept["spent"] <= 9


def test_what_commutes_needs_no_renewal_however_much_it_grows():
    kept, M = settled()
    for _ in range(5):
        rows = 10 * root(M, 0.0, Fraction(-1, 2))
        operator = follow(kept, rows)
        M = M + rows.mT @ rows
    assert kept["renewals"] == 1
    assert kept["spent"] == 0
    assert torch.allclose(operator.matrix(), root(M, 1e-4, QUARTER), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory", [Sum(), EMA(0.9), Batch()])
@pytest.mark.parametrize("rows", [1, 2, 30])
def test_groups_and_memories_against_the_dense_matrix(memory, rows, monkeypatch):
    """Rows few and many, in two groups, over enough steps to renew both forms."""
    monkeypatch.setattr(tracked, "MAX_THIN_ROWS", 16)
    d = 32
    kept, total = {}, torch.zeros(2, d, d, dtype=torch.float64)
    rho = torch.tensor([1e-3, 1e-2], dtype=torch.float64)
    for step in range(2 * 16 // rows + 3 if rows < 30 else 20):
        X = draw(2, rows, d, seed=step) * torch.logspace(-1, 0, d, dtype=torch.float64)
        new = X.mT @ X
        if isinstance(memory, EMA):
            total = memory.decay * total + (1 - memory.decay) * new
            M = total / (1 - memory.decay ** (step + 1))
        else:
            M = total = total + new if isinstance(memory, Sum) else new
        factor = memory.update(kept, kept_factor(kept, turn(kept, X)))
        assert torch.allclose(factor.trace(), M.diagonal(dim1=-2, dim2=-1).sum(-1))
        largest = torch.linalg.eigvalsh(M)[..., -1]
        assert bool((factor.largest_eigenvalue() <= largest * (1 + 1e-9)).all())
        operator, _ = factor.prepare(rho, QUARTER)
        expected = root(M, rho.unsqueeze(-1), QUARTER)
        P = operator.right(torch.eye(d, dtype=torch.float64).expand(2, d, d))
        assert off(P, expected) <= (1e-5 if rows < 30 else 2 * ROOT_TOLERANCE), step
    assert kept["renewals"] > 0 or isinstance(memory, Batch)


def test_the_largest_eigenvalue_is_right_to_well_below_a_percent():
    worst = 0.0
    for rows in (2, 30):
        kept, total = {}, torch.zeros(1, 48, 48, dtype=torch.float64)
        for step in range(60):
            X = draw(1, rows, 48, seed=step) * torch.logspace(-1, 0, 48, dtype=torch.float64)
            total = total + X.mT @ X
            factor = kept_factor(kept, turn(kept, X)).mix(kept, 1.0, 1.0)
            worst = max(worst, float(1 - factor.largest_eigenvalue() / torch.linalg.eigvalsh(total)[..., -1]))
            factor.prepare(torch.tensor([1e-4], dtype=torch.float64), QUARTER)
    assert 0 <= worst < 0.01


@pytest.mark.parametrize("e", [0.25, 0.5, 0.75, 1 / 6])
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e10])
def test_poles_hold_over_the_whole_spectrum(e, condition):
    D = torch.logspace(0, 1, 30, dtype=torch.float64).log10().mul(torch.tensor(condition).log10()).pow(1)
    D = 10 ** (D - D.min()).unsqueeze(0) - 1
    Z = draw(1, 3, 30) * 10
    operator = Poles.prepare(torch.eye(30, dtype=torch.float64)[None], D, Z, torch.ones(1, dtype=torch.float64), e)
    eye = torch.eye(30, dtype=torch.float64)[None]
    values, vectors = torch.linalg.eigh(torch.diag_embed(D) + Z.mT @ Z)
    expected = (vectors * (values.clamp_min(0) + 1).pow(-e).unsqueeze(-2)) @ vectors.mT
    assert off(operator.inside(eye), expected) < 1e-4


def test_float32_thin_factors_lose_no_digits_to_small_damping():
    kept = {}
    for step in range(20):
        X = draw(1, 1, 64, seed=step, dtype=torch.float32)
        factor = kept_factor(kept, turn(kept, X)).mix(kept, 1.0, 1.0)
    assert isinstance(factor, ThinFactor)
    M = sum(
        draw(1, 1, 64, seed=step).float().double().mT @ draw(1, 1, 64, seed=step).float().double() for step in range(20)
    )
    operator, _ = factor.prepare(torch.tensor([1e-6]), QUARTER)
    expected = X.double() @ root(M, 1e-6, QUARTER)
    assert torch.allclose(operator.right(X).double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().amax()))


def test_the_basis_stays_orthogonal_over_many_renewals():
    kept = {}
    for step in range(40):
        X = draw(1, 40, D, seed=step, dtype=torch.float32)
        kept_factor(kept, turn(kept, X)).mix(kept, 0.0, 1.0).prepare(torch.tensor([1e-4]), QUARTER)
    assert kept["renewals"] == 40
    assert float((kept["Q"].mT @ kept["Q"] - torch.eye(D)).abs().amax()) < 5e-6
