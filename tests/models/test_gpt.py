"""The GPT: its shapes, options and what grows with the width."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.models import GPT


def small(width=32, **options):
    return GPT(width, **{"depth": 2, "vocabulary": 20, "context": 8, **options})


@pytest.mark.parametrize("options", [{}, {"norm": "rms"}, {"mlp": "swiglu"}, {"tied": True}, {"heads": 4}])
def test_it_predicts_every_position_from_those_before_it(options):
    torch.manual_seed(0)
    model, tokens = small(**options), torch.randint(20, (3, 8))
    logits = model(tokens)
    assert logits.shape == (3, 8, 20)
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 20
    assert torch.equal(model(changed)[:, :5], logits[:, :5])
    assert (model(changed)[:, 5:] != logits[:, 5:]).any()
    assert model(tokens[:, :3]).shape == (3, 3, 20)


def test_heads_grow_in_number_or_in_size():
    fixed, growing = [small(width) for width in (16, 64)], [small(width, heads=2) for width in (16, 64)]
    assert [model.blocks[0].attention.heads for model in fixed] == [1, 4]
    assert [model.blocks[0].attention.scale for model in fixed] == [0.25, 0.25]
    assert [model.blocks[0].attention.heads for model in growing] == [2, 2]
    assert [model.blocks[0].attention.scale for model in growing] == [4 / 8, 4 / 32]  # 1 / d
    root = small(64, heads=2, attention="sqrt(d)")
    assert root.blocks[0].attention.scale == 1 / math.sqrt(32)


def test_a_narrow_network_has_one_head():
    attention = small(12).blocks[0].attention
    assert (attention.heads, attention.scale) == (1, 1 / math.sqrt(12))


def test_attention_is_that_of_the_formula():
    torch.manual_seed(1)
    attention = small(heads=2).blocks[0].attention
    x = torch.randn(1, 4, 32)
    q, k, v = (project(x).view(4, 2, 16) for project in (attention.query, attention.key, attention.value))
    mixed = torch.zeros(4, 2, 16)
    for position in range(4):
        for head in range(2):
            weights = (k[: position + 1, head] @ q[position, head] * 4 / 16).softmax(0)
            mixed[position, head] = weights @ v[: position + 1, head]
    torch.testing.assert_close(attention(x)[0], attention.out(mixed.flatten(1)))


def test_initial_weights_keep_their_size():
    torch.manual_seed(0)
    model = GPT(256, depth=8)
    stds = {name: value.detach().std().item() for name, value in model.named_parameters() if value.ndim == 2}
    assert stds["tokens.weight"] == pytest.approx(1, rel=0.05)
    assert stds["head.weight"] == pytest.approx(1 / 128, rel=0.05)
    assert GPT(256, depth=1, head_scale=0.5).head.weight.std().item() == pytest.approx(1 / 32, rel=0.05)
    assert GPT(256, depth=1, tied=True).tokens.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert stds["blocks.3.attention.query.weight"] == pytest.approx(1 / 16, rel=0.05)
    assert stds["blocks.3.attention.out.weight"] == pytest.approx(1 / 64, rel=0.05)
    assert stds["blocks.3.mlp.out.weight"] == pytest.approx(1 / 128, rel=0.05)


def test_a_tied_head_is_the_embedding_with_a_multiplier():
    model = small(128, tied=True)
    assert model.head.weight is model.tokens.weight
    assert model.multiplier == 0.5  # 64 / width
    assert small(128, tied=True, multiplier=1).multiplier == 1
    assert small(128).multiplier == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width 32 cannot be divided into 3 heads"),
        ({"head_dim": 24}, "width 32 cannot be divided into heads of 24"),
        ({"heads": 2, "head_dim": 16}, "not both"),
        ({"width": 24}, "width 24 cannot be divided into heads of 16; choose a multiple of 16"),
        ({"width": 40}, "width 40 cannot be divided into heads of 16"),
        ({"tied": "False"}, "tied='False': expected True or False"),
        ({"tied": 1}, "tied=1: expected True or False"),
        ({"heads": 2.0}, "heads=2.0: expected a whole number"),
        ({"depth": 1.5}, "depth=1.5: expected a whole number"),
        ({"vocabulary": 0}, "vocabulary=0: expected a whole number of at least 1"),
        ({"multiplier": float("nan")}, "multiplier=nan: expected a number"),
        ({"multiplier": "x"}, "multiplier='x': expected a number"),
        ({"depth": 0}, "depth=0: expected at least one block"),
        ({"depth": -1}, "depth=-1: expected at least one block"),
        ({"tied": True, "head_scale": 0.5}, "head_scale=0.5: a tied head starts as the embedding does"),
        ({"norm": "batch"}, "unknown norm 'batch'; known: layer, rms"),
        ({"mlp": "relu"}, "unknown mlp 'relu'; known: gelu, swiglu"),
        ({"attention": "1"}, r"unknown attention '1'; known: sqrt\(d\), d"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="9 positions, but the context is 8"):
        small()(torch.zeros(1, 9, dtype=torch.long))


def test_roles():
    plan = mukron.parametrize(small(64, mlp="swiglu"), mukron.base_shapes(lambda width: small(width, mlp="swiglu"), 16))
    roles = {name: str(entry.role) for name, entry in plan.parameters.items()}
    assert roles["tokens.weight"] == roles["positions.weight"] == "input"
    assert roles["blocks.1.attention.out.weight"] == roles["blocks.1.mlp.gate.weight"] == "hidden"
    assert roles["blocks.0.norm1.bias"] == "vector"
    assert roles["head.weight"] == "output"
    assert {float(entry.growth.r_in) for entry in plan.parameters.values()} == {1.0, 4.0}


@pytest.mark.parametrize("method", [mukron.KFAC, mukron.FOOF, mukron.Shampoo])
def test_second_order_methods_train_it(method):
    torch.manual_seed(0)
    model = small()
    plan = mukron.parametrize(model, mukron.base_shapes(small, 16))
    options = {} if method is mukron.Shampoo else {"class_dim": -1} if method is mukron.KFAC else {}
    optimizer = method(model, plan, **options)
    tokens = torch.randint(20, (16, 9))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_norms_are_torchs():
    assert isinstance(small(norm="rms").norm, nn.RMSNorm)
    assert isinstance(small().norm, nn.LayerNorm)
