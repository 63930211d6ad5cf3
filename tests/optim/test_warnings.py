"""What a user is told of an output layer that starts at zero, or near it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mukron
from mukron import FOOF, KFAC, GaussNewton, Shampoo
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def wide(base=8, width=32, scheme="mup"):
    torch.manual_seed(0)
    model = Net(width)
    return model, mukron.parametrize(model, mukron.base_shapes(Net, width=base), scheme)


@pytest.mark.parametrize("method", [KFAC, FOOF])
@pytest.mark.parametrize("planned", [True, False])
def test_the_nngp_trap_is_told(method, planned):
    model, plan = wide()
    if planned:
        model = Net(32)
        plan = mukron.parametrize(model, mukron.base_shapes(Net, width=8), output_exponent=64)
    else:
        model, plan = Net(32), None
        nn.init.zeros_(model.head.weight)
    with pytest.warns(UserWarning, match=r'output layer "head" starts at \(nearly\) zero.*kernel-regression'):
        method(model, plan, trust=None)


def test_an_output_layer_that_is_small_but_not_zero_is_another_trap():
    model, plan = wide()
    model.head.weight.data.mul_(1e-8)
    with pytest.warns(UserWarning, match="near zero, but not at it: KFAC's first step in the layers below grows"):
        KFAC(model, plan, trust=None)
    with pytest.warns(UserWarning, match="kernel-regression"):  # FOOF does not divide by B
        FOOF(model, plan, trust=None)


def test_no_nngp_warning_where_there_is_no_trap():
    model, plan = wide()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, plan, trust=None)
        nn.init.zeros_(model.head.weight)
        Shampoo(model, plan, trust=None)
        GaussNewton(model, plan, trust=None)
