"""Layers without a gradient, without curvature or without samples wait, and do no harm."""

from __future__ import annotations

import ast
import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_layer_that_is_unfrozen_between_refreshes():
    model = Net(8)
    model.hidden.requires_grad_(False)
    optimizer = KFAC(model, lr=0.05, factor_every=5, inverse_every=5, trust=None)
    for _ in range(2):
        step(model, optimizer)
    model.hidden.requires_grad_(True)
    before = model.hidden.weight.detach().clone()
    step(model, optimizer)
    assert torch.equal(model.hidden.weight, before)  # its curvature was not seen: it waits
    step(model, optimizer)
    assert not torch.equal(model.hidden.weight, before)


def test_gradients_of_zeros_for_a_layer_that_did_not_run():
    class Skips(Net):
        skip = False

        def forward(self, x):
            h = F.relu(self.first(x))
            return self.head(h if self.skip else F.relu(self.norm(self.hidden(h))))

    model = Skips(8)
    optimizer = KFAC(model, lr=0.05, trust=None)
    step(model, optimizer)
    model.skip = True
    before = model.hidden.weight.detach().clone()
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert torch.equal(model.hidden.weight, before)


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_an_empty_batch_moves_nothing(method):
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = method(model, trust=None)
    before = values(model)
    F.cross_entropy(model(torch.randn(0, 4)), torch.empty(0, dtype=torch.long), reduction="sum").backward()
    optimizer.step()
    assert all(map(torch.equal, before, values(model)))


def test_a_bias_that_is_unfrozen_between_two_inverses():
    """Its factor is new while the weight's is not."""
    model = Net(8)
    model.hidden.bias.requires_grad_(False)
    optimizer = Shampoo(model, lr=0.05, inverse_every=3, trust=None)
    for step_number in range(5):
        before = model.hidden.bias.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        assert torch.equal(before, model.hidden.bias) == (step_number == 0)
        model.hidden.bias.requires_grad_(True)


@pytest.mark.parametrize("way", ["deepcopy", "state"])
def test_a_layer_that_waits_for_its_first_factors_waits_in_a_copy_too(way):
    model = Net(8)
    model.first.requires_grad_(False)
    optimizer = KFAC(model, lr=0.05, factor_every=4, inverse_every=4, trust=None)

    def step(model, optimizer):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    step(model, optimizer)
    model.first.requires_grad_(True)
    step(model, optimizer)
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = KFAC(copy.deepcopy(model), lr=0.05, factor_every=4, inverse_every=4, trust=None)
        other.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        step(model, optimizer)
        step(other.model, other)
        assert all(map(torch.equal, model.parameters(), other.model.parameters()))


class Mixture(nn.Module):
    """A router sends each sample to one expert."""

    def __init__(self, experts=2):
        super().__init__()
        self.first, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, experts), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        gates = self.router(h).softmax(-1)
        mixed = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            rows = (gates.argmax(-1) == k).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, expert(h[rows]) * gates[rows, k, None])
        return self.head(h + mixed)


def steps_of_mixture(experts, samples, micro=1, **given):
    torch.manual_seed(0)
    model = Mixture(experts)
    optimizer = GaussNewton(model, lr=0.05, **given)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(micro):
            F.cross_entropy(model(torch.randn(samples, 6)), torch.randint(4, (samples,))).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("experts", "samples", "micro"), [(2, 7, 1), (2, 8, 2), (5, 4, 1), (12, 3, 2)])
def test_experts_with_some_of_the_samples_are_named_with_an_exclusion_that_works(experts, samples, micro):
    with pytest.raises(RuntimeError, match=r'"experts\.\d+" got \d in a pass of \d samples.*train with KFAC') as error:
        steps_of_mixture(experts, samples, micro)
    (pasted,) = re.findall(r"exclude=(\(.*?\)),", str(error.value))
    exclude = ast.literal_eval(pasted)
    assert set(exclude) <= {f"experts.{k}" for k in range(experts)}
    optimizer = steps_of_mixture(experts, samples, micro, exclude=exclude)
    assert optimizer.steps == 6
    assert list(optimizer.layers) == ["first", "router", "head"]


def test_a_model_of_such_layers_alone_is_told_of_other_methods():
    model = nn.Linear(6, 4)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return torch.cat([self.layer(x[:3]), x[3:, :4]])

    optimizer = GaussNewton(Half(), lr=0.05, exclude=())
    F.cross_entropy(optimizer.model(torch.randn(8, 6)), torch.arange(8) % 4).backward()
    with pytest.raises(RuntimeError, match=r'"layer" got 3 in a pass of 8 samples.* each row: train with KFAC or FOOF'):
        optimizer.step()
