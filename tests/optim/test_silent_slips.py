"""What would go wrong without a word: a plan that is not passed on, a loss that is not the likelihood's."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, GaussNewton, Shampoo
from networks import INPUTS, Net

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, INPUTS, generator=DATA), torch.randint(5, (20,), generator=DATA)


@pytest.mark.parametrize("trust", ["spectral", None])
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_that_is_not_passed_is_told(method, trust):
    model = Net(32)
    plan = mukron.parametrize(model, mukron.base_shapes(Net, width=8))
    with pytest.warns(UserWarning, match="was parametrized, but .* was given no plan") as caught:
        METHODS[method](model, lr=0.1, trust=trust)
    assert len(caught) == 1
    METHODS[method](model, plan, lr=0.1, trust=trust)  # a warning would be an error


@pytest.mark.parametrize("method", METHODS)
def test_the_standard_parametrization_needs_no_plan(method):
    model = Net(32)
    mukron.parametrize(model, mukron.base_shapes(Net, width=8), "sp")
    METHODS[method](model, lr=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_that_was_there_before_the_plan_is_told(method):
    model, shapes = Net(32), mukron.base_shapes(Net, width=8)
    optimizer = METHODS[method](model, lr=0.1)
    with pytest.warns(UserWarning, match=f"{type(optimizer).__name__} was created for this model before"):
        mukron.parametrize(model, shapes)
    other = Net(32)
    gone = METHODS[method](other, lr=0.1)
    gone.close()
    del gone
    gc.collect()
    mukron.parametrize(other, shapes)  # nothing trains it any more


# The loss and the likelihood.


def told(loss, **options):
    torch.manual_seed(0)
    model = Net(16)
    optimizer = KFAC(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(X)).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


TARGETS = F.one_hot(Y, 5).float()
OF_SOFTMAX = {
    "cross-entropy": lambda f: F.cross_entropy(f, Y),
    "smoothed": lambda f: F.cross_entropy(f, Y, label_smoothing=0.3),
    "soft targets": lambda f: F.cross_entropy(f, torch.full((20, 5), 0.2)),
    "focal": lambda f: ((1 - f.softmax(1)[range(20), Y]) ** 2 * F.cross_entropy(f, Y, reduction="none")).mean(),
    "with a small penalty": lambda f: F.cross_entropy(f, Y) + 1e-4 * f.logsumexp(1).square().mean(),
}


@pytest.mark.parametrize("fisher", ["mc", "exact"])
@pytest.mark.parametrize("trust", ["spectral", "kl", None])
@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_a_loss_that_is_no_cross_entropy_is_told_once(loss, trust, fisher):
    (message,) = told(lambda f: loss(f, TARGETS), trust=trust, fisher=fisher)
    assert 'likelihood="gaussian"' in message


@pytest.mark.parametrize("loss", OF_SOFTMAX.values(), ids=OF_SOFTMAX)
def test_losses_of_softmax_are_not_told(loss):
    assert told(loss) == []


def test_other_likelihoods_are_not_told():
    assert told(lambda f: F.mse_loss(f, TARGETS), likelihood="gaussian") == []
    assert told(lambda f: F.mse_loss(f, TARGETS), fisher="empirical") == []


# Gauss-Newton.


@pytest.mark.parametrize("trust", ["spectral", "kl", "graft:sgd", "graft:adam", "rms", None])
@pytest.mark.parametrize("damping", [1.0, 1e-3])
def test_gauss_newton_refreshes_at_every_step(damping, trust):
    """Its kernel is that of its own batch, whose size may change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = GaussNewton(model, damping=damping, trust=trust, lr=1e-3)
    refreshed = []
    optimizer.watch(lambda layer, block, factors, rho: refreshed.append((layer, factors["K"].d)))
    for i in range(20):
        size = 20 if i % 2 else 32
        x, y = torch.randn(size, 8), torch.randint(3, (size,))
        refreshed.clear()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert {name for name, _ in refreshed} == {"0", "2"}
        assert {rows for _, rows in refreshed} == {3 * size}
    assert (optimizer.steps, optimizer.skipped) == (20, 0)
