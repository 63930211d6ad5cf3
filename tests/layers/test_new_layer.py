"""A new layer type is one class with one decorator: a transposed convolution, which mukron leaves to the fallback rule.

CONTRIBUTING.md shows the class.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.layers import WEIGHT, Fans, Layer, MatrixLayer, base, layer_of, register, vector
from mukron.theory import Role

LENGTH = 5


def define() -> type[MatrixLayer]:
    """All that a file with a new layer type holds, beside its imports."""

    @register(nn.ConvTranspose1d)
    class ConvTranspose1dLayer(MatrixLayer):
        """u[o, t] = sum of W[i, o, k] x[i, s] over i and k with stride s = t + padding - k."""

        def __init__(self, module):
            super().__init__(module)
            self.d_in, self.d_out = module.in_channels * module.kernel_size[0], module.out_channels

        def fans(self, name, shape):
            return Fans(fan_in=shape[0] * shape[2], fan_out=shape[1]) if name == WEIGHT else vector(shape)

        def inputs(self, x):
            (K,), (stride,), (padding,) = self.module.kernel_size, self.module.stride, self.module.padding
            spread = x.new_zeros(*x.shape[:2], (x.shape[2] - 1) * stride + 1)
            spread[..., ::stride] = x
            patches = F.pad(spread, [K - 1 - padding] * 2).unfold(2, K, 1).flip(-1)  # [samples, in, positions, K]
            return patches.transpose(1, 2).flatten(2)[None]

        def signals(self, delta):
            return delta.mT[None]  # [groups, samples, positions, out]

        def matrix(self, weight):
            return weight.transpose(0, 1).flatten(1)[None]  # [groups, out, in * K]

        def weight(self, matrix):
            return matrix[0].unflatten(1, (self.module.in_channels, -1)).transpose(0, 1)

    return ConvTranspose1dLayer


@pytest.fixture(autouse=True)
def _restored_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base, "_registry", dict(base._registry))


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose1d(3, width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose1d(width, width, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * width, 5),
    )


def plan_of(model: nn.Module) -> mukron.Parametrization:
    return mukron.parametrize(model, mukron.base_shapes(make, width=8))


def why(plan: mukron.Parametrization, parameter: str) -> str:
    """The last column of the row that ``explain`` prints for a parameter."""
    (row,) = [row for row in plan.explain("kfac", whole=True).rows if row[0] == parameter]
    return row[-1]


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": 3, "padding": 2}])
def test_signals_and_inputs_give_the_gradient(options):
    module = nn.ConvTranspose1d(3, 4, 4, **options).double()
    layer = define()(module)
    x = torch.randn(2, 3, LENGTH, dtype=torch.float64)
    output = module(x)
    output.retain_grad()
    output.square().sum().backward()
    H, D = layer.inputs(x), layer.signals(output.grad)
    assert torch.allclose(layer.weight(torch.einsum("gnpo,gnpi->goi", D, H)), module.weight.grad, rtol=1e-10)
    assert torch.equal(layer.weight(layer.matrix(module.weight)), module.weight)


def test_it_is_trained_by_kfac_in_mup():
    define()
    torch.manual_seed(0)
    model = make(32)
    plan = plan_of(model)
    assert (plan.parameters["0.weight"].role, plan.parameters["2.weight"].role) == (Role.INPUT, Role.HIDDEN)
    assert plan.parameters["2.weight"].growth.r_in == 4
    assert "not preconditioned" not in why(plan, "2.weight")
    optimizer = mukron.KFAC(model, plan, lr=0.1, trust=None)
    assert list(optimizer.layers) == ["0", "2", "5"]
    assert all(entry.preconditioned for entry in optimizer.entries.values())
    x, y = torch.randn(32, 3, LENGTH), torch.randint(5, (32,))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert [row[0] for row in optimizer.plan().rows] == ["0", "2", "5"]


def test_fans_alone_leave_it_to_the_fallback_rule():
    @register(nn.ConvTranspose1d)
    class FansAlone(Layer):
        def fans(self, name, shape):
            return Fans(shape[0] * shape[2], shape[1]) if name == WEIGHT else vector(shape)

    model = make(32)
    plan = plan_of(model)
    assert why(plan, "2.weight").startswith("not preconditioned, AdamW's row: ")
    assert "not preconditioned" not in why(plan, "5.weight")
    assert plan.scales("kfac", "sgd")["0.weight"].lr == 4  # SGD's r_out / r_in
    assert list(mukron.KFAC(model, plan, trust=None).layers) == ["5"]


def test_a_layout_needs_fans():
    with pytest.raises(TypeError, match="NoFans must also define fans: fans and layout of a layer belong together"):

        @register(nn.ConvTranspose1d)
        class NoFans(MatrixLayer):
            def inputs(self, x):
                return x

            def signals(self, delta):
                return delta

            def matrix(self, weight):
                return weight

            def weight(self, matrix):
                return matrix

    assert not isinstance(layer_of(nn.ConvTranspose1d(1, 1, 1)), MatrixLayer)


def test_the_docs_show_this_class():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = inspect.getsource(define)
    start, end = source.index("    @register"), source.index("\n    return ConvTranspose1dLayer")
    assert inspect.cleandoc(source[start:end].rstrip()) in page
