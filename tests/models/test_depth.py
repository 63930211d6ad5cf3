"""Networks whose depth can grow multiply their residual branches by base_depth / depth if they are asked to."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from mukron.models import GPT, ResidualMLP, get_model

X, TOKENS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16).reshape(2, 8)
MAKE = {
    "resmlp": (lambda **options: ResidualMLP(16, 6, 3, **options), X),
    "gpt": (lambda **options: GPT(16, vocabulary=16, context=8, **options), TOKENS),
}


@pytest.fixture(params=MAKE)
def network(request):
    return MAKE[request.param]


def test_at_the_base_depth_nothing_changes(network):
    make, x = network
    torch.manual_seed(0)
    plain = make(depth=3)
    torch.manual_seed(0)
    multiplied = make(depth=3, base_depth=3)
    assert torch.equal(plain(x), multiplied(x))


def test_each_branch_is_multiplied(network):
    """A branch ends in a linear layer, so the multiplier can as well be put into its last weights."""
    make, x = network
    model, plain = make(depth=4, base_depth=1), make(depth=4)
    weights = {
        name: value / 4 if name.startswith("blocks.") and name.endswith(".out.weight") else value
        for name, value in model.named_parameters()
    }
    assert torch.allclose(model(x), functional_call(plain, weights, (x,)), atol=1e-5)
    assert not torch.allclose(model(x), functional_call(plain, dict(model.named_parameters()), (x,)), atol=1e-3)


def test_the_residual_mlp_without_norms():
    model = ResidualMLP(16, 6, 3, depth=2, norm=False)
    assert {name for name, _ in model.named_parameters()} == {
        *("stem.weight", "head.weight"),
        *(f"blocks.{number}.{layer}.weight" for number in range(2) for layer in ("up", "out")),
    }
    x, W = X, dict(model.named_parameters())
    h = x @ W["stem.weight"].T
    for number in range(2):
        h = h + (h @ W[f"blocks.{number}.up.weight"].T).relu() @ W[f"blocks.{number}.out.weight"].T
    assert torch.allclose(model(x), h @ W["head.weight"].T, atol=1e-6)


def test_matrices_that_end_a_branch_of_a_gpt_start_as_at_the_base_depth():
    model = GPT(256, depth=8, base_depth=2)
    assert model.blocks[0].mlp.out.weight.std().item() == pytest.approx(1024**-0.5 / 4**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0: expected at least one block"),
        ({"depth": 1.5}, "depth=1.5: expected a whole number"),
        ({"depth": 2, "base_depth": 0}, "base_depth=0: expected at least one block"),
        ({"depth": 2, "base_depth": True}, "base_depth=True: expected a whole number"),
    ],
)
def test_depths_that_are_none_are_refused(network, options, message):
    with pytest.raises(ValueError, match=message):
        network[0](**options)


def test_the_residual_mlp_is_a_built_in_network():
    model = get_model("resmlp")
    assert model.factory(8, **model.options((1, 2, 3), 5), depth=2, activation="tanh")(X).shape == (4, 5)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        ResidualMLP(8, activation="swish")
