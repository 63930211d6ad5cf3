"""Layers change between float32 and float64 as their damping does; a gradient meets operators of either precision."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, GaussNewton

TRUSTS = ("spectral", "kl", "graft:sgd", "graft:adam", "rms", None)
MEMORIES = tuple(enumerate(("batch", "sum", "ema", "auto", "window:2")))
MOMENTA = {
    "none": {"momentum": 0.0},
    "gradient": {"momentum": mukron.GradientMomentum(0.9)},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}
INTERVALS = {"4": {"inverse_every": 4}, "2 / 4": {"factor_every": 2, "inverse_every": 4}, "3": {"inverse_every": 3}}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 8, generator=DATA), torch.randint(3, (24,), generator=DATA)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 8, 2, groups=2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x.unflatten(1, (4, 2)))).mean(-1))


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def train(model, optimizer, dampings):
    """By damping, one step each; the precisions of the operators after it."""
    precisions = []
    for damping in dampings:
        for group in optimizer.param_groups:
            group["damping"] = damping
        optimizer.zero_grad()
        F.cross_entropy(model(X.to(next(model.parameters()))), Y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # damping this small is told of
            optimizer.step()
        state = optimizer.state[next(iter(optimizer.layers.values())).anchor]
        precisions.append(next(iter(next(iter(state["operators"].values())).values())).dtype)
    assert optimizer.skipped == 0
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return precisions


UP_AND_DOWN = [1e-5, 1e-5, *[1.0] * 8, *[1e-5] * 3]
COMBINED = [(trust, memory, list(MOMENTA)[(i + j) % 3]) for i, trust in enumerate(TRUSTS) for j, memory in MEMORIES][
    ::2
]


@pytest.mark.parametrize(
    ("model", "fused", "interval"), [(mlp, False, "4"), (Grouped, True, "2 / 4"), (mlp, True, "3")]
)
@pytest.mark.parametrize("method", [KFAC, FOOF])
def test_damping_may_rise_and_fall_between_two_inverses(method, model, fused, interval):
    for trust, memory, momentum in COMBINED:
        torch.manual_seed(0)
        network = model()
        options = {"trust": trust, "memory": memory, "fused": fused, **INTERVALS[interval], **MOMENTA[momentum]}
        optimizer = method(network, lr=1e-3, refresh_warmup=0, **options)
        found = train(network, optimizer, UP_AND_DOWN)
        assert {torch.float32, torch.float64} == set(found), options


@pytest.mark.parametrize("trust", TRUSTS)
def test_gauss_newton_changes_its_precision(trust):
    torch.manual_seed(0)
    model = mlp()
    train(model, GaussNewton(model, lr=1e-3, trust=trust), [1e-6, 1e-6, 1.0, 1.0, 1e-6, 1.0])


def test_default_options_when_the_damping_is_raised():
    torch.manual_seed(0)
    model = mlp()
    found = train(model, KFAC(model), [1e-5] * 14 + [1.0] * 26)
    assert found[0] == found[19] == torch.float64  # the inverses of step 10 serve until step 20
    assert found[-1] == torch.float32


def test_the_steps_are_those_of_a_float64_network():
    """What is applied between two inverses, in whatever precision."""
    torch.manual_seed(0)
    model, reference = mlp(), mlp().double()
    reference.load_state_dict(model.state_dict())
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    for network in (model, reference):
        optimizer = KFAC(network, lr=1e-4, trust=None, fisher="exact", memory="ema", inverse_every=4)
        train(network, optimizer, [1e-4] * 6 + [1.0] * 6 + [1e-4] * 6)
    for own, other, before in zip(model.parameters(), reference.parameters(), start, strict=True):
        assert float((own - other).detach().norm() / (other - before).detach().norm()) < 0.01


@pytest.mark.parametrize("method", [KFAC, FOOF])
def test_adams_moments_follow_the_precision(method):
    """The moments of a graft are those of a fused gradient, which is in float64 at a refresh and in float32 after."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = method(model, trust="graft:adam", fused=True, factor_every=2)
    train(model, optimizer, [1e-3] * 30)
