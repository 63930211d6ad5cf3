"""Queries and keys of different numbers of rows: attention steps like Linear layers, pass by pass and in sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC

HEADS, CLASSES = 2, 3
NAMES = ("q", "k", "v")
# queries, keys, samples, width: maps with few rows keep D and H, others do not
SHAPES = {"decoder": (4, 8, 2, 16), "many keys": (10, 20, 4, 64), "one query": (1, 16, 8, 64)}
OPTIONS = {
    "defaults": {},
    "plain": {"trust": None},
    "fused": {"fused": True, "trust": None},
    "batch": {"memory": "batch"},
    "reduce": {"sharing": "reduce", "trust": None},
}


class Cross(nn.Module):
    """Attention of one input to another, by torch or by Linear layers."""

    def __init__(self, width: int, whole: bool) -> None:
        super().__init__()
        self.whole, self.first, self.other = whole, nn.Linear(5, width), nn.Linear(5, width)
        if whole:
            self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x, z):
        h, z = self.first(x).tanh(), self.other(z).tanh()
        if self.whole:
            return self.head(h + self.attention(h, z, z)[0])
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q(h), self.k(z), self.v(z)))
        return self.head(h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def twins(width: int) -> tuple[Cross, Cross]:
    torch.manual_seed(0)
    ours, theirs = Cross(width, whole=True).double(), Cross(width, whole=False).double()
    theirs.load_state_dict(translated(ours))
    return ours, theirs


def translated(ours: Cross) -> dict[str, torch.Tensor]:
    state = dict(ours.state_dict())
    for kind in ("weight", "bias"):
        for name, part in zip(NAMES, state.pop(f"attention.in_proj_{kind}").chunk(3), strict=True):
            state[f"{name}.{kind}"] = part
        state[f"out.{kind}"] = state.pop(f"attention.out_proj.{kind}")
    return state


def optimizer_of(method, model, **options):
    return method(model, lr=0.05, **({"class_dim": -1} if method is KFAC else {}), **options)


def backward(model, shapes, seed):
    """Of the mean over micro-batches of those numbers of queries, keys and samples."""
    generator = torch.Generator().manual_seed(seed)
    for queries, keys, samples in shapes:
        x, z = (torch.randn(samples, n, 5, generator=generator, dtype=torch.float64) for n in (queries, keys))
        y = torch.randint(CLASSES, (samples * queries,), generator=generator)
        (F.cross_entropy(model(x, z).flatten(0, 1), y) / len(shapes)).backward()


def compare(ours, theirs, left=()):
    state = translated(ours)
    for name, values in theirs.state_dict().items():
        if name not in left:
            torch.testing.assert_close(state[name], values, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [KFAC, FOOF], ids=["kfac", "foof"])
def test_fewer_queries_than_keys(method, shape, options):
    queries, keys, samples, width = SHAPES[shape]
    pair = twins(width)
    given = {name: value for name, value in OPTIONS[options].items() if method is KFAC or name != "sharing"}
    optimizers = [optimizer_of(method, model, **given) for model in pair]
    for seed in range(1 if given.get("sharing") == "reduce" else 3):
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, [(queries, keys, samples)], seed)
            optimizer.step()
    # keys are never reduced to sums that are zero, which Linear layers do not know; see test_attention_projections
    compare(*pair, left=("k.weight", "k.bias") if given.get("sharing") == "reduce" else ())


LENGTHS = {
    "several": [(4, 8, 2), (10, 3, 2), (6, 6, 2)],
    "other ratios": [(4, 12, 3), (12, 4, 3)],
    "rows and matrices": [(2, 30, 2), (30, 2, 2)],
}


@pytest.mark.parametrize("options", ["defaults", "plain", "batch"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("method", [KFAC, FOOF], ids=["kfac", "foof"])
def test_micro_batches_of_several_lengths(method, lengths, options):
    """Every map has the sums of its own rows over all passes, whatever the ratio of queries to keys is in each."""
    pair = twins(16)
    for model in pair:
        optimizer = optimizer_of(method, model, **OPTIONS[options])
        for seed in range(2):
            optimizer.zero_grad()
            backward(model, LENGTHS[lengths], seed)
            optimizer.step()
    compare(*pair)


@pytest.mark.parametrize("method", [KFAC, FOOF], ids=["kfac", "foof"])
def test_a_decoder_layer_of_torch(method):
    torch.manual_seed(0)
    decoder, head = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Linear(16, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = decoder, head

        def forward(self, x, z):
            return self.head(self.decoder(x, z))

    model = Model()
    optimizer = optimizer_of(method, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 16), torch.randn(2, 8, 16)).logsumexp(-1).mean().backward()
        optimizer.step()
    assert optimizer.skipped == 0
