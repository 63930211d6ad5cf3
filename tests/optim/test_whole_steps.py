"""Whatever a step refuses, it refuses before anything is changed; a skipped first step leaves no trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transactions import METHODS, MOMENTUM, OPTIONS, TRUST, backward, batches, build, differences, snapshot, train

from mukron import FOOF, KFAC, GaussNewton, Shampoo
from mukron.curvature import OVER_SAMPLES

BAD = {"weight_decay": "0.1", "momentum": "0.9", "lr": "fast"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_is_no_number_changes_nothing(method, momentum, fused):
    options = {"fused": fused} if "fused" in OPTIONS[method] else {}
    for number, trust in enumerate(TRUST):
        after = 0 if number % 2 else 2
        case = {"trust": trust, "momentum": momentum, "fallback": "sgd", **options}
        model, optimizer = build(method, case)
        twin, twin_optimizer = build(method, case)
        *good, bad = batches({}, after + 2)
        for data in good[:after]:
            train(model, optimizer, data)
            train(twin, twin_optimizer, data)
        for name, value in BAD.items():
            before, kept = snapshot(model, optimizer), optimizer.param_groups[0][name]
            optimizer.zero_grad()
            backward(model, bad)
            optimizer.param_groups[0][name] = value
            with pytest.raises((TypeError, ValueError)):
                optimizer.step()
            optimizer.param_groups[0][name] = kept
            assert differences(before, snapshot(model, optimizer)) == []
        for data in good[after:]:
            train(model, optimizer, data)
            train(twin, twin_optimizer, data)
        assert differences(snapshot(model, optimizer), snapshot(twin, twin_optimizer)) == []


def test_a_move_of_the_wrong_shape_changes_nothing(monkeypatch):
    model, optimizer = build("foof", {})
    (data,) = batches({}, 1)
    before = snapshot(model, optimizer)
    backward(model, data)
    monkeypatch.setattr(
        "mukron.layers.base.MatrixLayer.values", lambda layer, block, move: move.flatten(), raising=False
    )
    monkeypatch.setattr(type(optimizer.layers["head"].layer), "values", lambda layer, block, move: move.flatten())
    with pytest.raises(RuntimeError, match="but its move has"):
        optimizer.step()
    assert differences(before, snapshot(model, optimizer)) == []


# A first step that is skipped.

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 8, generator=DATA), torch.randint(3, (24,), generator=DATA)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
@pytest.mark.parametrize("scale", [1e30, float("nan")])
def test_nothing_is_found_in_a_step_that_is_skipped(scale, fisher):
    models = network(), network()
    optimizers = [KFAC(model, fisher=fisher) for model in models]
    (scale * F.cross_entropy(models[0](X), Y)).backward()
    with torch.no_grad():
        models[0][0].bias.grad[0] = float("inf")
    optimizers[0].step()
    assert (optimizers[0].skipped, optimizers[0].found_reduction) == (1, None)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            assert optimizer.found_reduction == OVER_SAMPLES
    assert differences(models[0].state_dict(), models[1].state_dict()) == []


# What is said of many skipped steps.


def told(method, x=X, scale=1.0, spoil=lambda model: None, steps=10):
    model = network()
    optimizer = method(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            (scale * F.cross_entropy(model(x), Y)).backward()
            spoil(model)
            optimizer.step()
    assert optimizer.skipped == steps
    (message,) = [str(warning.message) for warning in caught]
    return message


@pytest.mark.parametrize("method", [KFAC, FOOF])
def test_data_that_is_not_finite_is_named(method):
    message = told(method, x=X.clone().fill_(float("nan")))
    assert 'the input of layer "0" was not finite' in message
    assert "diverged" not in message


@pytest.mark.parametrize("method", [KFAC, GaussNewton])
def test_a_loss_that_is_not_finite_is_named(method):
    message = told(method, scale=float("nan"))
    assert "the loss or the model's output was not finite: check the loss" in message


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_a_gradient_that_is_not_finite_is_named(method):
    message = told(method, spoil=lambda model: model[2].bias.grad.fill_(float("inf")))
    assert 'the gradient of "2.bias" was not finite' in message
