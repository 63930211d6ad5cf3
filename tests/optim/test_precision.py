"""Half precision, autocast, gradient scaling, and gradients that are tiny or large."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo
from mukron.linalg import Operator
from networks import INPUTS, Net

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}


DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


@pytest.fixture(params=METHODS)
def method(request):
    torch.manual_seed(0)
    return METHODS[request.param]


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def tensors(value):
    """All tensors of a nested state, those of prepared operators too."""
    if isinstance(value, Operator):
        value = value.state()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_keep_float32_factors(method, dtype):
    model = Net(8).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = method(model, lr=0.05, momentum=0.9, trust=None)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, X.to(dtype))
        optimizer.step()
    assert all(p.dtype == dtype for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for layer in optimizer.layers.values():
        state = optimizer.state[layer.anchor]
        assert list(tensors(state["operators"]))
        kept = [tensor for key in ("memory", "operators") for tensor in tensors(state.get(key, {}))]
        assert all(tensor.dtype == torch.float32 for tensor in kept if tensor.is_floating_point())
    loaded = method(Net(8).to(dtype), lr=0.05, momentum=0.9, trust=None)
    loaded.load_state_dict(optimizer.state_dict())
    again = list(tensors(loaded.state[next(iter(loaded.layers.values())).anchor]["operators"]))
    assert again
    assert all(tensor.dtype == torch.float32 for tensor in again)


def test_autocast_steps_nearly_as_float32(method):
    plain = Net(8)
    cast = copy.deepcopy(plain)
    options = {"fisher": "exact"} if method is KFAC else {}
    for model, enabled in ((plain, False), (cast, True)):
        optimizer = method(model, lr=0.05, **{"trust": None, **options})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            backward(model)
        optimizer.step()
    moved = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(plain.parameters(), Net(8).parameters(), strict=True)]
    )
    off = torch.cat([(a - b).detach().flatten() for a, b in zip(plain.parameters(), cast.parameters(), strict=True)])
    assert float(off.norm()) < 0.1 * float(moved.norm())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_grad_scaler_changes_nothing(fisher):
    """Gradients are unscaled by the scaler, empirical signals by us."""
    torch.manual_seed(0)
    plain = Net(8)
    scaled = copy.deepcopy(plain)
    reference = KFAC(plain, lr=0.05, fisher=fisher, trust=None)
    backward(plain)
    reference.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = KFAC(scaled, lr=0.05, fisher=fisher, grad_scaler=scaler if fisher == "empirical" else None, trust=None)
    scaler.scale(F.cross_entropy(scaled(X), Y)).backward()
    scaler.step(optimizer)
    scaler.update()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
def test_half_precision_resumes_bit_for_bit(fallback):
    torch.manual_seed(0)
    model = Net(8).bfloat16()
    optimizer = KFAC(model, lr=0.05, momentum=0.9, fallback=fallback, trust=None)
    x = X.bfloat16()
    step(model, optimizer, x)
    resumed = Net(8).bfloat16()
    resumed.load_state_dict(model.state_dict())
    again = KFAC(resumed, lr=0.05, momentum=0.9, fallback=fallback, trust=None)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer, x)
        step(resumed, again, x)
    assert all(map(torch.equal, values(model), values(resumed)))


def test_large_half_precision_gradients_are_finite():
    model = nn.Sequential(nn.Linear(512, 512)).half()
    optimizer = Shampoo(model, lr=1e-3, trust=None)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 200.0)
    optimizer.step()
    assert optimizer.skipped == 0


@pytest.mark.parametrize("scale", [1e-19, 1e-21])
@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
def test_tiny_gradients_never_become_nan(scale, solver):
    model = Net(8)
    optimizer = Shampoo(model, lr=0.1, solver=solver, trust=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            (F.cross_entropy(model(X), Y) * scale).backward()
            optimizer.step()
        except RuntimeError as error:
            assert "raise the damping" in str(error)  # noqa: PT017
    assert all(value.isfinite().all() for value in values(model))
