"""Factorizations that fail: what rescues them, how that is counted and told, and what is kept if nothing does."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional as F

from mukron import KFAC, Constant, Shampoo
from mukron.linalg import Operator
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def tensors(value):
    """All tensors of a nested state, those of prepared operators too."""
    if isinstance(value, Operator):
        value = value.state()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def test_a_failed_factorization_is_rescued_counted_and_told_once(monkeypatch):
    """A matrix that is not positive definite, as rounding can make one: more damping, counted by layer."""
    model = Net(8)
    optimizer = KFAC(model, lr=0.05, form="matrix", damping=Constant(0.1), trust=None)
    measure = KFAC.measure

    def spoiled(self, layer, statistics, step):
        blocks = measure(self, layer, statistics, step)
        if layer.name == "hidden":
            A = blocks["weight"]["A"]
            A.M = A.M - torch.eye(A.d) * (torch.linalg.eigvalsh(A.M)[0, 0] + 0.5)  # lowest eigenvalue -0.5
        return blocks

    monkeypatch.setattr(KFAC, "measure", spoiled)
    backward(model)
    with pytest.warns(RuntimeWarning, match='layer "hidden", factor A: factorized with 10 x damping'):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert optimizer.rescues == {"hidden A: 10 x damping": 2}
    assert "2 factorizations rescued" in optimizer.plan().title


def test_when_nothing_rescues_a_factor_the_last_inverse_is_kept(monkeypatch):
    model = Net(8)
    optimizer = KFAC(model, lr=0.05, form="matrix", trust=None)
    backward(model)
    optimizer.step()
    anchor = optimizer.layers["hidden"].anchor
    before = [tensor.clone() for tensor in tensors(optimizer.state[anchor]["operators"])]
    assert before
    measure = KFAC.measure

    def hopeless(self, layer, statistics, step):
        blocks = measure(self, layer, statistics, step)
        if layer.name == "hidden":
            blocks["weight"]["A"].M = -1e6 * torch.eye(blocks["weight"]["A"].d)[None]
        return blocks

    monkeypatch.setattr(KFAC, "measure", hopeless)
    optimizer.zero_grad()
    backward(model)
    with pytest.warns(RuntimeWarning, match="kept the last inverse"):
        optimizer.step()
    assert all(map(torch.equal, before, tensors(optimizer.state[anchor]["operators"])))
    fresh = Net(8)
    other = KFAC(fresh, lr=0.05, form="matrix", trust=None)
    backward(fresh)
    with pytest.raises(RuntimeError, match=r'layer "hidden": .* could not be factorized.*raise the damping'):
        other.step()


def test_a_failed_eigendecomposition_keeps_the_last_inverse(monkeypatch):
    model = Net(8)
    optimizer = Shampoo(model, lr=0.01, trust=None)
    backward(model)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[model.hidden.weight]["operators"])

    def fails(*arguments):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    optimizer.zero_grad()
    backward(model)
    with pytest.warns(RuntimeWarning, match="kept the last inverse"):
        optimizer.step()
    after = optimizer.state[model.hidden.weight]["operators"]
    assert torch.equal(before["weight"]["L"].P, after["weight"]["L"].P)
