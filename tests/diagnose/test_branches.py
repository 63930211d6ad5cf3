"""Whether a network multiplies its residual branches by 1/L is measured, not assumed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mukron.diagnose import check_branches
from mukron.models import GPT, ResidualMLP
from mukron.params import ParametrizationError

X, TOKENS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16).reshape(2, 8)


def residual(base_depth, **options):
    return lambda width, depth: ResidualMLP(width, 6, 3, depth, base_depth, **options)


def gpt(base_depth, **options):
    return lambda width, depth: GPT(width, depth, vocabulary=16, context=8, base_depth=base_depth, **options)


@pytest.mark.parametrize("factory", [residual(2), residual(2, norm=False)])
def test_a_residual_mlp_with_the_multiplier_passes(factory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = check_branches(factory, X, base_width=32, base_depth=2)
    assert check.ok
    assert check.exponents["blocks"] == pytest.approx(-1, abs=0.1)
    assert check.depths == (2, 8)


def test_a_gpt_with_the_multiplier_passes():
    check = check_branches(gpt(2), TOKENS, base_width=32, base_depth=2)
    assert check.exponents["blocks"] == pytest.approx(-1, abs=0.1)
    assert check.table().rows[0][-1] == "multiplied by 1/L"


@pytest.mark.parametrize(("factory", "inputs"), [(residual(None), X), (gpt(None), TOKENS)])
def test_without_the_multiplier_there_is_a_warning_with_a_remedy(factory, inputs):
    """GPT-2's smaller initial weights in deeper networks are no multiplier: parametrize undoes them."""
    with pytest.warns(UserWarning, match=r"not multiplied by 1/L.*\"blocks\" like L\^.*branch\(x\) \* \(base_depth"):
        check = check_branches(factory, inputs, base_width=32, base_depth=2)
    assert not check.ok
    assert check.failing == ("blocks",)
    assert abs(check.exponents["blocks"]) < 0.25
    assert check.table().notes


class Outside(nn.Module):
    """The branches are added by the network, not by the blocks, and their last weights start at zero."""

    def __init__(self, width: int, depth: int, multiplied: bool = True) -> None:
        super().__init__()
        self.factor = 2 / depth if multiplied else 1.0
        self.stem, self.head = nn.Linear(6, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(depth)
        )
        for layer in self.layers:
            nn.init.zeros_(layer[2].weight)
            nn.init.zeros_(layer[2].bias)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + self.factor * layer(x)
        return self.head(x)


def test_sums_outside_of_blocks_that_start_at_zero():
    assert check_branches(Outside, X, base_width=32, base_depth=2).exponents["layers"] == pytest.approx(-1, abs=0.1)
    with pytest.warns(UserWarning, match="not multiplied"):
        check_branches(lambda width, depth: Outside(width, depth, False), X, base_width=32, base_depth=2)


def test_the_users_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    check_branches(residual(1), X, base_width=32, base_depth=1, depth=8)
    assert torch.equal(torch.get_rng_state(), state)


class Unused(Outside):
    def forward(self, x):
        return self.head(self.stem(x))


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ParametrizationError, match=r'blocks in "layers" were called 0 times'):
        check_branches(Unused, X, base_width=32, base_depth=2)
    with pytest.raises(ValueError, match="an exponent needs another depth than 4"):
        check_branches(residual(4), X, base_width=32, base_depth=4, depth=4)
