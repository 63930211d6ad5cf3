"""Shampoo in a kept basis over real training runs, against eigendecompositions of plainly summed factors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, Batch, MaxEigenvalue, Shampoo, Sum, Tracked
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


def root(M, e):
    values, vectors = torch.linalg.eigh(M)
    damped = values.clamp_min(0) + DAMPING * values[-1]
    return (vectors * damped.pow(-e)) @ vectors.T


@pytest.mark.parametrize(("memory", "every"), [(Sum(), 1), (EMA(0.95), 1), (Sum(), 5), (Batch(), 1)])
def test_every_step_of_a_run_is_within_two_percent_of_the_exact_one(digits, memory, every):
    model, lr, steps = network(), 0.02, 60 if every == 1 else 150
    optimizer = Shampoo(
        model,
        lr=lr,
        damping=MaxEigenvalue(DAMPING, floor=0.0),
        memory=memory,
        solver="tracked",
        factor_every=every,
        inverse_every=every,
        trust=None,
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
            sides = ("L", "R") if p.ndim > 1 else ("L",)  # a vector has one, and its factor the whole exponent
            if step % every == 0:
                for side, new in zip(sides, (G @ G.T, G.T @ G), strict=False):
                    last, decay = sums.get((index, side), torch.zeros_like(new)), getattr(memory, "decay", 0.0)
                    sums[index, side] = last + new if isinstance(memory, Sum) else decay * last + (1 - decay) * new
                    whole = 1.0 if isinstance(memory, Sum) else 1 - decay ** (step + 1)
                    roots[index, side] = root(sums[index, side] / whole, 0.5 / len(sides))
            expected = roots[index, "L"] @ G
            expected = expected @ roots[index, "R"] if p.ndim > 1 else expected
            found = ((old - p.detach()) / lr).reshape(G.shape)
            errors.append(float((found - expected).norm() / expected.norm()))
    assert max(errors) < 0.02
    assert sum(losses[-10:]) / 10 < 0.3 * losses[0]
    if isinstance(memory, Sum):
        refreshed = steps // every
        assert all(renewed < 0.7 * refreshed for renewed in optimizer.renewals.values()), optimizer.renewals


@pytest.fixture(scope="module")
def float32_runs(digits):
    """Losses and renewals with eigendecompositions, with the usual tolerance, and with a larger one."""
    runs = {}
    for name, options in (("eigh", {}), ("tracked", {"solver": "tracked"}), ("0.1", {"solver": Tracked(0.1)})):
        model = network(dtype=torch.float32)
        optimizer = Shampoo(model, lr=0.02, damping=1e-6, momentum=0.9, **{"trust": None, **options})
        losses = []
        for x, y in batches(digits, 80):
            loss = F.cross_entropy(model(x.float()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs[name] = torch.stack(losses).unflatten(0, (4, 20)).mean(1), sum(optimizer.renewals.values())
    return runs


def test_a_run_in_float32_learns_as_with_eigendecompositions(float32_runs):
    (exact, _), (tracked, _), _ = float32_runs.values()
    assert float(exact[-1]) < 0.1
    assert torch.allclose(tracked, exact, rtol=0.1, atol=0.01), float32_runs


def test_a_larger_tolerance_renews_less_often(float32_runs):
    assert float32_runs["0.1"][1] < 0.8 * float32_runs["tracked"][1]


def test_what_is_renewed_is_counted_and_saved(digits):
    model = network()
    optimizer = Shampoo(model, lr=0.02, solver="tracked", trust=None)
    assert optimizer.renewals == {}
    assert Shampoo(network(), lr=0.02, trust=None).renewals == {}
    for x, y in batches(digits, 3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.renewals["0.weight L"] == 3  # each of the first batches brings directions that are all new
    assert optimizer.renewals["0.bias L"] == 0  # one row a step: solved exactly in the basis it began with
    assert "0.bias R" not in optimizer.renewals  # a number
    other = Shampoo(copy.deepcopy(model), lr=0.02, solver="tracked", trust=None)
    other.load_state_dict(optimizer.state_dict())
    assert other.renewals == optimizer.renewals


def test_watchers_see_the_trace_and_the_eigenvalues_of_the_factors(digits):
    model, seen, total = network(), {}, torch.zeros(40, 40, dtype=torch.float64)
    optimizer = Shampoo(model, lr=0.02, solver="tracked", trust=None)
    optimizer.watch(lambda layer, block, factors, rho: seen.update({(layer, block): factors}))
    for x, y in batches(digits, 12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total += model[2].weight.grad @ model[2].weight.grad.T
        optimizer.step()
    factor = seen["2", "weight"]["L"]
    assert torch.allclose(factor.trace(), total.trace())
    assert torch.allclose(factor.largest_eigenvalue(), torch.linalg.eigvalsh(total)[-1], rtol=5e-3)


def test_nothing_of_a_gradient_is_kept_after_its_step(digits):
    """A step that counts or is skipped holds no more than its state: a copy is no larger than one of that state."""
    model = network()
    optimizer = Shampoo(model, lr=0.02, solver="tracked", factor_every=2, inverse_every=2, trust=None)
    for step, (x, y) in enumerate(batches(digits, 6)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step in (2, 3):
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        restored = Shampoo(copy.deepcopy(model), lr=0.02, solver="tracked", factor_every=2, inverse_every=2, trust=None)
        restored.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        restored.zero_grad()
        assert len(pickle.dumps(optimizer)) < 1.02 * len(pickle.dumps(restored)), step
    assert optimizer.skipped == 2
