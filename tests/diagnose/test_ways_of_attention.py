"""Checks of networks whose attention is written in odd ways, with buffers, frozen parts and layers computed again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from mukron.diagnose import coordinate_check


class Block(nn.Module):
    """A residual block whose attention is a function of the block, queries, keys and values."""

    def __init__(self, width: int, attend, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), attend
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.register_buffer("table", torch.rand(8, 8) + 0.5)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return x + self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


def rotated(block, q, k, v):
    return F.scaled_dot_product_attention(q * block.table, k * block.table, v, is_causal=True)


def masked(block, q, k, v):
    return (q @ k.mT / 8**0.5).masked_fill(block.mask, -math.inf).softmax(-1) @ v


def by_keywords(block, q, k, v):
    logits = torch.matmul(input=q, other=k.mT) / 8**0.5
    return torch.softmax(input=logits, dim=-1) @ v


def by_einsum(block, q, k, v):
    return torch.einsum("bhid,bhjd->bhij", q, k).div(8**0.5).softmax(-1) @ v


def biased(block, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(8, 8))


class Blocks(nn.Module):
    def __init__(
        self, width: int, attend=rotated, bias: bool = False, saves: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.saves = nn.Embedding(20, width), saves
        self.blocks = nn.ModuleList(Block(width, attend, bias) for _ in range(2))
        self.batch_norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 4, bias=False)
        if frozen:
            self.tokens.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return self.head(self.batch_norm(x.mean(1)))


def check(factory, **options):
    torch.manual_seed(0)
    batch = torch.randint(20, (6, 8)), torch.randint(4, (6,))
    return coordinate_check(
        factory,
        lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=1e-3, model=model), weight_decay=0.0),
        batch,
        **{"base_width": 16, "widths": (64, 128, 256), "seeds": 1, "steps": 1, **options},
    )


@pytest.mark.parametrize("attend", [rotated, masked, by_keywords, by_einsum])
def test_logits_are_seen(attend):
    """Derivatives are taken although buffers are put back after every pass."""
    result = check(lambda width: Blocks(width, attend))
    assert not result.record.broken
    assert result.record.layers("attention") == ["blocks.0", "blocks.1"]
    assert {row.value for row in result.record.rows if row.quantity == "head_dim"} == {8.0}


@pytest.mark.parametrize("options", [{"saves": True}, {"frozen": True}, {"attend": biased}])
def test_a_check_ends_with_a_verdict(options):
    """With layers that are computed again for their derivatives, frozen ones, and masks of torch's own kind."""
    result = check(lambda width: Blocks(width, **options))
    assert not result.record.broken
    assert result.record.select("descent", "output")


def test_a_bias_of_keys_takes_no_part():
    """Softmax does not depend on it: its gradient is rounding, of which Adam makes full steps."""
    result = check(lambda width: Blocks(width, masked, bias=True), seeds=3, steps=2)
    words = {verdict.layer: verdict.word for verdict in result.features if verdict.reading == "own update"}
    assert words["blocks.0.key.bias"] == words["blocks.1.key.bias"] == "no part"
    assert words["blocks.0.query.bias"] == "learns"


class TwoOutputs(nn.Module):
    """Features that grow with the width beside an output that does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, width), nn.Linear(width, 4, bias=False)

    def forward(self, x):
        h = self.tokens(x).mean(1)
        return {"hidden": h.detach() * h.shape[1], "logits": self.head(h)}


def test_of_several_outputs_those_count_that_the_loss_depends_on():
    result = check(TwoOutputs, seeds=3, loss=lambda output, y: F.cross_entropy(output["logits"], y))
    assert result.record.layers("descent") == ["output.1"]
    assert [verdict.word for verdict in result.features if verdict.reading == "descent"] == ["learns"]
