"""Shampoo in a kept basis over real training runs, against eigendecompositions of plainly summed factors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, Batch, Shampoo, Sum
from mukron.data import load

DAMPING = 1e-4


@pytest.fixture(scope="module")
def digits():
    data = load("digits").train
    return data.inputs.flatten(1).double(), data.targets


def network(width=40, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(
        dtype
    )


def batches(digits, steps, size=64):
    x, y = digits
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(x), (size,), generator=generator)
        yield x[chosen], y[chosen]


def root(M):
    values, vectors = torch.linalg.eigh(M)
    damped = values.clamp_min(0) + DAMPING * values[-1]
    return (vectors * damped.pow(-0.25)) @ vectors.T


@pytest.mark.parametrize(("memory", "every"), [(Sum(), 1), (EMA(0.95), 1), (Sum(), 5), (Batch(), 1)])
def test_every_step_of_a_run_is_within_two_percent_of_the_exact_one(digits, memory, every):
    model, lr, steps = network(), 0.02, 150
    optimizer = Shampoo(
        model, lr=lr, damping=DAMPING, memory=memory, solver="tracked", factor_every=every, inverse_every=every
    )
    sums, roots, losses, errors = {}, {}, [], []
    for step, (x, y) in enumerate(batches(digits, steps)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        losses.append(float(loss.detach()))
        for index, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
            G = p.grad.reshape(len(p), -1)
            if step % every == 0:
                for side, new in (("L", G @ G.T), ("R", G.T @ G)):
                    last, decay = sums.get((index, side), torch.zeros_like(new)), getattr(memory, "decay", 0.0)
                    sums[index, side] = last + new if isinstance(memory, Sum) else decay * last + (1 - decay) * new
                    whole = 1.0 if isinstance(memory, Sum) else 1 - decay ** (step + 1)
                    roots[index, side] = root(sums[index, side] / whole)
            expected = roots[index, "L"] @ G @ roots[index, "R"]
            found = ((old - p.detach()) / lr).reshape(G.shape)
            errors.append(float((found - expected).norm() / expected.norm()))
    assert max(errors) < 0.02
    assert sum(losses[-10:]) / 10 < 0.3 * losses[0]
    if isinstance(memory, Sum):
        refreshed = steps // every
        assert all(renewed < 0.7 * refreshed for renewed in optimizer.renewals.values()), optimizer.renewals


def test_a_run_in_float32_learns_as_with_eigendecompositions(digits):
    losses = {}
    for solver in ("tracked", "eigh"):
        model = network(dtype=torch.float32)
        optimizer = Shampoo(model, lr=0.02, damping=1e-6, momentum=0.9, solver=solver)
        curve = []
        for x, y in batches(digits, 120):
            loss = F.cross_entropy(model(x.float()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
        losses[solver] = torch.stack(curve).unflatten(0, (6, 20)).mean(1)
    assert float(losses["eigh"][-1]) < 0.1
    assert torch.allclose(losses["tracked"], losses["eigh"], rtol=0.1, atol=0.01), losses


def test_a_larger_tolerance_renews_less_often(digits):
    renewals = []
    for tolerance in (0.005, 0.1):
        model = network()
        optimizer = Shampoo(model, lr=0.02, damping=DAMPING, solver="tracked", tolerance=tolerance)
        for x, y in batches(digits, 40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        renewals.append(sum(optimizer.renewals.values()))
    assert renewals[1] < 0.8 * renewals[0]
    with pytest.raises(ValueError, match="tolerance must be positive, got 0"):
        Shampoo(network(), tolerance=0)


def test_what_is_renewed_is_counted_and_saved(digits):
    model = network()
    optimizer = Shampoo(model, lr=0.02, solver="tracked")
    assert optimizer.renewals == {}
    assert Shampoo(network(), lr=0.02).renewals == {}
    for x, y in batches(digits, 3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.renewals["0.weight L"] == 3  # each of the first batches brings directions that are all new
    assert optimizer.renewals["0.bias L"] == 0  # one row a step: solved exactly in the basis it began with
    assert "0.bias R" not in optimizer.renewals  # a number
    other = Shampoo(copy.deepcopy(model), lr=0.02, solver="tracked")
    other.load_state_dict(optimizer.state_dict())
    assert other.renewals == optimizer.renewals


def test_watchers_see_the_trace_and_the_eigenvalues_of_the_factors(digits):
    model, seen, total = network(), {}, torch.zeros(40, 40, dtype=torch.float64)
    optimizer = Shampoo(model, lr=0.02, solver="tracked")
    optimizer.watch(lambda layer, block, factors, rho: seen.update({(layer, block): factors}))
    for x, y in batches(digits, 12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total += model[2].weight.grad @ model[2].weight.grad.T
        optimizer.step()
    factor = seen["2", "weight"]["L"]
    assert torch.allclose(factor.trace(), total.trace())
    assert torch.allclose(factor.largest_eigenvalue(), torch.linalg.eigvalsh(total)[-1], rtol=5e-3)


def test_a_skipped_step_leaves_no_gradient_behind(digits):
    """Steps between refreshes use their own gradient, whatever happened before."""
    model = network()
    optimizer = Shampoo(model, lr=0.02, solver="tracked", factor_every=2, inverse_every=2)
    for step, (x, y) in enumerate(batches(digits, 6)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step == 3:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        assert not optimizer._turned
    assert optimizer.skipped == 1
