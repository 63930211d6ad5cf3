"""Attention logits are seen however attention is written, and the checks of transformers name what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention, softmax

from mukron.diagnose import coordinate_check
from mukron.diagnose.attention import AttentionWatch

HEADS, WIDTH, LENGTH = 2, 8, 5


class Attention(nn.Module):
    """Self-attention by one of several ways of writing it."""

    def __init__(self, way: str, width: int = WIDTH, heads: int = HEADS, power: float = 0.5) -> None:
        super().__init__()
        self.way, self.heads, self.scale = way, heads, (width // heads) ** -power
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.way == "function":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        elif self.way == "imported":
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        elif self.way == "added mask":
            added = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
            mixed = scaled_dot_product_attention(q, k, v, added, 0.0, scale=self.scale)
        else:
            logits = (q @ k.transpose(-2, -1) * self.scale).masked_fill(~mask, -math.inf)
            weights = {
                "tensor": lambda: logits.softmax(-1),
                "torch": lambda: torch.softmax(logits, dim=-1),
                "softmax": lambda: softmax(logits, -1),
                "module": lambda: nn.Softmax(dim=-1)(logits),
            }[self.way]()
            mixed = weights @ v
        gates = torch.softmax(self.router(x), dim=-1)  # no attention
        return self.out(mixed.transpose(1, 2).flatten(2)) * gates


WAYS = ("function", "imported", "added mask", "tensor", "torch", "softmax", "module")


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_seen_and_nothing_is_changed(way):
    torch.manual_seed(0)
    model, x = Attention(way), torch.randn(3, LENGTH, WIDTH)
    expected = model(x)
    with AttentionWatch.over(model) as watch:
        torch.testing.assert_close(model(x), expected)
    ((logits,),) = watch.logits.values()
    q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in model.qkv(x).chunk(3, -1))
    full = q @ k.mT / 2
    below = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(logits[..., below], full[..., below])
    assert (logits[..., ~below] == -math.inf).all()
    assert list(watch.head_dims.values()) == [WIDTH // HEADS]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_own_attention(weights):
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(3, LENGTH, WIDTH)
    expected = model(x, x, x, need_weights=weights)[0]
    with AttentionWatch.over(model) as watch:
        torch.testing.assert_close(model(x, x, x, need_weights=weights)[0], expected)
    (logits,) = watch.logits["network"]
    assert logits.numel() == 3 * HEADS * LENGTH**2
    assert F.softmax is softmax  # what was replaced meanwhile is back


def test_grouped_queries_and_rows_that_attend_to_nothing():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    mask = torch.tensor([[False] * 3, [True] * 3, [True] * 3])
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    watch = AttentionWatch()
    watch._names.append("here")
    with watch:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), expected)
    assert watch.logits["here"][0].shape == (2, 4, 3, 3)


class Encoder(nn.Module):
    """A small encoder with everything that is no layer: a class token, positions, torch's fused projections."""

    def __init__(self, width: int, way: str = "torch's", power: float = 0.5, heads: int | None = None) -> None:
        super().__init__()
        heads = heads or width // 8
        self.tokens = nn.Embedding(20, width)
        self.class_token, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(9, width))
        self.norm = nn.LayerNorm(width)
        if way == "torch's":
            self.attention = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        else:
            self.attention = Attention(way, width, heads, power)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.cat([self.class_token.expand(len(x), 1, -1), self.tokens(x)], 1) + self.positions
        return self.head(self.norm(x + self.attention(x))[:, -1])


ROLES = {"class_token": "input", "positions": "input"}


def check(factory, lr=1e-3, **options):
    torch.manual_seed(0)
    batch = torch.randint(20, (4, 8)), torch.randint(4, (4,))
    return coordinate_check(
        factory,
        lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=lr), weight_decay=0.0),
        batch,
        **{"base_width": 16, "widths": (64, 128, 256), "roles": ROLES, "steps": 2, **options},
    )


@pytest.mark.parametrize("way", ["torch's", "function"])
def test_class_tokens_and_positions_are_judged_by_their_own_change(way):
    result = check(lambda width: Encoder(width, way))
    result.assert_ok()
    verdicts = {(verdict.reading, verdict.layer): verdict for verdict in result.features}
    for name in ROLES:
        own = verdicts["own update", name]
        assert own.measured.slope == pytest.approx(0, abs=0.05)
        assert own.predicted == 0
    for row in result.record.select("update", "class_token"):
        assert row.value == pytest.approx(2e-3, rel=0.3)  # two steps of Adam
    assert any(reading == "attention" for reading, _ in verdicts)


@pytest.mark.slow
def test_a_growing_head_needs_its_size_as_divisor():
    result = check(lambda width: Encoder(width, "function", power=0.5, heads=2), widths=(64, 128, 256, 512))
    assert result.exit_code == 1
    (failed,) = [verdict for verdict in result.failures if verdict.reading == "attention"]
    assert failed.measured.slope == pytest.approx(0.5, abs=0.2)
    said = " ".join(str(result).split())
    assert "Attention logits grow with the width in attention: the size d of a head grows from 32 to 256" in said
    fixed = check(lambda width: Encoder(width, "function", power=1.0, heads=2), widths=(64, 128, 256, 512))
    assert not [verdict for verdict in fixed.failures if verdict.word == "explodes"]
