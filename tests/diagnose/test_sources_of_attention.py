"""Where queries and keys come from, what their products are, and which verdicts follow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.diagnose import Check, Measurement, Record, coordinate_check
from mukron.diagnose.attention import AttentionWatch
from mukron.diagnose.record import LEFT_OUT

HEADS, TOKENS = 2, 6


def product(q, k, scale, style):
    if style == "einsum":
        return torch.einsum("...id,...jd->...ij", q, k) * scale
    if style == "sum":
        return (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * scale
    if style == "baddbmm":
        bias = torch.full((len(q) * HEADS, TOKENS, TOKENS), 7.0)
        return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale).unflatten(0, (-1, HEADS))
    return q @ k.mT * scale


class Attention(nn.Module):
    """Attention with growing heads, and what people add to its logits."""

    def __init__(self, width, style="matmul", added="mask", fused=False, normed=False, root=False):
        super().__init__()
        self.style, self.added, self.root = style, added, root
        self.scale = math.sqrt(8) * HEADS / width
        self.qkv = nn.Linear(width, 3 * width, bias=False) if fused else None
        if not fused:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norms = nn.ModuleList([nn.LayerNorm(width // HEADS) for _ in range(2)]) if normed else None
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.qkv is not None else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        logits = product(q, k, self.scale, self.style)
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        if self.added == "alibi":
            logits = logits - 3.0 * (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
        if self.added == "in place":
            logits += 5.0
        logits = logits + later * -10000.0 if self.added == "-10000" else logits.masked_fill(later, -math.inf)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("style", ["matmul", "einsum", "sum", "baddbmm"])
@pytest.mark.parametrize("added", ["mask", "alibi", "in place", "-10000"])
def test_products_are_what_they_are_before_anything_is_added(style, added):
    torch.manual_seed(0)
    model = Attention(16, style, added)
    x = torch.randn(3, TOKENS, 16)
    with AttentionWatch.over(model) as watch:
        model(x)
    q, k = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (model.query, model.key))
    (seen,) = watch.products["network"]
    torch.testing.assert_close(seen.reshape(3, HEADS, TOKENS, TOKENS), q @ k.mT * model.scale, rtol=1e-4, atol=1e-4)
    assert watch.head_dims == {"network": 8}


def by_view(q, k, d):
    return (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(*q.shape[:2], TOKENS, TOKENS) / d


def by_bias_first(q, k, d):
    return (q @ k.mT + 5.0) / d


def by_heads(q, k, d):
    return (q @ k.mT) * torch.full((HEADS, 1, 1), 1 / d)


def by_keywords(q, k, d):
    return torch.mul(input=torch.matmul(input=q, other=k.mT), other=1 / d)


def by_alpha(q, k, d):
    return torch.add(torch.ones(TOKENS, TOKENS), q @ k.mT, alpha=1 / d)


def by_two_products(q, k, d):
    return q @ k.mT / d + torch.einsum("bhqd,kd->bhqk", q, torch.ones(TOKENS, d)) / d


def by_index(q, k, d):
    logits = q @ k.mT / d
    logits[..., torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)] = -500.0
    return logits


def by_mask_of_products(q, k, d):
    logits = q @ k.mT / d
    mask = torch.ones(3, TOKENS, 1) @ torch.ones(3, 1, TOKENS)
    return logits + mask.unsqueeze(1)


def by_sink(q, k, d):
    """One more key, which every query may attend to."""
    return torch.cat([q @ k.mT / d, torch.full((3, HEADS, TOKENS, 1), 4.0)], -1)


def by_addcmul(q, k, d):
    return torch.addcmul(torch.ones(TOKENS, TOKENS), q @ k.mT, torch.tensor(0.5), value=2 / d)


def by_addcdiv(q, k, d):
    return torch.addcdiv(torch.ones(TOKENS, TOKENS), q @ k.mT, torch.tensor(float(d)))


def by_baddbmm_of_keywords(q, k, d):
    bias = torch.ones(3 * HEADS, TOKENS, TOKENS)
    return torch.baddbmm(input=bias, batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, alpha=1 / d)


def by_baddbmm_of_nothing(q, k, d):
    """What is multiplied by beta = 0 may hold any numbers."""
    nothing = torch.full((3 * HEADS, TOKENS, TOKENS), math.nan)
    return torch.baddbmm(nothing, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=1 / d)


WAYS = (by_view, by_bias_first, by_heads, by_keywords, by_alpha, by_two_products, by_index, by_mask_of_products)
WAYS += (by_sink, by_addcmul, by_addcdiv, by_baddbmm_of_keywords, by_baddbmm_of_nothing)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_scale_is_found_wherever_it_stands(way):
    class Model(nn.Module):
        def forward(self, q, k):
            return way(q, k, 8).softmax(-1)

    torch.manual_seed(0)
    q, k = torch.randn(3, HEADS, TOKENS, 8), torch.randn(3, HEADS, TOKENS, 8)
    with AttentionWatch.over(model := Model()) as watch:
        model(q, k)
    (seen,) = watch.products["network"]
    torch.testing.assert_close(seen.reshape(3, HEADS, TOKENS, TOKENS), q @ k.mT / 8, rtol=1e-4, atol=1e-5)
    assert watch.head_dims == {"network": 8}


def softmax_by_hand(logits):
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def over_keys_in_the_middle(q, k):
    return torch.einsum("bhqd,bhkd->bqkh", q, k).div(8).softmax(2).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "weights",
    [
        lambda q, k: softmax_by_hand(q @ k.mT / 8),
        lambda q, k: (q @ k.mT / 8).log_softmax(-1).exp(),
        lambda q, k: (q @ k.mT / 8).mT.softmax(-2).mT,
        over_keys_in_the_middle,
    ],
    ids=["exp", "log_softmax", "keys first", "keys in the middle"],
)
def test_softmax_is_seen_however_it_is_written(weights):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return weights(q, k) @ v

    torch.manual_seed(0)
    q, k, v = (torch.randn(3, HEADS, TOKENS, 8) for _ in range(3))
    with AttentionWatch.over(model := Model()) as watch:
        found = model(q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, scale=1 / 8), rtol=1e-4, atol=1e-5)
    (seen,) = watch.products["network"]
    torch.testing.assert_close(seen.abs().sum(), (q @ k.mT / 8).abs().sum(), rtol=1e-4, atol=0)
    assert watch.head_dims == {"network": 8}


def test_a_compiled_network_is_watched_without_being_compiled_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(Attention(16), backend="eager")
    x = torch.randn(3, TOKENS, 16)
    with AttentionWatch.over(model) as watch:
        model(x)
    assert len(watch.logits) == 1
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        ({}, {"query", "key"}),
        ({"fused": True}, {"qkv"}),
        ({"normed": True}, {"query", "key", "norms.0", "norms.1"}),
        ({"added": "alibi"}, {"query", "key"}),
    ],
)
def test_sources_are_the_nearest_layers(options, sources):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), Attention(16, **options))
    with AttentionWatch.over(model) as watch:
        model(torch.randn(3, TOKENS, 16))
    assert watch.sources == {"2": {f"2.{name}" for name in sources}}
    assert watch.fed == {"2": {"2.out"}}


def test_bare_matrices_are_sources_by_their_own_names():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.wq, self.wk = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            h = self.norm(self.before(x))
            return ((h @ self.wq) @ (h @ self.wk).mT).softmax(-1) @ h

    model = Bare()
    with AttentionWatch.over(model) as watch:
        model(torch.randn(2, 5, 8))
    assert watch.sources == {"network": {"wq", "wk", "norm"}}


class Block(Attention):
    """Attention written in the block itself, beside an MLP that may be wrong."""

    def __init__(self, width, wrong=False, **options):
        super().__init__(width, **options)
        self.factor = (width / 16) ** 0.5 if wrong else 1.0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        for layer in (self.query, self.key, self.value, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x):
        x = x + super().forward(self.norm1(x))
        return x + self.down(self.factor * F.gelu(self.up(self.norm2(x))))


def network(wrong):
    def make(width):
        head = nn.Linear(width, 10, bias=False)
        nn.init.normal_(head.weight, std=0.2 * width**-0.5)
        return nn.Sequential(nn.Embedding(10, width), Block(width, wrong), nn.LayerNorm(width), head)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_only_queries_and_keys_are_excused(wrong):
    tokens = torch.randint(10, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def loss(f, y):
        return F.cross_entropy(f.flatten(0, 1), y.flatten())

    def foof(model, plan):
        return mukron.FOOF(model, plan, lr=0.01, trust=None, class_dim=-1)

    batch, widths = (tokens, tokens.roll(-1, 1)), (64, 128, 256, 512)
    check = coordinate_check(network(wrong), foof, batch, loss=loss, base_width=32, widths=widths, seeds=3, steps=2)
    words = {(verdict.reading, verdict.layer): verdict.word for verdict in check.features}
    assert words["attention", "1"] == "not judged"
    assert words["features", "1.down"] == ("explodes" if wrong else "learns"), str(check.table())
    assert check.ok != wrong


def test_what_rounding_hides_does_not_count_but_what_the_optimizer_forgot_does():
    rows = [
        Measurement(width, seed, 1, quantity, name, value)
        for width in (64, 128)
        for seed in (0, 1)
        for quantity, name, value in (
            ("update", "gain", 0.0),
            ("gradient", "gain", 0.1),
            ("evenness", "gain", 1.0),
            ("update", "matrix", 0.0),
            ("gradient", "matrix", 0.1),
            ("evenness", "matrix", 1e-4),
            ("update", "forgotten", 0.0),
            ("gradient", "forgotten", 0.1),
            ("update", "weight", 0.5),
            ("gradient", "weight", 0.1),
        )
    ]
    about = {"method": "kfac", "scheme": "mup", "damping": "", "roles": {}, "predicted": {}}
    check = Check(Record(tuple(rows), (64, 128), 1, idle={"forgotten": LEFT_OUT}, **about))
    words = {verdict.layer: (verdict.word, verdict.ok) for verdict in check.features}
    assert words == {
        "gain": ("rounded away", True),
        "matrix": ("stands still", False),
        "forgotten": ("not in the optimizer", False),
        "weight": ("learns", True),
    }


def test_growing_queries_are_not_excused_where_only_falling_ones_can_be():
    rows = [
        Measurement(width, seed, 1, quantity, name, value)
        for width in (64, 128, 256)
        for seed in (0, 1)
        for quantity, name, value in (
            ("head_dim", "a", width / 2),
            ("logits", "a", width**-0.5),
            ("attention", "a", width / 64),
            ("source of a", "a.query", 1.0),
            ("update", "a.query.weight", width / 64),
        )
    ]
    about = {"scheme": "mup", "damping": "", "roles": {}, "predicted": {}}
    for method, word in (("sgd", "explodes"), ("foof", "explodes"), ("muon", "explodes"), ("kfac", "not judged")):
        check = Check(Record(tuple(rows), (64, 128, 256), 1, method=method, **about))
        words = {(verdict.reading, verdict.layer): verdict.word for verdict in check.features}
        assert words["attention", "a"] == words["own update", "a.query.weight"] == word
        assert check.ok == (method == "kfac")


def test_attention_that_cannot_be_looked_at_is_said():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.layer = nn.Embedding(9, width), nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0)
            self.head = nn.Linear(width, 9, bias=False)

        def forward(self, tokens):
            return self.head(checkpoint(self.layer, self.tokens(tokens), use_reentrant=False))

    def adamw(model, plan):
        return torch.optim.AdamW(plan.param_groups("adamw", lr=1e-4))

    def loss(f, y):
        return F.cross_entropy(f.flatten(0, 1), y.flatten())

    tokens = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))
    check = coordinate_check(
        Model, adamw, (tokens, tokens), loss=loss, base_width=16, widths=(32, 64), seeds=1, steps=1
    )
    assert not check.record.layers("attention")
    assert not check.ok or "Attention logits were not looked at" in check.verdict()
    assert check.record.layers("unseen") == ["attention"]


class Biased(nn.Module):
    """Attention with a learned bias for every distance and head, and 1/d."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.distances, self.norm = nn.Embedding(2 * TOKENS, HEADS), nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(TOKENS)
        bias = self.distances(place[:, None] - place + TOKENS).permute(2, 0, 1)
        weights = (4 * q @ k.mT / q.shape[-1] + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def test_learned_position_biases_are_sources_of_logits():
    """Their derivative is as small at first as that of queries and keys."""
    with AttentionWatch.over(model := Biased(16)) as watch:
        model(torch.randn(3, TOKENS, 16))
    assert watch.sources == {"network": {"qkv", "distances"}}


@pytest.mark.parametrize("way", ["linear", "matmul", "einsum"])
@pytest.mark.parametrize("multiplied", [True, False])
def test_a_head_that_is_the_embedding_by_a_function_is_named(way, multiplied):
    class Tied(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.body = nn.Embedding(10, width), nn.Linear(width, width, bias=False)
            self.multiplier = 16 / width if multiplied else 1.0

        def forward(self, x):
            h, W = self.body(self.tokens(x)), self.tokens.weight
            ways = {"linear": lambda: F.linear(h, W), "matmul": lambda: h @ W.T}
            f = ways[way]() if way in ways else torch.einsum("btd,vd->btv", h, W)
            return self.multiplier * f

    tokens = torch.randint(10, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    check = coordinate_check(
        Tied,
        lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=1e-3, model=model), weight_decay=0.0),
        (tokens, tokens.roll(-1, 1)),
        loss=lambda f, y: F.cross_entropy(f.flatten(0, 1), y.flatten()),
        base_width=16,
        widths=(64, 128, 256),
        seeds=2,
        steps=1,
    )
    assert check.ok == multiplied, str(check.table())
    assert ("product with tokens.weight, an embedding's weight" in check.verdict()) != multiplied
