"""Clipping by a norm that means the same at every width and depth, and the sizes of raw gradients behind it."""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from mukron.models import GPT, MLP, ResidualMLP
from mukron.params import ParametrizationError, base_shapes, parametrize
from mukron.theory import Role, gradient_norm
from networks import Net

NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU

DATA = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 12, generator=DATA), torch.randint(5, (64,), generator=DATA)
TOKENS = torch.randint(17, (8, 16), generator=DATA), torch.randint(17, (8, 16), generator=DATA)
NETWORKS = {
    "mlp": (lambda width: MLP(width, 12, 5), ROWS),
    "gpt": (lambda width: GPT(width, vocabulary=17, context=16, depth=2), TOKENS),
    "gpt, tied head": (
        lambda width: GPT(width, vocabulary=17, context=16, depth=2, tied=True, multiplier=4 / width),
        TOKENS,
    ),
}
WIDTHS = [32, 64, 128, 256]
BATCH = torch.randn(20, 12, generator=DATA), torch.randint(5, (20,), generator=DATA)


def differentiated(model: nn.Module, batch=BATCH, factor: float = 1.0) -> nn.Module:
    model.zero_grad()
    output = model(batch[0].to(next(model.parameters()).dtype) if batch[0].is_floating_point() else batch[0])
    (factor * F.cross_entropy(output.flatten(0, -2), batch[1].flatten())).backward()
    return model


def slope(sizes, numbers) -> float:
    return float(np.polyfit(np.log(sizes), np.log([np.mean(numbers[size]) for size in sizes]), 1)[0])


def norms(factory, shapes, sizes, batch, scheme="mup", seeds=3):
    """Of all gradients, ours and torch's, and of each parameter's, by size."""
    ours, plain, of_each = (defaultdict(list) for _ in range(3))
    for size in sizes:
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = factory(size)
            plan = parametrize(model, shapes, scheme)
            differentiated(model, batch)
            ours[size].append(float(plan.clip_grad_norm_(math.inf)))
            plain[size].append(float(clip_grad_norm_(model.parameters(), math.inf)))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    of_each[name, size].append(float(parameter.grad.norm()))
    return ours, plain, of_each, plan


@pytest.mark.parametrize("network", NETWORKS)
def test_the_norm_does_not_depend_on_the_width(network):
    """Slopes against the width: ours 0, torch's positive where an output layer has its own weights."""
    factory, batch = NETWORKS[network]
    ours, plain, of_each, plan = norms(factory, base_shapes(factory, width=WIDTHS[0]), WIDTHS, batch)
    assert abs(slope(WIDTHS, ours)) < 0.08
    if network != "gpt, tied head":
        assert slope(WIDTHS, plain) > 0.28  # towards 1/2, that of the output weights
    for name, entry in plan.parameters.items():
        measured = slope(WIDTHS, {width: of_each[name, width] for width in WIDTHS})
        assert measured == pytest.approx(float(gradient_norm(entry.role).total), abs=0.2), name


def test_the_norm_does_not_depend_on_the_width_under_ntk():
    factory, batch = NETWORKS["mlp"]
    ours, plain, _, _ = norms(factory, base_shapes(factory, width=WIDTHS[0]), WIDTHS, batch, "ntk")
    assert abs(slope(WIDTHS, ours)) < 0.08
    assert slope(WIDTHS, plain) > 0.35


def test_the_norm_does_not_depend_on_the_depth():
    """Of the blocks' gradients: those outside of blocks are frozen."""

    def deep(width, depth):
        model = ResidualMLP(width, 12, 5, depth, base_depth=2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("blocks" in name)
        return model

    depths = [2, 4, 8, 16]
    ours, plain, _, plan = norms(
        lambda depth: deep(64, depth), base_shapes(deep, width=32, depth=2), depths, ROWS, seeds=5
    )
    assert any(entry.growth.L == 8 for entry in plan.parameters.values())
    assert abs(slope(depths, ours)) < 0.1
    assert slope(depths, plain) < -0.35
    assert gradient_norm(Role.HIDDEN).depth == gradient_norm(Role.VECTOR).depth == Fraction(-1, 2)


@pytest.mark.parametrize("norm_type", [1, 2.0, 3, math.inf])
@pytest.mark.parametrize("width", [8, 64])
def test_one_factor_for_all_gradients(norm_type, width):
    """They keep their direction, and the norm that is returned is the one before; once clipped it is the limit."""
    model = Net(width).double()
    plan = parametrize(model, base_shapes(Net, width=8))
    before = {name: p.grad.clone() for name, p in differentiated(model).named_parameters()}
    norm = plan.clip_grad_norm_(math.inf, norm_type)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    limit = float(norm) / 3
    assert torch.equal(plan.clip_grad_norm_(limit, norm_type), norm)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name] / 3, rtol=1e-4, atol=0)
    assert float(plan.clip_grad_norm_(math.inf, norm_type)) == pytest.approx(limit, rel=1e-4)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(("width", "scheme"), [(8, "mup"), (8, "ntk"), (32, "sp")])
def test_at_the_base_width_it_is_torchs(width, scheme, norm_type, dtype, foreach):
    """Bit for bit; and at every width of the standard parametrization."""
    model = Net(width)
    plan = parametrize(model, base_shapes(Net, width=8), scheme)
    model.to(dtype)
    other = copy.deepcopy(model)
    for one in (model, other):
        differentiated(one)
    norm = plan.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    expected = clip_grad_norm_(other.parameters(), 0.1, norm_type, foreach=foreach)
    assert torch.equal(norm, expected)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_precisions(dtype, foreach):
    model = Net(64)
    plan = parametrize(model, base_shapes(Net, width=8))
    double = copy.deepcopy(model).double()
    expected = plan.clip_grad_norm_(0.1, model=differentiated(double))
    model.to(dtype)
    model.norm.to(torch.float32)
    model.head.to(torch.float64)
    for p, q in zip(model.parameters(), differentiated(copy.deepcopy(double)).parameters(), strict=True):
        p.grad = q.grad.to(p.dtype)
    norm = plan.clip_grad_norm_(0.1, foreach=foreach)
    assert float(norm) == pytest.approx(float(expected), rel=1e-2)
    for p, q in zip(model.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [8, 32])
def test_gradients_that_are_not_finite(width, value):
    """As torch does: refused on request, with the gradients as they were, or all are scaled by that norm."""
    model, other = Net(width), Net(width)
    plan = parametrize(model, base_shapes(Net, width=8))
    parametrize(other, base_shapes(Net, width=8))
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        differentiated(one).first.bias.grad[0] = value
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"in units of the plan, is (inf|nan), so that they cannot be clipped"):
        plan.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for p, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
    norm, expected = plan.clip_grad_norm_(1.0), clip_grad_norm_(other.parameters(), 1.0)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_parameters_without_gradients_count_for_nothing():
    model = Net(32)
    plan = parametrize(model, base_shapes(Net, width=8))
    assert float(plan.clip_grad_norm_(1.0)) == 0
    differentiated(model)
    whole = float(plan.clip_grad_norm_(math.inf))
    model.head.weight.grad = None
    assert 0 < float(plan.clip_grad_norm_(math.inf)) < whole


def test_other_copies_and_wrappers():
    model = Net(32)
    plan = parametrize(model, base_shapes(Net, width=8))
    expected = plan.clip_grad_norm_(math.inf, model=differentiated(model))
    assert torch.equal(plan.clip_grad_norm_(math.inf, model=torch.compile(model, backend="eager")), expected)
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    differentiated(wrapped.module)
    assert torch.equal(plan.clip_grad_norm_(math.inf, model=wrapped), expected)
    loaded = type(plan).from_dict(plan.to_dict())
    assert torch.equal(loaded.clip_grad_norm_(math.inf, model=model), expected)
    with pytest.raises(ParametrizationError, match="not bound to a model"):
        loaded.clip_grad_norm_(1.0)
    for other, message in (
        (Net(64), r'parameter "first.weight": \[64, 12\] in this network, \[32, 12\] in the plan, whose units are for'),
        (
            nn.ModuleDict({"first": model.first}),
            'parameter "hidden.weight", .* exists in the plan but not in this netw',
        ),
    ):
        for p in other.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(ParametrizationError, match=message):
            plan.clip_grad_norm_(1.0, model=other)
        assert all(bool((p.grad == 1).all()) for p in other.parameters())
    other = nn.Linear(3, 4)
    other.weight.grad = torch.ones(4, 3)
    with pytest.raises(ParametrizationError, match='"weight" has a gradient and is not in the plan: pass the model'):
        plan.clip_grad_norm_(1.0, model=other)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_norm": "1"}, TypeError, "max_norm must be a number, got '1'"),
        ({"max_norm": True}, TypeError, "max_norm must be a number, got True"),
        ({"max_norm": -1.0}, ValueError, "max_norm must not be negative and norm_type must be positive, got -1.0 and"),
        ({"max_norm": math.nan}, ValueError, "max_norm must not be negative"),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "got 1.0 and 0"),
        ({"max_norm": 1.0, "norm_type": "inf"}, TypeError, "norm_type must be a number"),
    ],
)
def test_refused(given, error, message):
    model = Net(32)
    plan = parametrize(model, base_shapes(Net, width=8))
    with pytest.raises(error, match=re.escape(message)):
        plan.clip_grad_norm_(**given)


def test_the_table_in_the_docs_is_the_theorys():
    page = (Path(__file__).parents[2] / "docs/parametrization.md").read_text().partition("## Clipping")[2]
    shown = dict(
        re.findall(r"^\| (input|hidden|output|output bias)(?:, [^|]*)? \| [^|]* \| (?:.* = )?([^|=]*) \|$", page, re.M)
    )
    powers = {"M^-1/2": "-1/2", "1": "0", "M^1/2": "1/2"}
    expected = {"input": Role.INPUT, "hidden": Role.HIDDEN, "output": Role.OUTPUT, "output bias": Role.SCALAR}
    assert {name: Fraction(powers[text]) for name, text in shown.items()} == {
        name: gradient_norm(role).total for name, role in expected.items()
    }
    assert gradient_norm(Role.VECTOR) == gradient_norm(Role.INPUT)


def sharded_gradients(rank, folder) -> None:
    """Two ranks: the norm and the gradients are those of the model that is whole, also after a pass that gathered."""
    from torch.distributed.fsdp import fully_shard

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Net(30).double()

    for norm_type in (1.0, 2.0, math.inf):
        for foreach in (None, True, False):
            whole, model = made(), made()
            expected = parametrize(whole, base_shapes(Net, width=5))
            fully_shard(model.hidden)
            fully_shard(model)
            plan = parametrize(model, base_shapes(Net, width=5))
            differentiated(whole)
            differentiated(model)
            model(BATCH[0].double())  # leaves gathered parameters behind
            norm = plan.clip_grad_norm_(0.05, norm_type, foreach=foreach)
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, expected.clip_grad_norm_(0.05, norm_type))
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-15)
    if rank == 1:
        model.hidden.weight.grad.to_local()[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="cannot be clipped"):  # on both ranks
        plan.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
def test_sharded_gradients(tmp_path):
    in_ranks("params.test_clipping:sharded_gradients", 2, tmp_path)
