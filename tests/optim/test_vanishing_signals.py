"""Behind a gate that is nearly zero signals vanish; what is left of them must neither stop nor blow up a step."""

from __future__ import annotations

import warnings

import pytest
import torch
from states import contents
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, RMS, GaussNewton
from mukron.curvature import Joint
from mukron.optim.direction import bounded
from mukron.optim.transaction import Transaction

GATES = (1e-18, 1e-19, 1e-20, 1e-21, 1e-22, 1e-24, 1e-27, 1e-30)
TRUSTS = ("spectral", "kl", "graft:sgd", "graft:adam", "rms", None)
WIDTH = 16
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 8, generator=DATA), torch.randint(3, (24,), generator=DATA)


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.a, self.b, self.c, self.gate = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), gate

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(h + self.gate * torch.tanh(self.b(h)))


def train(gate, method, steps, **options):
    """The network, its optimizer, and the largest root mean square of a move of the gated weight, over its rate."""
    torch.manual_seed(0)
    model = Gated(gate)
    optimizer, largest = method(model, **options), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a layer without curvature is told of
        for _ in range(steps):
            before = model.b.weight.detach().clone()
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            move = (model.b.weight.detach() - before).double()
            largest = max(largest, float(move.norm()) / WIDTH / optimizer.rate("b.weight"))
    return model, optimizer, largest


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("method", [KFAC, FOOF, GaussNewton])
def test_one_layer_without_signals_does_not_stop_the_others(method, trust):
    for gate in GATES[1:]:
        model, optimizer, _ = train(gate, method, 6, trust=trust)
        assert optimizer.skipped == 0, gate
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("method", [KFAC, FOOF, GaussNewton])
def test_rms_holds_for_gradients_of_any_size(method):
    for gate in GATES:
        _, _, largest = train(gate, method, 3, trust="rms:0.2", momentum=0.0)
        assert largest == pytest.approx(0.2, rel=1e-3), gate


@pytest.mark.parametrize("method", [KFAC, FOOF, GaussNewton])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_grafted_step_is_as_long_as_its_rule_says(rule, method):
    for gate in GATES:
        _, _, largest = train(gate, method, 3, trust=f"graft:{rule}", momentum=0.0)
        assert largest <= (1.1 if rule == "adam" else 10 * gate), gate


@pytest.mark.parametrize(("size", "expected"), [(1e-44, 0.0), (1e-36, 0.3), (1e-24, 0.3), (1.0, 0.3), (1e37, 0.3)])
def test_a_move_of_any_size_gets_its_length(size, expected):
    torch.manual_seed(0)
    optimizer = FOOF(nn.Linear(40, 50), trust=RMS(0.3 / 2000**0.5))
    step = Transaction(optimizer, Joint({}, [], lambda layer: None))
    scaled = bounded(step, optimizer.layers[""], "weight", None, None, torch.randn(1, 50, 40) * size)
    assert float(scaled.double().norm()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("method", [KFAC, GaussNewton])
def test_a_layer_that_moves_far_beyond_its_size_is_named_once(method, trust):
    """Spectral, Graft and RMS also bound it, KLClip does not. The plain step has any length, and nothing is told."""
    torch.manual_seed(0)
    model = Gated(1e-8)
    optimizer = method(model, trust=trust)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
    told = [str(warning.message) for warning in caught if '"b"' in str(warning.message)]
    assert len(told) == (trust is not None)
    if told:
        assert ("KLClip bounds all layers" in told[0]) == (trust == "kl")
        assert ("It moves by what its trust allows" in told[0]) == (trust != "kl")
    assert "told" in contents(optimizer)["mukron"]


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("method", [KFAC, FOOF, mukron.Shampoo, GaussNewton])
def test_an_ordinary_network_is_not_told_of(method, trust):
    torch.manual_seed(0)
    model = Gated(1.0)
    optimizer = method(model, trust=trust, lr=1e-3)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()  # a warning would be an error
    assert optimizer.skipped == 0


def test_memories_and_fused_gradients():
    for memory in ("batch", "sum", "ema", "auto", "window:2"):
        for fused in (False, True):
            _, optimizer, _ = train(1e-20, KFAC, 4, memory=memory, fused=fused)
            assert optimizer.skipped == 0
    _, optimizer, _ = train(1e-20, mukron.Shampoo, 4)
    assert optimizer.skipped == 0
