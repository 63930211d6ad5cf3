"""Which forward and backward passes a step is made of, and that nothing of them outlives it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("first", ["empirical", "gauss-newton"])
def test_two_optimizers_do_not_hear_each_others_passes(first):
    torch.manual_seed(0)
    alone, both = Net(8), Net(8)
    both.load_state_dict(alone.state_dict())

    def make(model):
        mine = list(model.first.parameters())
        if first == "empirical":
            return KFAC(model, lr=0.1, fisher="empirical", params=mine, trust=None)
        return GaussNewton(model, lr=0.1, params=mine, trust=None)

    single, one = make(alone), make(both)
    other = KFAC(both, lr=0.1, fisher="exact", params=[*both.hidden.parameters(), *both.head.parameters()], trust=None)
    for model in (alone, both):
        F.cross_entropy(model(X), Y).backward()
    assert one.capture.samples == single.capture.samples == 10
    single.step()
    one.step()
    assert torch.equal(alone.first.weight, both.first.weight)
    other.step()


def test_nothing_of_a_pass_outlives_its_step():
    """Without waiting for Python's garbage collector: on a GPU nothing would call it in time."""
    model = Net(64)
    optimizer = KFAC(model, trust=None)
    outputs = []
    model.hidden.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        step(model, optimizer)
        model(X)  # never differentiated
        assert [output() for output in outputs] == [None, None]
    finally:
        gc.enable()


def test_an_input_that_is_changed_after_use_is_refused():
    class Changes(Net):
        def forward(self, x):
            h = F.relu(self.first(x))
            u = self.hidden(h)
            h += 5
            return self.head(F.relu(self.norm(u)) + h)

    model = Changes(8)
    optimizer = KFAC(model, trust=None)
    with pytest.raises(RuntimeError, match='input of layer "hidden" was changed in place'):
        model(X)
    optimizer.close()


@pytest.mark.parametrize(
    "method", [lambda m: KFAC(m, lr=0.1, fisher="empirical", trust=None), lambda m: GaussNewton(m, lr=0.1, trust=None)]
)
def test_two_backward_passes_through_one_forward_pass_are_one(method):
    """Two terms of a loss, differentiated one after the other, make the step of their sum."""
    torch.manual_seed(0)
    whole = Net(8).double()
    terms = copy.deepcopy(whole)
    x, weight = X.double(), torch.rand(10, generator=DATA).double()
    for model, separate in ((whole, False), (terms, True)):
        optimizer = method(model)
        losses = F.cross_entropy(model(x), Y, reduction="none")
        if separate:
            (losses * weight).mean().backward(retain_graph=True)
            (losses * (1 - weight)).mean().backward()
        else:
            losses.mean().backward()
        assert optimizer.capture.samples == 10
        optimizer.step()
    for ours, theirs in zip(values(terms), values(whole), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_statistics_of_one_pass_are_not_changed_by_another():
    model = Net(8)
    optimizer = FOOF(model, form="matrix", trust=None)
    first = F.cross_entropy(model(X), Y)
    second = F.cross_entropy(model(2 * X), Y)
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert optimizer.capture.samples == 20
    expected = (X.square().sum() + (2 * X).square().sum()) / 20
    assert float(optimizer.capture.gather()["first"].A.factor().trace()) == pytest.approx(float(expected), rel=1e-5)


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(10, INPUTS + 1))

    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("of the user's own")

    failing = Fails(8)
    other = KFAC(failing, trust=None)
    with pytest.raises(KeyError, match="of the user's own"):
        failing(X)
    failing.first(X)  # not "ran twice"
    step(model, optimizer)
    other.close()
