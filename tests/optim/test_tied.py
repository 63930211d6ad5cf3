"""Tied parameters: uses as one matrix are preconditioned by all of them, a tied embedding is left by default."""

from __future__ import annotations

import copy
import math
import warnings
from typing import ClassVar

import pytest
import torch
from states import contents
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo, base_shapes, parametrize
from mukron.curvature import Accumulator, LayerStatistics
from mukron.curvature.frequencies import Frequencies
from mukron.curvature.stacking import tied
from mukron.diagnose import coordinate_check
from mukron.linalg import total_count
from mukron.memory import Memory
from mukron.models import GPT
from mukron.optim.sizes import LayerSize, both_factors

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
    assert "head" not in optimizer.layers
    assert ("tokens" in optimizer.layers) == (trust is None and method == "kfac")
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
    assert trust is None or "tokens.weight" in optimizer.plan(whole=True).text(width=None) or make is TiedWithBias


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
        FOOF(Only())


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


@pytest.mark.filterwarnings("ignore:the curvature of")  # 30 rows may show little of it, by the luck of the draw
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


class Idle(nn.Module):
    """A layer that runs twice, once for nothing."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attends, self.twice = attention, True
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.one = nn.MultiheadAttention(8, 2, batch_first=True) if attention else nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x).tanh()
        if self.twice:
            self.run(5 * h)
        return self.head(self.run(h)).mean(1)

    def run(self, h):
        return self.one(h, h, h)[0] if self.attends else self.one(h)


@pytest.mark.parametrize("attention", [False, True], ids=["linear", "attention"])
@pytest.mark.parametrize("kind", SHARING)
def test_uses_that_nothing_depends_on_do_not_count(kind, attention):
    method, options = SHARING[kind]
    torch.manual_seed(0)
    models = [Idle(attention).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].twice = False
    for model in models:
        optimizer = method(model, lr=0.1, **options)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            optimizer.zero_grad()
            x = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
            F.cross_entropy(model(x), torch.arange(6) % 3).backward()
            optimizer.step()
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
    refused = make is SharedBias or (make is gpt and method != "kfac")
    refused = refused and exclude is not None  # a tied embedding, and a bias of two layers
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


class TiedHead(nn.Module):
    """A head that is tied to an embedding, in either order, with logits that muP multiplies."""

    mukron_roles: ClassVar = {"tokens.weight": "input", "head.weight": "input"}

    def __init__(self, width: int, head_first: bool = False) -> None:
        super().__init__()
        self.width = width
        if head_first:
            self.head = nn.Linear(width, VOCABULARY)
        self.tokens, self.middle = nn.Embedding(VOCABULARY, width), nn.Linear(width, width)
        if head_first:
            self.tokens.weight = self.head.weight
        else:
            self.head = nn.Linear(width, VOCABULARY)
            self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.middle(self.tokens(x)).tanh()) * (16 / self.width)


def plain_factors(model, x, y):
    """A and B of the shared weight from its definition: partial traces of F, which is formed whole."""
    model, kept = copy.deepcopy(model), {}
    for name in ("tokens", "head"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, inputs, output, name=name: kept.update({name: (inputs[0], output)}))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    deltas = torch.autograd.grad(loss, [kept["tokens"][1], kept["head"][1]])
    D_e, D_h = (delta.flatten(0, 1) for delta in deltas)
    H, Z = kept["head"][0].flatten(0, 1), F.one_hot(x.flatten(), VOCABULARY).to(D_e)
    N = len(Z)  # a mean over positions: A is a mean over them, too
    A_e, B_e, A_h, B_h = Z.mT @ Z / N, D_e.mT @ D_e / N, H.mT @ H / N, D_h.mT @ D_h / N
    whole = torch.kron(A_e, B_e) + torch.kron(B_h, A_h)
    parts = whole.reshape(VOCABULARY, len(B_e), VOCABULARY, len(B_e))
    A, B = parts.diagonal(dim1=1, dim2=3).sum(-1), parts.diagonal(dim1=0, dim2=2).sum(-1)
    return (A / A.trace()).detach(), (B * (whole.trace() / B.trace())).detach()


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_head_has_the_partial_traces_of_both_uses(head_first):
    torch.manual_seed(0)
    model = TiedHead(6, head_first).double()
    optimizer = KFAC(model, lr=0.1, trust=None, fisher="empirical", class_dim=-1, damping=0.5)
    seen: dict = {}
    optimizer.watch(lambda layer, block, factors, rho: seen.update({layer: (factors, rho)}))
    words = sequences()
    x, y = words[:, :-1], words[:, 1:]
    loss_of(model(x), y).backward()
    before, G = model.tokens.weight.detach().clone(), model.tokens.weight.grad.clone()
    A, B = plain_factors(model, x, y)
    optimizer.step()
    factors, rho = seen["tokens"]
    torch.testing.assert_close(factors["A"].M[0], A)
    torch.testing.assert_close(factors["B"].M[0], B)
    inverse = [torch.linalg.inv(M + rho[name] * torch.eye(len(M)).double()) for name, M in (("A", A), ("B", B))]
    torch.testing.assert_close(model.tokens.weight.detach(), before - 0.1 * inverse[0] @ G @ inverse[1])
    left = {name for name, entry in optimizer.entries.items() if not entry.preconditioned}
    assert left == {"head.bias"}


def test_a_tied_head_without_a_share_in_the_loss_leaves_the_embeddings_factors():
    uses = LayerStatistics(A=Frequencies(torch.arange(3), None, 4, 2, torch.float64)), LayerStatistics()
    for part, d, other in ((uses[0], 2, 4), (uses[1], 4, 2)):
        part.B = Accumulator(d, other)
        part.B.add((part is uses[0]) * torch.randn(1, 5, d, dtype=torch.float64), 5)
    uses[1].A = Accumulator(2, 4)
    uses[1].A.add(torch.randn(1, 5, 2, dtype=torch.float64), 2)
    B = uses[0].B.as_matrix() / 5
    both = tied(*uses, samples=2)
    torch.testing.assert_close(both.A.factor().M[0].diagonal(), torch.tensor([0.5, 0.5, 0.5, 0.0]).double())
    torch.testing.assert_close(both.B.factor().M, B)


HEADS = {
    **{fisher: {"fisher": fisher} for fisher in ("signs", "mc", "exact", "empirical")},
    **{memory: {"memory": memory} for memory in ("batch", "ema", "sum", "window:2")},
    **{str(trust): {"trust": trust} for trust in ("spectral", "kl", "graft:adam", "rms:0.1")},
    "fused": {"fused": True, "form": "rows", "memory": "batch"},
    "reduce": {"sharing": "reduce"},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_tied_head_with_every_option(kind):
    """It trains, is saved and loaded, and a skipped step leaves no trace."""
    torch.manual_seed(0)
    model = TiedHead(32)
    plan = parametrize(model, base_shapes(TiedHead, width=16))
    given = {"trust": "spectral", "exclude": (), "class_dim": -1, **HEADS[kind]}
    optimizer = KFAC(model, plan, lr=0.02, **given)
    assert optimizer.entries["tokens.weight"].preconditioned
    assert not plan.falls_back("tokens.weight", (), "kfac")
    words, losses = sequences(), []

    def step(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(words[:, :-1]), words[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    for _ in range(15):
        step(model, optimizer)
    assert losses[-1] < 0.95 * losses[0], losses
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    (model(words[:, :-1]).sum() * math.nan).backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(torch.equal(values, state[0][name]) for name, values in model.state_dict().items())
    twin = TiedHead(32)
    twin_plan = parametrize(twin, base_shapes(TiedHead, width=16))
    twin.load_state_dict(state[0])
    other = KFAC(twin, twin_plan, lr=0.02, **given)
    other.load_state_dict(state[1])
    step(model, optimizer)
    step(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def numbers_in(state) -> int:
    """How many numbers the tensors of a state hold that are no single ones."""
    if isinstance(state, torch.Tensor):
        return state.numel() if state.numel() > 1 else 0
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(numbers_in, values))


@pytest.mark.parametrize("memory", [None, "batch", "ema", "window:2"])
@pytest.mark.parametrize("trust", ["spectral", None])
def test_the_factors_of_a_tied_head_are_counted_as_matrices(trust, memory):
    torch.manual_seed(0)
    model = TiedHead(6)
    optimizer = KFAC(model, trust=trust, memory=memory, exclude=(), class_dim=-1)
    words = sequences()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(words[:, :-1]), words[:, 1:]).backward()
        optimizer.step()
    state = contents(optimizer)["state"][0]
    held = numbers_in(state["operators"]) + numbers_in(state.get("memory", {}))
    options = {"trust": trust, "memory": memory and Memory.of(memory), "solver": "cholesky", "form": "auto"}
    layer = LayerSize(VOCABULARY, 6, one_hot=True, ties_head=True, samples=16, positions=CONTEXT)
    assert both_factors(layer, {**options, "fisher": None, "sharing": "expand"}) == held


class LargeVocabulary(nn.Module):
    """A head that is tied to an embedding of so many tokens, and another embedding."""

    def __init__(self, vocabulary: int, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, 2), nn.Embedding(CONTEXT, 2)
        self.middle, self.head = nn.Linear(2, 2), nn.Linear(2, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def remarks_on(model: nn.Module, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KFAC(model, lr=0.1, **options)
    assert all(remark.filename == __file__ for remark in caught)
    return [str(remark.message) for remark in caught if "vocabulary" in str(remark.message)]


def test_a_matrix_over_a_large_vocabulary_is_warned_of_once():
    (remark,) = remarks_on(LargeVocabulary(10000), trust=None)
    assert 'embedding "tokens" is that of head "head" too' in remark
    assert "KFAC then forms and inverts a 10000 x 10000 matrix over the vocabulary. One takes 0.373 GiB" in remark
    assert 'exclude=("tokens", "head") leaves the weight to the fallback rule' in remark
    (remark,) = remarks_on(LargeVocabulary(10000).double(), exclude=("places",))
    assert "One takes 0.745 GiB" in remark
    assert 'exclude=("places", "tokens", "head")' in remark


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LargeVocabulary(10000), {"trust": None, "exclude": ("tokens", "head")}),
        (LargeVocabulary(10000), {}),
        (LargeVocabulary(10000, tied=False), {"trust": None}),
        (LargeVocabulary(8192), {"trust": None}),
    ],
    ids=["excluded", "left by default", "not tied", "small"],
)
def test_without_such_a_matrix_nothing_is_said(model, options):
    assert remarks_on(model, **options) == []


class Partly(TiedHead):
    """A head that runs or not, above an embedding that runs or not."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other, self.read = nn.Linear(5, width), nn.Linear(width, VOCABULARY)

    def forward(self, x, uses=("tokens", "head")):
        h = self.tokens(x) if "tokens" in uses else self.other(x)
        h = self.middle(h).tanh()
        return self.head(h) if "head" in uses else self.read(h)


BOTH = ("tokens", "head")
KINDS = {
    "the embedding alone, then both": [("tokens",), BOTH],
    "both, then the embedding alone": [BOTH, ("tokens",)],
    "the head alone, then both": [("head",), BOTH],
    "the embedding alone, then the head alone": [("tokens",), ("head",)],
}


def partly(model: nn.Module, uses, rows: slice = slice(None), share: float = 1.0) -> None:
    words = sequences()[rows]
    x = words[:, :-1] if "tokens" in uses else F.one_hot(words[:, :-1] % 5, 5).to(model.tokens.weight.dtype)
    (share * loss_of(model(x, uses), words[:, 1:])).backward()


@pytest.mark.parametrize("options", [{}, {"memory": "window:2"}, {"memory": "batch", "trust": None}, {"memory": "ema"}])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_tied_weight_whose_uses_do_not_all_run(kinds, options):
    """In micro-batches of one step, and in steps one after the other."""
    torch.manual_seed(0)
    model = Partly(6).double()
    optimizer = KFAC(model, lr=0.02, exclude=(), class_dim=-1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # their gradient is that of all uses
        for uses in KINDS[kinds]:
            partly(model, uses, share=0.5)
        optimizer.step()
        for uses in (*KINDS[kinds], *KINDS[kinds]):
            optimizer.zero_grad()
            before = model.tokens.weight.detach().clone()
            partly(model, uses)
            optimizer.step()
            assert not torch.equal(before, model.tokens.weight)
    assert optimizer.skipped == 0


@pytest.mark.parametrize("options", [{}, {"trust": None, "form": "matrix"}, {"sharing": "reduce"}])
def test_micro_batches_of_a_tied_head_are_the_batch(options):
    """Partial traces are those of the whole batch, not sums of those of its parts."""
    torch.manual_seed(0)
    models = [TiedHead(6).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, parts in zip(models, ([slice(0, 16)], [slice(0, 4), slice(4, 16)]), strict=True):
        optimizer = KFAC(model, lr=0.05, exclude=(), class_dim=-1, fisher="exact", **options)
        words = sequences()
        for rows in parts:
            output = model(words[rows, :-1])
            (loss_of(output, words[rows, 1:]) * (len(output) / 16)).backward()
        optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_uses_that_run_in_different_passes_have_the_curvature_of_all_samples():
    """F = A_e (x) B_e + B_h (x) A_h, with sums over the samples of both passes."""
    torch.manual_seed(0)
    model = Partly(6).double()
    optimizer = KFAC(model, lr=0.05, exclude=(), class_dim=-1, fisher="exact", trust=None, form="matrix")
    seen: dict = {}
    optimizer.watch(lambda layer, block, factors, rho: seen.update({layer: factors}))
    partly(model, ("tokens",), share=0.5)
    partly(model, ("head",), share=0.5)
    alone = [one.layers["tokens"].statistics for one in optimizer.capture.passes]
    e, h = ((use.A, use.B.as_matrix()[0] / total_count(use.B.counts)) for use in alone)
    A_e, A_h = torch.diag(e[0].sums[0]) / 32, h[0].as_matrix()[0] / 32
    optimizer.step()
    whole = torch.kron(A_e, e[1]) + torch.kron(h[1], A_h)
    parts = whole.reshape(VOCABULARY, 6, VOCABULARY, 6)
    A, B = parts.diagonal(dim1=1, dim2=3).sum(-1), parts.diagonal(dim1=0, dim2=2).sum(-1)
    ours = seen["tokens"]["A"].M[0], seen["tokens"]["B"].M[0]
    scale = ours[0].trace() * ours[1].trace() / whole.trace()  # of a mean over positions
    torch.testing.assert_close(ours[0] / ours[0].trace(), A / A.trace())
    torch.testing.assert_close(ours[1] / ours[1].trace(), B / B.trace())
    torch.testing.assert_close(scale, torch.tensor(1 / CONTEXT).double())
