"""A plan that meets a second copy of the model, whose weights nobody has scaled, is told; all other uses are silent."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mukron

TOLD = "the weights of this Sequential are not scaled: the plan was made with another copy"


def build(width: int = 256) -> nn.Sequential:
    names = ("input", "act", "hidden", "act2", "output")
    layers = (nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


SHAPES = mukron.base_shapes(build, width=64)


USES = {
    "kfac": lambda p, model: mukron.KFAC(model, p, lr=0.1),
    "muon": lambda p, model: mukron.Muon(model, p, lr=0.1),
    "groups": lambda p, model: p.param_groups("adamw", lr=0.1, model=model),
    "torch's": lambda p, model: p.optimizer(torch.optim.SGD, lr=0.1, model=model),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("kept", [True, False], ids=["the other lives", "the other is gone"])
@pytest.mark.parametrize("exponent", [None, "zero"])
def test_a_second_fresh_copy_is_told(use, kept, exponent):
    first = build()
    p = mukron.parametrize(first, SHAPES, output_exponent=exponent)
    if not kept:
        del first
    with pytest.warns(UserWarning, match=TOLD) as caught:
        use(p, build())
    assert len(caught) == 1
    assert caught[0].filename == __file__


def loaded(first):
    second = build()
    second.load_state_dict(first.state_dict())
    return second


def copied_by_hand(first):
    second = build()
    for here, there in zip(second.parameters(), first.parameters(), strict=True):
        here.data.copy_(there.data)
    return second


def trained(first):
    step = torch.optim.SGD(first.parameters(), lr=0.1)
    first(torch.randn(8, 32)).square().sum().backward()
    step.step()
    return first


def rebuilt(first):
    return nn.Sequential(OrderedDict(first.named_children()))


def from_meta(first):
    with torch.device("meta"):
        second = build()
    second.to_empty(device="cpu")
    second.load_state_dict(first.state_dict())
    return second


def assigned(first):
    second = build()
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()}, assign=True)
    return second


COPIES = {
    "itself": lambda first: first,
    "deepcopy": copy.deepcopy,
    "pickle": lambda first: pickle.loads(pickle.dumps(first)),
    "wrapped": nn.DataParallel,
    "averaged": AveragedModel,
    "loaded": loaded,
    "assigned": assigned,
    "from meta": from_meta,
    "by hand": copied_by_hand,
    "trained": trained,
    "trained, then loaded": lambda first: loaded(trained(first)),
    "rebuilt": rebuilt,
    "double": lambda first: first.double(),
    "parametrized too": lambda first: (second := build(), mukron.parametrize(second, SHAPES))[0],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_with_scaled_weights_are_silent(make, use):
    first = build()
    p = mukron.parametrize(first, SHAPES)
    use(p, make(first))  # a warning would be an error


@pytest.mark.parametrize("scheme", ["mup", "sp"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_plans_that_travelled_or_were_bound_are_silent(use, scheme):
    first, second = build(), build()
    p = mukron.parametrize(first, SHAPES, scheme)
    others = [pickle.loads(pickle.dumps(p)), copy.deepcopy(p), mukron.Parametrization.from_dict(p.to_dict())]
    for other in (*others, p.bind(second)):
        use(other, second)
    if scheme == "sp":
        use(p, second)  # nothing was scaled


def test_a_plan_of_a_model_without_memory_is_silent():
    with torch.device("meta"):
        p = mukron.parametrize(build(), SHAPES)
    mukron.KFAC(build(), p, lr=0.1)


def test_the_models_memory_is_not_kept():
    first = build()
    p = mukron.parametrize(first, SHAPES)
    weights = [known() for known in p._scaled.parameters]
    assert all(weight is not None for weight in weights)
    del first, weights
    assert all(known() is None for known in p._scaled.parameters)
