"""Methods that need gradients alone take matrices that no pass is seen of: recurrent, tied and bare ones."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.linalg import orthogonalized
from mukron.models import MLP

METHODS = {
    "shampoo": lambda model, plan=None, **options: mukron.Shampoo(model, plan, **options),
    "soap": lambda model, plan=None, **options: mukron.SOAP(model, plan, **options),
    "muon": lambda model, plan=None, **options: mukron.Muon(model, plan, **options),
}


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        layer = nn.TransformerEncoderLayer(width, width // 8, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(11, width), nn.LSTM(width, width, 2), nn.Linear(width, 11)

    def forward(self, x):
        return self.head(self.lstm(self.tokens(x))[0])


class Bare(nn.Module):
    """A matrix [in, out] and positions that are parameters of the network itself, and two layers with one weight."""

    mukron_roles: ClassVar = {"mix": "hidden", "positions": "input"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x):
        h = self.tokens(x) + self.positions
        return self.head(self.b(self.a(h @ self.mix).tanh()).tanh())


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    x = tokens(seed)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def planned(kind: type[nn.Module], width: int = 32, base: int = 16):
    torch.manual_seed(0)
    model = kind(width)
    return model, mukron.parametrize(model, mukron.base_shapes(kind, width=base))


TAKEN = {
    Encoder: {f"layers.layers.{k}.self_attn.{name}" for k in (0, 1) for name in ("in_proj_weight", "out_proj.weight")},
    Recurrent: {f"lstm.weight_{side}_l{k}" for side in ("ih", "hh") for k in (0, 1)},
    Bare: {"mix", "a.weight"},
}


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_taken_and_what_explain_says(method, kind):
    model, plan = planned(kind)
    optimizer = METHODS[method](model, plan)
    taken = {name for name, entry in optimizer.entries.items() if entry.preconditioned}
    assert taken >= TAKEN[kind]
    assert not {name for name in taken if name.startswith(("tokens", "positions"))}
    assert ("head.weight" in taken) == (method == "shampoo")
    table = plan.explain(method, whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"


def encoder(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def lstm(width: int) -> nn.Module:
    return nn.LSTM(width, width, 2)


@pytest.mark.parametrize("make", [encoder, lstm])
@pytest.mark.parametrize("method", METHODS)
def test_nearly_all_of_an_encoder_and_of_an_lstm_is_preconditioned(method, make):
    """All matrices, and with Shampoo the biases of layers; the page says how much that is."""
    model = make(256)
    plan = mukron.parametrize(model, mukron.base_shapes(make, width=64))
    entries = METHODS[method](model, plan).entries
    left = [name for name, values in model.named_parameters() if not entries[name].preconditioned]
    assert all(model.get_parameter(name).ndim == 1 for name in left), left
    if make is encoder and method == "shampoo":
        assert all(".norm" in name for name in left), left
    numbers = {name: values.numel() for name, values in model.named_parameters()}
    share = 1 - sum(numbers[name] for name in left) / sum(numbers.values())
    assert share > 0.995
    of = {encoder: "`nn.TransformerEncoder`", lstm: "`nn.LSTM`"}[make]
    title = {"shampoo": "Shampoo", "soap": "SOAP", "muon": "Muon"}[method]
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (said,) = re.findall(rf"of an {of} .*?: ([^;:]*?)[;.] ", page)
    assert f"{title} {share:.1%}" in said, said


@pytest.mark.parametrize("method", METHODS)
def test_beside_vectors_only_the_embedding_and_the_head_are_left(method):
    """And to Shampoo, which has no rule for heads, the embedding alone; without a plan as with one."""
    for kind in (Encoder, Recurrent):
        for model, given in (planned(kind), (kind(32), None)):
            entries = METHODS[method](model, given).entries
            left = {n for n, values in model.named_parameters() if values.ndim > 1 and not entries[n].preconditioned}
            assert left == {"tokens.weight"} | ({"head.weight"} if method != "shampoo" else set())


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", ["kfac", "foof"])
def test_methods_that_measure_passes_leave_what_they_do_not_see(method, kind):
    """Attention and weights that layers share are seen; recurrent and bare ones are not."""
    model, plan = planned(kind)
    optimizer = {"kfac": mukron.KFAC, "foof": mukron.FOOF}[method](model, plan, class_dim=-1)
    seen = {Encoder: TAKEN[Encoder], Recurrent: set(), Bare: {"a.weight"}}[kind]
    assert {name for name in TAKEN[kind] if optimizer.entries[name].preconditioned} == seen
    rows = {row[0]: row[-1] for row in plan.explain(method, whole=True).rows}
    assert {name for name in TAKEN[kind] if not rows[name].startswith("not preconditioned")} == seen


def test_queries_keys_and_values_are_matrices_of_their_own():
    """One step of Muon is U V^T of each third of the gradient."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True, bias=False)
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(16, 3)})
    optimizer = mukron.Muon(model, lr=0.1, momentum=0.0, precision="float32", rounds=5)
    x = torch.randn(8, 5, 16)
    model["head"](attention(x, x, x)[0]).square().mean().backward()
    G, before = attention.in_proj_weight.grad.clone(), attention.in_proj_weight.detach().clone()
    optimizer.step()
    moved = (before - attention.in_proj_weight.detach()) / 0.1
    expected = torch.cat([orthogonalized(part[None], 1e-7, dtype=None)[0] for part in G.split(16)])
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-4)
    assert optimizer.layers["attention.in_proj_weight"].layer.groups == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_gate_has_the_step_of_a_linear_layer_with_its_gradient(method):
    torch.manual_seed(0)
    cell = nn.LSTM(8, 12, bias=False)
    model = nn.ModuleDict({"lstm": cell, "head": nn.Linear(12, 3)})
    gates = nn.ModuleDict({**{str(k): nn.Linear(8, 12, bias=False) for k in range(4)}, "head": nn.Linear(12, 3)})
    start, gradients = torch.randn(48, 8), torch.randn(3, 48, 8)
    options = {"lr": 0.1} | ({"precision": "float32"} if method == "muon" else {})
    ours, theirs = METHODS[method](model, **options), METHODS[method](gates, **options)
    cell.weight_ih_l0.data.copy_(start)
    for k in range(4):
        gates[str(k)].weight.data.copy_(start[12 * k : 12 * k + 12])
    for G in gradients:
        cell.weight_ih_l0.grad = G.clone()
        for k in range(4):
            gates[str(k)].weight.grad = G[12 * k : 12 * k + 12].clone()
        ours.step()
        theirs.step()
    made = torch.cat([gates[str(k)].weight for k in range(4)])
    torch.testing.assert_close(cell.weight_ih_l0, made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_it_trains_skips_and_resumes(method, kind):
    model, plan = planned(kind)
    optimizer = METHODS[method](model, plan)
    first = step(model, optimizer)
    for _ in range(60):
        last = step(model, optimizer)
    assert last < 0.7 * first
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    (model(tokens(1)).sum() * float("nan")).backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(torch.equal(value, state[0][name]) for name, value in model.state_dict().items())
    twin = kind(32)
    twin_plan = mukron.parametrize(twin, mukron.base_shapes(kind, width=16))
    twin.load_state_dict(state[0])
    other = METHODS[method](twin, twin_plan)
    other.load_state_dict(state[1])
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(twin, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_exclude_names_modules_and_parameters(method):
    model, plan = planned(Bare)
    optimizer = METHODS[method](model, plan, exclude=("mix", "tokens", "head"))
    taken = {name for name, entry in optimizer.entries.items() if entry.preconditioned}
    assert "mix" not in taken
    assert "a.weight" in taken
    rows = {row[0]: row[-1] for row in plan.explain(method, exclude=("mix", "tokens", "head"), whole=True).rows}
    assert rows["mix"].startswith("not preconditioned")
    with pytest.raises(ValueError, match='the model has no module "mixer"'):
        METHODS[method](model, plan, exclude=("mixer",))


def test_fused_shampoo_measures_passes_and_leaves_them():
    model, plan = planned(Recurrent)
    optimizer = mukron.Shampoo(model, plan, fused=True)
    assert not optimizer.entries["lstm.weight_ih_l0"].preconditioned


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_attention_moves_alike_at_every_width(method):
    """Outputs of attention after three steps on few tokens, width 32 to 256."""
    widths, changes = (32, 64, 128, 256), {}
    for width in widths:
        for seed in (0, 1, 2):
            torch.manual_seed(seed)
            model = Encoder(width)
            plan = mukron.parametrize(model, mukron.base_shapes(Encoder, width=32))
            optimizer = METHODS[method](model, plan, lr=0.002)
            outputs: dict[str, list[torch.Tensor]] = {}
            for k, layer in enumerate(model.layers.layers):
                seen = outputs.setdefault(f"attention {k}", [])
                layer.self_attn.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[0].detach()))
            for _ in range(4):
                step(model, optimizer)
            for name, (before, *_, after) in outputs.items():
                changes.setdefault(name, []).append((width, (after - before).square().mean().sqrt().item()))
    slopes = {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in changes.items()}
    assert all(abs(slope) < 0.15 for slope in slopes.values()), slopes


def test_nothing_changes_for_plain_networks():
    optimizer = mukron.Shampoo(MLP(16, inputs=8))
    assert list(optimizer.layers) == ["fc1", "fc2", "fc3"]


class AllBare(nn.Module):
    """Matrices of the root module itself, one of each role."""

    mukron_roles: ClassVar = {"first": "input", "middle": "hidden", "last": "output"}

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {"first": (width, 8), "middle": (width, width), "last": (3, width)}
        for name, (out, into) in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(out, into) / into**0.5))


class Projected(nn.Module):
    """The projection of an LSTM has the role output, its gates have not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, width, proj_size=4), nn.Linear(4, 3)


class Adapted(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.extra = nn.Parameter(torch.randn(width, width))


class WithAdapter(nn.Module):
    mukron_roles: ClassVar = {"middle.extra": "hidden"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(8, width), Adapted(width), nn.Linear(width, 3)


class HeadFirst(nn.Module):
    """The head is registered before the embedding that it is tied to; it has a bias."""

    mukron_roles: ClassVar = {"head.weight": "input"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head, self.middle, self.tokens = nn.Linear(width, 11), nn.Linear(width, width), nn.Embedding(11, width)
        self.tokens.weight = self.head.weight


class SharedBare(nn.Module):
    """Weights of layers that are parameters of another module as well."""

    mukron_roles: ClassVar = {"first.weight": "input", "middle.weight": "hidden"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.others = nn.Module()
        self.others.a, self.others.b = self.first.weight, self.middle.weight


KINDS = (AllBare, Projected, WithAdapter, HeadFirst, SharedBare, *TAKEN)


@pytest.mark.parametrize("exclude", [None, (), ("head",), ("middle.weight",), ("a",), ("b.weight",)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_and_the_optimizer_agree_on_every_parameter(method, kind, exclude):
    """Which ones are preconditioned, and whose multipliers they have."""
    model, plan = planned(kind)
    uses = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known = {*uses, *(name for name, _ in model.named_modules())}
    left = [plan.falls_back(name, exclude, method) for name in plan.parameters]
    if not set(exclude or ()) <= known or all(left):
        with pytest.raises(ValueError, match=r"the model has no module|nothing to precondition"):
            METHODS[method](model, plan, exclude=exclude)
        return
    optimizer = METHODS[method](model, plan, exclude=exclude)
    rows = {row[0]: row for row in plan.explain(method, exclude=exclude, whole=True).rows}
    for name, entry in optimizer.entries.items():
        assert entry.preconditioned == (not plan.falls_back(name, optimizer.options.exclude, method)), name
        assert rows[name][-1].startswith("not preconditioned") != entry.preconditioned, name
        law = method if entry.preconditioned else "adamw"
        assert entry.scale == pytest.approx(plan.scales(law)[name].lr), name


def test_all_uses_of_a_weight_are_excluded_by_one():
    model, plan = planned(Bare)
    for network, given in ((model, plan), (Bare(32), None)):
        for exclude in (("b",), ("b.weight",), ("a",)):
            optimizer = mukron.Shampoo(network, given, exclude=exclude)
            assert not optimizer.entries["a.weight"].preconditioned, (given is None, exclude)
