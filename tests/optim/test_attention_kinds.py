"""Attentions that are not plain: subclasses, nested and parametrized ones, empty batches, and torch's transforms."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from mukron import FOOF, KFAC, GaussNewton

WIDTH, HEADS, CLASSES, SAMPLES, LENGTH = 8, 2, 5, 4, 6
METHODS = [KFAC, FOOF, GaussNewton]
IDS = ["kfac", "foof", "gauss-newton"]


class Net(nn.Module):
    """An attention between two layers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(5, WIDTH), attention, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.head(h + self.attention(h, h, h)[0])


def plain(**options) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def made(method, model, **options):
    return method(model, lr=0.1, **({"class_dim": -1} if method is KFAC else {}), **options)


def batch(seed: int = 0, length: int = LENGTH):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, length, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES, length), generator=generator)


def loss_of(model, seed=0, ignores=False, length=LENGTH):
    x, y = batch(seed, length)
    if ignores:
        y[0], y[1, 2:] = -100, -100
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def step(model, optimizer, seed=0, **options):
    optimizer.zero_grad()
    loss_of(model, seed, **options).backward()
    optimizer.step()
    assert optimizer.skipped == 0


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    found = ours.state_dict()
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(found[name], values, msg=lambda text, name=name: f"{name}: {text}")


class Calls(nn.MultiheadAttention):
    """Its forward pass calls that of torch."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, need_weights=False, **options)


class Turns(nn.MultiheadAttention):
    """Samples first outside, and positions first in torch's own call."""

    def forward(self, query, key, value):
        query = query.transpose(0, 1)
        return super().forward(query, query, query)[0].transpose(0, 1), None


class Unusual(nn.MultiheadAttention):
    """Products of its own, as Linear layers have them: samples first, never inside of torch's function."""

    def forward(self, query, key, value):
        parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


SUBCLASSES = {"calls": Calls, "turns": Turns, "unusual": Unusual}
WAYS = {
    "kfac": (KFAC, {"trust": None}, {}),
    "reduce": (KFAC, {"trust": None, "sharing": "reduce", "fisher": "empirical"}, {}),
    "ignored": (KFAC, {"trust": None, "fisher": "empirical"}, {"ignores": True}),
    "foof": (FOOF, {"trust": None}, {}),
    "gauss-newton": (GaussNewton, {"trust": None}, {}),
}


@pytest.mark.parametrize("length", [LENGTH, SAMPLES])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_step_like_the_plain_class(kind, way, length):
    """Which dimension the samples are in is known from where torch multiplies, not from the class."""
    method, options, given = WAYS[way]
    torch.manual_seed(0)
    batch_first = {} if kind == "turns" else {"batch_first": True}
    ours, theirs = Net(SUBCLASSES[kind](WIDTH, HEADS, **batch_first)).double(), Net(plain()).double()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        optimizer = made(method, model, **options)
        for seed in range(2):
            step(model, optimizer, seed, length=length, **given)
    compare(ours, theirs)


class Around(nn.MultiheadAttention):
    """An attention with another one in it, which runs first."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)
        self.inner = plain()

    def forward(self, query, key, value):
        h = self.inner(query, key, value)[0]
        return super().forward(h, h, h)


class Beside(nn.Module):
    def __init__(self, around: Around) -> None:
        super().__init__()
        self.inner, self.outer = copy.deepcopy(around.inner), plain()
        state = {name: values for name, values in around.state_dict().items() if not name.startswith("inner.")}
        self.outer.load_state_dict(state)

    def forward(self, query, key, value):
        h = self.inner(query, key, value)[0]
        return self.outer(h, h, h)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_an_attention_inside_of_another(method):
    torch.manual_seed(0)
    ours = Net(Around()).double()
    theirs = Net(Beside(ours.attention)).double()
    theirs.first, theirs.head = copy.deepcopy(ours.first), copy.deepcopy(ours.head)
    for model in (ours, theirs):
        optimizer = made(method, model, trust=None)
        for seed in range(2):
            step(model, optimizer, seed)
    compare(ours.attention.inner, theirs.attention.inner)
    compare(ours.attention, theirs.attention.outer)


class OutputAlone(nn.Module):
    """Calls the output projection of an attention itself, and never the attention."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.attention = nn.Module() if linear else plain()
        if linear:
            self.attention.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, value):
        return (self.attention.out_proj(query).tanh(),)


@pytest.mark.parametrize(
    ("method", "options"),
    [(KFAC, {}), (KFAC, {"fused": True}), (FOOF, {}), (FOOF, {"fused": True}), (GaussNewton, {})],
)
def test_an_output_projection_that_is_called_by_itself(method, options):
    torch.manual_seed(0)
    ours, theirs = (Net(OutputAlone(linear)).double() for linear in (False, True))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for model in (ours, theirs):
        optimizer = made(method, model, trust=None, **options)
        for seed in range(2):
            step(model, optimizer, seed)
    compare(ours, theirs)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_a_parametrized_output_projection_is_left_to_the_fallback_rule(method):
    torch.manual_seed(0)
    model = Net(plain()).double()
    weight_norm(model.attention.out_proj)
    optimizer = made(method, model)
    left = {name for name, entry in optimizer.entries.items() if not entry.preconditioned}
    originals = {f"attention.out_proj.parametrizations.weight.original{number}" for number in range(2)}
    assert left == {"attention.out_proj.bias", *originals}
    before = copy.deepcopy(model)
    step(model, optimizer)
    assert not torch.equal(before.attention.out_proj.bias, model.attention.out_proj.bias)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_an_empty_batch(method):
    torch.manual_seed(0)
    model = Net(plain()).double()
    optimizer = made(method, model)
    model(torch.randn(0, LENGTH, 5).double()).sum().backward()
    assert not optimizer.capture.passes
    step(model, optimizer)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_transforms_of_torch_run_as_without_an_optimizer(method):
    torch.manual_seed(0)
    model = Net(plain()).double()
    alone, (x, _) = copy.deepcopy(model), batch()
    optimizer = made(method, model)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weight = {"first.weight": values["first.weight"]}

    def outcomes(net):
        def loss(given, x):
            return functional_call(net, given, (x,)).square().sum()

        yield functional_call(net, values, (x,))
        yield from grad(loss)(values, x).values()
        yield from grad(loss)(weight, x).values()
        yield from vmap(grad(loss), (None, 0))(values, x.unsqueeze(1)).values()

    for ours, theirs in zip(outcomes(model), outcomes(alone), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not optimizer.capture.passes
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    functional_call(model, leaves, (x,)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    optimizer.zero_grad()
    step(model, optimizer)
    step(alone, made(method, alone))
    compare(model, alone)


class Unseen(nn.MultiheadAttention):
    """Multiplies by its weights without ``F.linear``."""

    def forward(self, query, key, value):
        q = query @ self.in_proj_weight[:WIDTH].mT + self.in_proj_bias[:WIDTH]
        return q.tanh() @ self.out_proj.weight.mT + self.out_proj.bias, None


class Words(Net):
    """With an embedding, which is not preconditioned by default; a head may be tied to it."""

    def __init__(self, attention: nn.Module, tied: bool = False) -> None:
        super().__init__(attention)
        self.words = nn.Embedding(CLASSES, WIDTH)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        h = self.first(x).tanh() + self.words(x.argmax(-1))
        return self.head(h + self.attention(h, h, h)[0])


SUGGESTED = {
    "": {},
    "kept": {"exclude": ("head",)},
    "embedding": {},
    "tied embedding": {},
    "plain": {"trust": None},
}


@pytest.mark.parametrize("kind", SUGGESTED)
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_the_suggestion_for_an_attention_that_cannot_be_seen_can_be_pasted(method, kind):
    torch.manual_seed(0)
    attention, options = Unseen(WIDTH, HEADS), SUGGESTED[kind]
    model = (Words(attention, "tied" in kind) if "embedding" in kind else Net(attention)).double()
    optimizer = made(method, model, **options)
    taken = {name for name, entry in optimizer.entries.items() if entry.preconditioned}
    with pytest.raises(RuntimeError, match=r'layer "attention\.in_proj_weight" has a gradient') as error:
        step(model, optimizer)
    (listed,) = re.findall(r"exclude=(\(.*\))", str(error.value))
    pasted = made(method, model, **{**options, "exclude": tuple(re.findall(r'"(.*?)"', listed))})
    step(model, pasted)
    left = {name for name in taken if name.startswith("attention.")}
    assert {name for name, entry in pasted.entries.items() if entry.preconditioned} == taken - left


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_where_no_layer_was_seen_none_is_to_be_excluded(method):
    model = Net(plain()).double().eval()
    with pytest.raises(RuntimeError, match="run the model itself") as error:
        step(model, made(method, model))
    assert "exclude" not in str(error.value)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_layers_are_excluded_by_the_names_that_the_plan_prints(method):
    names = [row[0] for row in made(method, Net(plain())).plan().rows]
    assert set(names) >= {"attention.in_proj_weight", "attention.out_proj", "head"}
    for name in {*names}:
        optimizer = made(method, Net(plain()), exclude=(name,))
        weight = name if name.endswith("weight") else f"{name}.weight"
        left = {own for own, entry in optimizer.entries.items() if not entry.preconditioned}
        assert weight in left
        assert all(own.startswith(name) for own in left)
