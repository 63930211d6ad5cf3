"""torch's hooks on saving and loading see the whole state; states that do not fit are refused and change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, GaussNewton, Shampoo
from mukron.optim.saving import Bundle
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)
METHODS = {
    "kfac": lambda model: KFAC(model, lr=0.05, memory=EMA(0.9), momentum=0.9, trust=None),
    "foof": lambda model: FOOF(model, lr=0.05, memory=EMA(0.9), momentum=0.9, trust=None),
    "shampoo": lambda model: Shampoo(model, lr=0.05, momentum=0.9, trust=None),
    "gauss-newton": lambda model: GaussNewton(model, lr=0.05, momentum=0.9, trust=None),
}


@pytest.fixture(params=METHODS)
def make(request):
    return METHODS[request.param]


def net() -> Net:
    torch.manual_seed(0)
    return Net(8)


def train(model, optimizer, steps=2):
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X.to(dtype)), Y).backward()
        optimizer.step()


def trained(make):
    model = net()
    optimizer = make(model)
    train(model, optimizer)
    return model, optimizer


def same(first, second) -> bool:
    """Whether two nested states are equal, bit for bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Bundle):
        return isinstance(second, Bundle) and same(first.content, second.content)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_a_load_pre_hook_sees_everything(make):
    model, optimizer = trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    other = make(copy.deepcopy(model))
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, state: seen.append(state))
    other.load_state_dict(saved)
    assert len(seen) == 1
    assert set(seen[0]) == {"state", "param_groups"}
    assert len(saved["state"]) > 0
    assert same(dict(seen[0]["state"]), dict(saved["state"]))


def test_what_a_load_pre_hook_returns_replaces_the_state(make):
    model, optimizer = trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = make(twin)
    other.register_load_state_dict_pre_hook(lambda *_: saved)
    other.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})  # without a word from mukron
    assert other.steps == optimizer.steps == 2
    train(model, optimizer)
    train(twin, other)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_load_pre_hook_may_change_groups_and_counters(make):
    model, optimizer = trained(make)

    def changed(_, state):
        groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
        counters = {index: {**values, "steps": torch.tensor([7])} for index, values in state["state"].items()}
        return {"param_groups": groups, "state": counters}

    other = make(copy.deepcopy(model))
    other.register_load_state_dict_pre_hook(changed)
    other.load_state_dict(optimizer.state_dict())
    assert other.steps == 7
    assert other.param_groups[0]["lr"] == 0.5


def test_load_post_hooks_find_the_state_in_place(make):
    model, optimizer = trained(make)
    other = make(copy.deepcopy(model))
    seen = []

    def look(loaded):
        seen.append((loaded.steps, {name for state in loaded.state.values() for name in state}, len(loaded.state)))

    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(optimizer.state_dict())
    names = {name for state in optimizer.state.values() for name in state}
    assert "momentum_buffer" in names
    assert seen == [(2, names, len(optimizer.state))]


def test_a_state_dict_post_hook_sees_and_may_change_the_whole(make):
    _, optimizer = trained(make)
    seen = []

    def noted(_, state):
        seen.append(set(state))
        state["state"][0]["mukron"].content["note"] = "in place"

    def replaced(_, state):
        return {**state, "state": {index: {**values, "steps": 11} for index, values in state["state"].items()}}

    optimizer.register_state_dict_post_hook(noted)
    optimizer.register_state_dict_post_hook(replaced)
    state = optimizer.state_dict()
    assert seen == [{"state", "param_groups"}]
    assert state["state"][0]["mukron"].content["note"] == "in place"
    assert state["state"][0]["steps"] == 11
    assert optimizer.steps == 2


def test_a_state_dict_pre_hook_runs_first(make):
    _, optimizer = trained(make)

    def changed(saving):
        saving.param_groups[0]["lr"] = 0.25

    optimizer.register_state_dict_pre_hook(changed)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25


def moved(model, optimizer) -> torch.Tensor:
    """The change of all parameters in one more step, in float64."""
    before = [parameter.detach().clone().double() for parameter in model.parameters()]
    train(model, optimizer, 1)
    assert optimizer.skipped == 0
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([(parameter.detach().double() - start).flatten() for parameter, start in pairs])


@pytest.mark.parametrize("loaded", [torch.float32, torch.float64], ids=["float64 into float32", "float32 into float64"])
def test_a_state_of_another_precision_is_refused_or_converted(make, loaded):
    """Refused: the error names a parameter and both types, and nothing has changed. Converted: training goes on."""
    source = net().to(torch.float64 if loaded is torch.float32 else torch.float32)
    optimizer = make(source)
    train(source, optimizer)
    target = net().to(loaded)
    other = make(target)
    train(target, other, 1)
    before = copy.deepcopy(other.state_dict())
    refusal = None
    try:
        other.load_state_dict(optimizer.state_dict())
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert "first.weight" in refusal
        assert "float32" in refusal
        assert "float64" in refusal
        assert same(other.state_dict(), before)
    else:
        target.load_state_dict(source.state_dict())
        kept = [value for state in other.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        assert {value.dtype for value in kept if value.is_floating_point()} == {loaded}
        if make is not METHODS["kfac"]:  # whose draws differ between precisions
            expected = moved(source, optimizer)
            assert (moved(target, other) - expected).norm() < 1e-3 * expected.norm()
    assert moved(target, other).norm() > 0


@pytest.mark.parametrize("older", ["another number", "no number", "of its own key"])
def test_a_state_of_an_older_format_is_refused_in_one_line(make, older):
    model, optimizer = trained(make)
    state = copy.deepcopy(optimizer.state_dict())
    if older == "no number":
        del state["state"][0]["mukron"].content["format"]
    elif older == "another number":
        state["state"][0]["mukron"].content["format"] = 1
    else:
        state["mukron"] = {"format": 1}
    other = make(copy.deepcopy(model))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="this state has format 1, and this version of mukron reads") as caught:
        other.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert same(other.state_dict(), before)


def test_a_state_of_torchs_own_optimizer_is_refused_in_one_line(make):
    model = net()
    optimizer = make(model)
    with pytest.raises(ValueError, match="mukron") as caught:
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    assert "\n" not in str(caught.value)


def test_states_of_another_method_are_refused():
    _, shampoo = trained(METHODS["shampoo"])
    with pytest.raises(ValueError, match="saved by Shampoo, not by KFAC"):
        KFAC(net(), trust=None).load_state_dict(shampoo.state_dict())
