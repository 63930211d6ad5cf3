"""Tied parameters: uses as one matrix are preconditioned by all of them, a tied embedding is left by default."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo, base_shapes, parametrize
from mukron.diagnose import coordinate_check
from mukron.models import GPT

VOCABULARY, CONTEXT = 17, 12
METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo}
OPTIONS = {"kfac": {"class_dim": -1}}


def gpt(width: int) -> nn.Module:
    return GPT(width, depth=1, vocabulary=VOCABULARY, context=CONTEXT, tied=True)


def sequences() -> torch.Tensor:
    """Numbers that count upwards: the next one is known."""
    starts = torch.arange(16).unsqueeze(1)
    return (starts + torch.arange(CONTEXT + 1)) % VOCABULARY


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


class TiedWithBias(nn.Module):
    """Two hidden layers with one weight and a bias each, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(torch.tanh(self.first(x)))))))


@pytest.mark.parametrize("trust", ["spectral", None])
@pytest.mark.parametrize("method", METHODS)
def test_a_tied_gpt_trains_in_mup(method, trust):
    torch.manual_seed(0)
    model = gpt(128)
    plan = parametrize(model, base_shapes(gpt, width=64))
    rates = {} if trust else {"lr": 0.01 if method != "shampoo" else 0.003}
    optimizer = METHODS[method](model, plan, trust=trust, **rates, **OPTIONS.get(method, {}))
    words, losses = sequences(), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model(words[:, :-1]), words[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert not {"tokens", "head"} & set(optimizer.layers)
    assert ("positions" in optimizer.layers) == (trust is None)


@pytest.mark.parametrize("trust", ["spectral", None])
@pytest.mark.parametrize("make", [gpt, TiedWithBias])
def test_explain_says_what_the_optimizer_does(make, trust):
    model = make(32)
    plan = parametrize(model, base_shapes(make, width=16))
    optimizer = KFAC(model, plan, trust=trust)
    table = plan.explain("kfac", trust=trust, whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"
        assert plan.falls_back(row["parameter"], optimizer.options.exclude, "kfac") != entry.preconditioned, row
    if make is TiedWithBias:
        assert list(optimizer.layers) == ["first", "one", "head"]
        left = {name for name, entry in optimizer.entries.items() if not entry.preconditioned}
        assert left == {"one.bias", "two.bias"}
    assert "tokens.weight" in str(optimizer.plan()) or make is TiedWithBias


def test_the_coordinate_check_of_plain_steps():
    words = sequences()
    result = coordinate_check(
        gpt,
        lambda model, plan: KFAC(model, plan, lr=0.003, trust=None, class_dim=-1),
        ((words[:, :-1],), words[:, 1:]),
        **{"base_width": 32, "widths": (32, 64, 128, 256), "seeds": 2, "steps": 2, "loss": loss_of},
    )
    words_moved = [verdict for verdict in result.features if verdict.layer in ("tokens", "output")]
    assert [verdict.word for verdict in words_moved] == ["learns"] * len(words_moved)
    assert words_moved
    assert all(math.isfinite(row.value) for row in result.record.rows)


def test_nothing_but_tied_layers():
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

    with pytest.raises(ValueError, match=r"nothing to precondition.*layers that use a tied parameter"):
        KFAC(Only())


class Shared(nn.Module):
    """One weight on two inputs: two layers that share it, or one layer that runs twice."""

    def __init__(self, shares: bool, attention: bool = False) -> None:
        super().__init__()
        self.attends = attention
        self.first, self.extra, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.one = nn.MultiheadAttention(8, 2, bias=False) if attention else nn.Linear(8, 8, bias=False)
        self.two = self.one
        if shares:
            self.two = nn.MultiheadAttention(8, 2, bias=False) if attention else nn.Linear(8, 8, bias=False)
            for name in ("in_proj_weight", "out_proj.weight") if attention else ("weight",):
                owner = self.two.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], self.one.get_parameter(name))

    def forward(self, x):
        h = self.first(x).tanh()
        z = self.extra(h).tanh()
        if self.attends:
            return self.head(self.one(h, h, h)[0] + self.two(z, h, h)[0].tanh()).mean(1)
        return self.head(self.one(h) + self.two(z).tanh()).mean(1)


SHARING = {
    "plain": (KFAC, {"trust": None}),
    "defaults": (KFAC, {}),
    "empirical": (KFAC, {"fisher": "empirical", "memory": "window:2"}),
    "reduce": (KFAC, {"sharing": "reduce"}),
    "fused": (KFAC, {"form": "rows", "fused": True, "memory": "batch"}),
    "foof": (FOOF, {"trust": None}),
    "gauss-newton": (GaussNewton, {"trust": None}),
}


@pytest.mark.parametrize("attention", [False, True], ids=["linear", "attention"])
@pytest.mark.parametrize("kind", SHARING)
def test_two_layers_that_share_a_weight_step_like_one_that_runs_twice(kind, attention):
    method, options = SHARING[kind]
    torch.manual_seed(0)
    models = [Shared(shares, attention).double() for shares in (True, False)]
    models[1].load_state_dict({name: models[0].state_dict()[name] for name in models[1].state_dict()})
    for model in models:
        optimizer = method(model, lr=0.1, **options)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            optimizer.zero_grad()
            x = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
            F.cross_entropy(model(x), torch.arange(6) % 3).backward()
            optimizer.step()
        assert optimizer.skipped == 0
        assert sum(name.startswith(("one", "two")) for name in optimizer.layers) == 1 + attention
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_excluding_one_use_excludes_all():
    for exclude in (("one",), ("two",)):
        optimizer = KFAC(TiedWithBias(8), exclude=exclude)
        assert not optimizer.entries["one.weight"].preconditioned


class SharedSizes(nn.Module):
    """Projections of attention from another size, of which two attentions share one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.one, self.two = (nn.MultiheadAttention(width, 2, kdim=4, vdim=4) for _ in range(2))
        self.two.q_proj_weight = self.one.q_proj_weight


class SharedBias(nn.Module):
    """Two layers with one bias, and two with all in common."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.b.bias = self.a.bias
        self.d.weight, self.d.bias = self.c.weight, self.c.bias


@pytest.mark.parametrize("exclude", [None, (), ("head",), ("one",), ("c",)])
@pytest.mark.parametrize("make", [TiedWithBias, SharedSizes, SharedBias, gpt], ids=lambda make: make.__name__)
@pytest.mark.parametrize("method", ["kfac", "foof", "gauss-newton"])
def test_the_plan_and_the_optimizer_agree_on_every_parameter(method, make, exclude):
    model = make(32)
    plan = parametrize(model, base_shapes(make, width=16))
    kind = {"kfac": KFAC, "foof": FOOF, "gauss-newton": GaussNewton}[method]
    known = {name for name, _ in model.named_modules()}
    refused = make in (gpt, SharedBias) and exclude is not None  # a tied embedding, and a bias of two layers
    if refused or not set(exclude or ()) <= known:
        with pytest.raises(ValueError, match=r"tied parameter|has no module"):
            kind(model, plan, exclude=exclude)
        return
    optimizer = kind(model, plan, exclude=exclude)
    table = plan.explain(method, exclude=exclude, whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert plan.falls_back(entry.name, optimizer.options.exclude, method) != entry.preconditioned, entry.name
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"
    without = {name for name, entry in kind(make(32), exclude=exclude).entries.items() if entry.preconditioned}
    if make is not SharedSizes:  # without a plan, other projections of such an attention are preconditioned, too
        assert without == {name for name, entry in optimizer.entries.items() if entry.preconditioned}
