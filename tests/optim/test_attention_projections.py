"""Attention of torch is preconditioned like a network that has Linear layers for queries, keys, values and output."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mukron
from mukron import FOOF, KFAC, GaussNewton, Shampoo
from mukron.exponents import fit_exponent
from networks import GPT

WIDTH, HEADS, CLASSES, SAMPLES, LENGTH, SOURCE = 8, 2, 5, 4, 6, 3
METHODS = {"kfac": KFAC, "foof": FOOF, "gauss-newton": GaussNewton, "shampoo": Shampoo}
NAMES = ("q", "k", "v")


class Split(nn.Module):
    """The same attention with four Linear layers, samples first."""

    def __init__(self, kdim: int, bias: bool) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(kdim, WIDTH, bias), nn.Linear(kdim, WIDTH, bias)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q(query), self.k(key), self.v(value))
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """An attention between two layers, on the same tokens, on other ones, or on three different tensors."""

    def __init__(self, fused=True, kind="self", bias=True, batch_first=True, need_weights=True, masked=False) -> None:
        super().__init__()
        kdim = 7 if kind == "sizes" else WIDTH
        self.fused, self.kind, self.need_weights, self.batch_first = fused, kind, need_weights, batch_first
        self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if masked else None
        self.first, self.other = nn.Linear(5, WIDTH), nn.Linear(5, kdim)
        sizes = {"kdim": kdim, "vdim": kdim} if kind == "sizes" else {}
        self.attention = (
            nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first, **sizes)
            if fused
            else Split(kdim, bias)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.first(x).tanh()
        z = self.other(x[:, :SOURCE]).tanh()
        query, key, value = {"self": (h, h, h), "three": (h, z, z.sin())}.get(self.kind, (h, z, z))
        return self.head(h + self.attend(query, key, value))

    def attend(self, query, key, value):
        if not self.fused:
            return self.attention(query, key, value, self.mask)
        if not self.batch_first:
            same = (query is key, key is value)
            query = query.transpose(0, 1)
            key = query if same[0] else key.transpose(0, 1)
            value = key if same[1] else value.transpose(0, 1)
        mask = None if self.mask is None else ~self.mask
        attended = self.attention(query, key, value, need_weights=self.need_weights, attn_mask=mask)[0]
        return attended if self.batch_first else attended.transpose(0, 1)


def twins(**options) -> tuple[Net, Net]:
    """The network, and the one of Linear layers with the same weights."""
    torch.manual_seed(0)
    ours = Net(**options)
    theirs = Net(fused=False, **{name: options[name] for name in ("kind", "bias", "masked") if name in options})
    theirs.load_state_dict(translated(ours))
    return ours.double(), theirs.double()


def translated(ours: Net) -> dict[str, torch.Tensor]:
    """The weights of the network, by their names in the other one."""
    state = dict(ours.state_dict())
    for kind in ("weight", "bias"):
        fused = state.pop(f"attention.in_proj_{kind}", None)
        for number, name in enumerate(NAMES):
            own = state.pop(f"attention.{name}_proj_{kind}", None)
            if own is None and fused is not None:
                own = fused[WIDTH * number : WIDTH * (number + 1)]
            if own is not None:
                state[f"attention.{name}.{kind}"] = own
        if (out := state.pop(f"attention.out_proj.{kind}", None)) is not None:
            state[f"attention.out.{kind}"] = out
    return state


def batch(seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, LENGTH, 5, generator=generator, dtype=dtype)
    return x, torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)


def step(model, optimizer, seed=0, dtype=torch.float64, autocast=False):
    x, y = batch(seed, dtype)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    F.cross_entropy(output.flatten(0, 1).to(dtype), y.flatten()).backward()
    optimizer.step()


def compare(ours, theirs, rtol=1e-9, atol=1e-11, left=()):
    """left: names that are not compared. The bias of keys changes nothing, and its gradient is rounding alone."""
    state = translated(ours)
    for name, values in theirs.state_dict().items():
        if name not in left:
            off = (state[name] - values).abs().max()
            assert torch.allclose(state[name], values, rtol=rtol, atol=atol), (name, off)


def made(method, model, **options):
    return method(model, lr=0.1, **({"class_dim": -1} if method is KFAC else {}), **options)


SHAPES = {
    "self": {},
    "self, positions first": {"batch_first": False},
    "cross": {"kind": "cross"},
    "three": {"kind": "three"},
    "masked": {"masked": True},
    "without weights": {"need_weights": False},
    "masked without weights": {"masked": True, "need_weights": False, "batch_first": False},
    "without bias": {"bias": False, "kind": "cross", "batch_first": False},
    "sizes": {"kind": "sizes", "bias": False},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [KFAC, FOOF], ids=["kfac", "foof"])
def test_steps_are_those_of_linear_layers(method, shape):
    ours, theirs = twins(**SHAPES[shape])
    optimizers = made(method, ours, trust=None), made(method, theirs, trust=None)
    assert optimizers[0].layers.keys() >= {"attention.out_proj"}
    for seed in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            step(model, optimizer, seed)
    compare(ours, theirs)


OPTIONS = {
    "defaults": {},
    "mc": {"fisher": "mc"},
    "exact": {"fisher": "exact"},
    "empirical": {"fisher": "empirical"},
    "draws": {"fisher": "mc:3"},
    "batch": {"memory": "batch"},
    "ema": {"memory": "ema"},
    "sum": {"memory": "sum"},
    "window": {"memory": "window:2"},
    "rows": {"form": "rows", "memory": "batch", "trust": None},
    "matrix": {"form": "matrix", "memory": "batch"},
    "kl": {"trust": "kl"},
    "graft": {"trust": "graft:adam"},
    "no trust": {"trust": None},
    "fused": {"fused": True},
    "intervals": {"factor_every": 2, "inverse_every": 4, "refresh_warmup": 1},
    "eigh": {"solver": "eigh"},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options, kind):
    """Steps of Linear layers, states that can be saved, and skipped steps that leave no trace."""
    ours, theirs = twins(kind=kind)
    given = {"trust": "spectral", **OPTIONS[options]}
    optimizers = made(KFAC, ours, **given), made(KFAC, theirs, **given)
    for seed in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            step(model, optimizer, seed)
    if "kl" not in options and "graft" not in options:  # whose bounds are of parameters or all of them together
        compare(ours, theirs, rtol=1e-7, atol=1e-9)
    before = copy.deepcopy((ours.state_dict(), optimizers[0].state_dict()))
    x, _ = batch(5)
    (ours(x).sum() * torch.nan).backward()
    optimizers[0].step()
    assert optimizers[0].skipped == 1
    assert all(torch.equal(values, before[0][name]) for name, values in ours.state_dict().items())
    twin = Net(kind=kind).double()
    twin.load_state_dict(before[0])
    other = made(KFAC, twin, **given)
    other.load_state_dict(before[1])
    for seed in (7, 8):
        step(ours, optimizers[0], seed)
        step(twin, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))


def factors(method, model, **options):
    optimizer, seen = made(method, model, memory="batch", trust=None, **options), {}
    optimizer.watch(lambda layer, block, of, damping: seen.update({layer: of}))
    step(model, optimizer)
    return {layer: {name: as_matrix(factor) for name, factor in of.items()} for layer, of in seen.items()}


def as_matrix(factor):
    return factor.M if hasattr(factor, "M") else factor.matrix().M


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_factors_of_queries_keys_and_values(kind, sharing):
    ours, theirs = twins(kind=kind)
    options = {"fisher": "empirical", "sharing": sharing}
    own, expected = factors(KFAC, ours, **options), factors(KFAC, theirs, **options)
    for number, name in enumerate(NAMES):
        for factor in ("A", "B"):
            if sharing == "reduce" and name == "k":
                continue
            ours_, theirs_ = own["attention.in_proj_weight"][factor][number], expected[f"attention.{name}"][factor][0]
            torch.testing.assert_close(ours_, theirs_)
    for factor in ("A", "B"):
        torch.testing.assert_close(own["attention.out_proj"][factor], expected["attention.out"][factor])


def test_keys_are_not_reduced_to_sums_that_are_zero():
    """Softmax does not see what is added to all keys: their signals sum to zero, and a B of such sums is rounding."""
    ours, theirs = twins()
    reduced = factors(KFAC, theirs, fisher="empirical", sharing="reduce")["attention.k"]["B"]
    assert reduced.diagonal(dim1=-1, dim2=-2).sum() < 1e-25
    ours, _ = twins()
    expanded = factors(KFAC, copy.deepcopy(ours), fisher="empirical")["attention.in_proj_weight"]
    own = factors(KFAC, ours, fisher="empirical", sharing="reduce")["attention.in_proj_weight"]
    for factor in ("A", "B"):
        torch.testing.assert_close(own[factor][1], expanded[factor][1])


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_gauss_newton_is_that_of_the_whole_parameter(kind):
    """Queries, keys and values together, as for any weight: (J^T diag(chi)^2 J / n + rho)^-1 g."""
    model = twins(kind=kind)[0]
    before, optimizer = copy.deepcopy(model), GaussNewton(model, lr=0.1, trust=None)
    step(model, optimizer)
    W = before.attention.in_proj_weight
    rho = optimizer.state[model.attention.in_proj_weight]["operators"]["weight"]["K"].rho
    x, y = batch()
    f = before(x).flatten(0, 1)
    (errors,) = torch.autograd.grad(F.cross_entropy(f, y.flatten()), f, retain_graph=True)
    J = torch.stack([torch.autograd.grad(one, W, retain_graph=True)[0].flatten() for one in f.flatten()])
    n = len(f)
    chi_J = n * errors.flatten()[:, None] * J
    expected = torch.linalg.solve(chi_J.mT @ chi_J / n + rho * torch.eye(W.numel()), J.mT @ errors.flatten())
    moved = (W - model.attention.in_proj_weight).detach() / 0.1
    torch.testing.assert_close(moved.flatten(), expected)


def test_unbatched_inputs_are_positions_of_one_sample():
    class Unbatched(Net):
        def attend(self, query, key, value):
            same = query[0]
            return self.attention(same, same, same, need_weights=False)[0].unsqueeze(0)

    x, y = batch()
    models = Unbatched().double(), Net().double()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = made(KFAC, model, trust=None)
        F.cross_entropy(model(x[:1])[0], y[0]).backward()
        optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_as_many_positions_as_samples():
    """Which of two equal sizes are the samples is known from the attention itself."""

    class Square(Net):
        def forward(self, x):
            return super().forward(x[:, :SAMPLES])

    torch.manual_seed(0)
    ours = Square().double()
    theirs = Square(fused=False).double()
    theirs.load_state_dict(translated(ours))
    x, y = batch()
    seen = []
    for model in (ours, theirs):
        optimizer = made(KFAC, model, trust=None, memory="batch", fisher="empirical", sharing="reduce")
        of: dict = {}
        optimizer.watch(lambda layer, block, found, damping, of=of: of.update({layer: found}))
        F.cross_entropy(model(x).flatten(0, 1), y[:, :SAMPLES].flatten()).backward()
        optimizer.step()
        seen.append(of)
    for factor in ("A", "B"):
        in_projection = as_matrix(seen[0]["attention.in_proj_weight"][factor])
        torch.testing.assert_close(in_projection[0], as_matrix(seen[1]["attention.q"][factor])[0])
        torch.testing.assert_close(
            as_matrix(seen[0]["attention.out_proj"][factor]), as_matrix(seen[1]["attention.out"][factor])
        )


def test_positions_that_the_loss_ignores():
    ours, theirs = twins(kind="cross")
    optimizers = [made(KFAC, model, trust=None, fisher="empirical") for model in (ours, theirs)]
    x, y = batch()
    y[0] = -100
    y[1, 2:] = -100
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100).backward()
        optimizer.step()
    compare(ours, theirs)


def test_micro_batches():
    ours, theirs = twins(kind="cross")
    optimizers = [made(KFAC, model, trust=None) for model in (ours, theirs)]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        for seed in (0, 1):
            x, y = batch(seed)
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2).backward()
        optimizer.step()
    compare(ours, theirs)


def test_an_attention_that_is_used_twice():
    ours, theirs = twins()
    for model in (ours, theirs):
        attend = model.attend
        model.attend = lambda q, k, v, attend=attend: attend(attend(q, k, v), k, v)
        optimizer = made(KFAC, model, trust=None)
        step(model, optimizer)
    compare(ours, theirs)


def test_autocast_and_float32():
    ours, theirs = (model.float() for model in twins())
    optimizers = made(KFAC, ours), made(KFAC, theirs)
    for seed in range(2):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            step(model, optimizer, seed, torch.float32, autocast=True)
    compare(ours, theirs, rtol=0.05, atol=0.02, left=("attention.k.bias",))
    assert optimizers[0].skipped == 0


class Encoder(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.checkpointed = nn.Embedding(11, width), checkpointed
        layer = nn.TransformerEncoderLayer(width, max(width // 8, 1), 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        h = self.tokens(x)
        for layer in self.layers.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
        return self.head(h)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(seed))


def token_step(model, optimizer, seed=0):
    x = tokens(seed)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def test_an_encoder_trains_and_checkpoints():
    torch.manual_seed(0)
    model = Encoder(16).double()
    checkpointed = Encoder(16, checkpointed=True).double()
    checkpointed.load_state_dict(model.state_dict())
    optimizers = made(KFAC, model), made(KFAC, checkpointed)
    losses = []
    for _ in range(30):
        losses.append(token_step(model, optimizers[0]))
        token_step(checkpointed, optimizers[1])
    assert losses[-1] < 0.7 * losses[0]
    for a, b in zip(model.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    model.eval()
    with torch.no_grad():
        output = model(tokens())
    model.train()
    torch.testing.assert_close(output, model(tokens()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models():
    torch.manual_seed(0)
    model, plain = Net().double(), Net().double()
    plain.load_state_dict(model.state_dict())
    optimizer, reference = made(KFAC, model, trust=None), made(KFAC, plain, trust=None)
    compiled = torch.compile(model, backend="eager")
    for seed in range(2):
        step(compiled, optimizer, seed)
        step(plain, reference, seed)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies_go_their_own_way(make):
    ours, _ = twins()
    optimizer = made(KFAC, ours)
    step(ours, optimizer)
    twin, other = make((ours, optimizer))
    for seed in (1, 2):
        step(ours, optimizer, seed)
        step(twin, other, seed)
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_is_left_behind():
    linear, model = F.linear, Net().double()
    optimizer = made(KFAC, model)
    step(model, optimizer)
    assert F.linear is linear
    dead = weakref.ref(optimizer.capture)
    del optimizer
    gc.collect()
    assert dead() is None
    assert hooks(model) == 0


def test_a_forward_pass_that_fails_or_is_interrupted():
    linear, model = F.linear, Net().double()
    optimizer = made(KFAC, model)
    x, _ = batch()

    def interrupt(error):
        def fail(*_):
            raise error

        return model.attention.register_forward_pre_hook(fail)

    handle = interrupt(ValueError())
    with pytest.raises(ValueError):  # noqa: PT011
        model(x)
    assert F.linear is linear
    handle.remove()
    handle = interrupt(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    step(model, optimizer)
    assert F.linear is linear
    handle = interrupt(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(x)
    del optimizer
    gc.collect()
    assert F.linear is linear


def test_a_pass_that_is_never_differentiated_holds_nothing():
    model = Net().double()
    optimizer = made(KFAC, model)
    x, _ = batch()
    output, inputs = model(x), []
    model.head.register_forward_pre_hook(lambda module, given: inputs.append(weakref.ref(given[0])))
    output = model(x)
    (dead,) = inputs
    del output
    assert dead() is None
    assert not optimizer.capture.passes


def test_two_optimizers_on_one_model():
    model, alone = Net().double(), Net().double()
    alone.load_state_dict(model.state_dict())
    attention = [*model.attention.parameters()]
    rest = [p for p in model.parameters() if not any(p is own for own in attention)]
    one, two = made(KFAC, model, params=attention, trust=None), made(FOOF, model, params=rest, trust=None)
    x, y = batch()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    one.step()
    two.step()
    reference = made(KFAC, alone, trust=None)
    step(alone, reference)
    torch.testing.assert_close(model.attention.in_proj_weight, alone.attention.in_proj_weight)
    torch.testing.assert_close(model.attention.out_proj.bias, alone.attention.out_proj.bias)


TAKEN = {
    (): {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
    ("attention",): set(),
    ("attention.out_proj",): {"in_proj_weight", "in_proj_bias"},
    ("attention.in_proj_weight",): {"in_proj_bias", "out_proj.weight", "out_proj.bias"},
    ("attention.in_proj_weight", "attention.in_proj_bias"): {"out_proj.weight", "out_proj.bias"},
}


@pytest.mark.parametrize("exclude", TAKEN)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_taken(method, exclude):
    """The optimizer, its plan and the table agree."""
    torch.manual_seed(0)
    model = Wide(32)
    plan = mukron.parametrize(model, mukron.base_shapes(Wide, width=16))
    optimizer = METHODS[method](model, plan, exclude=exclude)
    taken = {name.removeprefix("attention.") for name, entry in optimizer.entries.items() if entry.preconditioned}
    assert {name for name in taken if "proj" in name} == TAKEN[exclude]
    table = plan.explain(method, exclude=exclude, whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"
        assert plan.falls_back(row["parameter"], exclude, method) != entry.preconditioned
    assert ("in_proj" in str(optimizer.plan().rows)) == any("in_proj" in name for name in TAKEN[exclude])


def test_a_bias_alone():
    """A frozen weight has no step; its bias has the one of a Linear layer with a frozen weight."""
    ours, theirs = twins()
    ours.attention.in_proj_weight.requires_grad_(False)
    for name in NAMES:
        getattr(theirs.attention, name).weight.requires_grad_(False)
    options = ({"exclude": ("attention.in_proj_weight",)}, {})
    before = ours.attention.in_proj_bias.detach().clone()
    for model, given in zip((ours, theirs), options, strict=True):
        step(model, made(KFAC, model, trust=None, **given))
    compare(ours, theirs)
    assert not torch.equal(ours.attention.in_proj_bias, before)


def test_extra_keys_and_values_are_left_to_the_fallback_rule():
    torch.manual_seed(0)
    model = Net().double()
    model.attention = nn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True
    ).double()
    optimizer = made(KFAC, model)
    assert {name for name, entry in optimizer.entries.items() if not entry.preconditioned} == {
        "attention.bias_k",
        "attention.bias_v",
    }
    step(model, optimizer)
    assert optimizer.skipped == 0


def test_a_method_of_gradients_has_the_steps_of_linear_layers():
    ours, theirs = twins()
    optimizers = Shampoo(ours, lr=0.1), Shampoo(theirs, lr=0.1)
    for seed in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            step(model, optimizer, seed)
    compare(ours, theirs, rtol=1e-6, atol=1e-8, left=("attention.k.bias",))


class Wide(nn.Module):
    """Heads of one size, whose number grows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, width), nn.Linear(width, CLASSES)
        self.attention = nn.MultiheadAttention(width, width // 8, batch_first=True)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", [KFAC, FOOF], ids=["kfac", "foof"])
def test_queries_keys_and_values_move_alike_at_every_width(method):
    """Their change after two plain steps on few samples, width 64 to 512."""
    changes: dict[str, list] = {}
    x, y = batch(dtype=torch.float32)
    for width in (64, 128, 256, 512):
        for seed in range(3):
            torch.manual_seed(seed)
            model = Wide(width)
            plan = mukron.parametrize(model, mukron.base_shapes(Wide, width=64))
            options = {"class_dim": -1} if method is KFAC else {}
            optimizer = method(model, plan, lr=0.01, trust=None, **options)
            before = projected(model, x)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
            for name, then, now in zip(NAMES, before, projected(model, x), strict=True):
                changes.setdefault(name, []).append((width, (now - then).square().mean().sqrt().item()))
    slopes = {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in changes.items()}
    assert all(abs(slope) < 0.12 for slope in slopes.values()), slopes


@torch.no_grad()
def projected(model: Wide, x: torch.Tensor) -> list[torch.Tensor]:
    h = model.first(x).tanh()
    return list(F.linear(h, model.attention.in_proj_weight, model.attention.in_proj_bias).chunk(3, -1))


@pytest.mark.parametrize("cut", [{}, {"block": 8}], ids=str)
@pytest.mark.parametrize("trust", ["spectral", "kl", "graft:adam", "rms"])
def test_the_order_of_samples_does_not_matter_to_shampoo(trust, cut):
    """The bias of keys has a gradient of rounding alone, which would be made a full move, and take KLClip's bound."""
    after = []
    for order in (slice(None), torch.arange(7, -1, -1)):
        torch.manual_seed(0)
        model = GPT(16).double()
        optimizer = Shampoo(model, lr=0.02, trust=trust, **cut)
        for seed in range(12):
            tokens = torch.randint(50, (8, 6), generator=torch.Generator().manual_seed(seed))[order]
            optimizer.zero_grad()
            F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        after.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*after, rtol=1e-9, atol=1e-9)
