"""Layer types of other packages are known by the qualified names of their classes, without these packages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mukron
from mukron.layers import Fans, Layer, MatrixLayer, base, layer_of, register, vector
from mukron.theory import Role


def conv1d_class(module: str = "transformers.pytorch_utils") -> type[nn.Module]:
    """A class like transformers' Conv1D, which stores its weight as [in, out]."""

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

        def forward(self, x):
            out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            return out.view(*x.shape[:-1], -1)

    Conv1D.__module__, Conv1D.__qualname__ = module, "Conv1D"
    return Conv1D


Conv1D = conv1d_class()


def network(width: int, transposed: bool = True) -> nn.Module:
    """The same network with both kinds of layers."""

    def linear(d_in: int, d_out: int) -> nn.Module:
        layer = nn.Linear(d_in, d_out)
        if transposed:
            plain, layer = layer, Conv1D(d_out, d_in)
            with torch.no_grad():
                layer.weight.copy_(plain.weight.mT)
                layer.bias.copy_(plain.bias)
        return layer

    return nn.Sequential(linear(6, width), nn.Tanh(), linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, 3))


def test_fans_and_layout():
    layer, x = Conv1D(6, 4).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    view = layer_of(layer)
    assert isinstance(view, MatrixLayer)
    assert view.fans("weight", (4, 6)) == Fans(4, 6)
    assert view.fans("bias", (6,)) == vector((6,))
    assert view.fans("other", (6,)) is None
    output = layer(x)
    output.retain_grad()
    output.square().sum().backward()
    H, D = view.inputs(x), view.signals(output.grad)
    assert H.shape == (1, 3, 5, 4)
    G = torch.einsum("gnpo,gnpi->goi", D, H)
    assert torch.allclose(view.weight(G), layer.weight.grad, rtol=1e-10)
    assert torch.equal(view.values("weight", view.block("weight", layer.weight)), layer.weight)
    assert torch.equal(view.values("bias", view.block("bias", layer.bias)), layer.bias)


def test_roles_follow_the_sides():
    plan = mukron.parametrize(network(32), mukron.base_shapes(network, width=8))
    growths = {name: entry.growth for name, entry in plan.parameters.items()}
    assert [growths[f"{i}.weight"].role for i in (0, 2)] == [Role.INPUT, Role.HIDDEN]
    assert (growths["0.weight"].r_in, growths["0.weight"].r_out) == (1, 4)
    assert growths["0.bias"].role is Role.VECTOR


def test_a_class_of_that_name_elsewhere_is_not_known():
    assert type(layer_of(conv1d_class("mine")(6, 4))) is Layer


def test_classes_derived_from_a_known_one_and_the_nearest_one(monkeypatch):
    monkeypatch.setattr(base, "_registry", dict(base._registry))

    class Mine(Conv1D):
        pass

    assert type(layer_of(Mine(6, 4))) is type(layer_of(Conv1D(6, 4)))

    @register(f"{Mine.__module__}.{Mine.__qualname__}")
    class MineLayer(Layer):
        pass

    assert type(layer_of(Mine(6, 4))) is MineLayer
    assert isinstance(layer_of(Conv1D(6, 4)), MatrixLayer)


METHODS = {
    "kfac": lambda model, plan: mukron.KFAC(model, plan, lr=0.1),
    "kfac fused": lambda model, plan: mukron.KFAC(model, plan, lr=0.1, fused=True, trust=None),
    "foof": lambda model, plan: mukron.FOOF(model, plan, lr=0.1, trust=None),
    "shampoo": lambda model, plan: mukron.Shampoo(model, plan, lr=0.1),
    "shampoo in blocks": lambda model, plan: mukron.Shampoo(model, plan, lr=0.1, block=5),
    "soap": lambda model, plan: mukron.SOAP(model, plan, lr=0.1, eps=1e-2),
    "muon": lambda model, plan: mukron.Muon(model, plan, lr=0.1),
    "muon, split": lambda model, plan: mukron.Muon(model, plan, lr=0.1, split={"2": 2}),
    "gauss-newton": lambda model, plan: mukron.GaussNewton(model, plan, lr=0.1),
}


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_a_linear_layer(method):
    models = []
    for transposed in (True, False):
        torch.manual_seed(0)

        def make(width, transposed=transposed):
            return network(width, transposed)

        shapes = mukron.base_shapes(make, width=4)
        torch.manual_seed(0)
        model = make(8).double()
        plan = mukron.parametrize(model, shapes)
        optimizer = METHODS[method](model, plan)
        assert "2" in optimizer.layers
        before = model[2].weight.detach().clone()
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
        for _ in range(1 if method == "soap" else 3):  # its second step depends on the basis of what no gradient saw
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        models.append(model)
        assert not torch.equal(model[2].weight, before)
    for here, there in zip(*(model.parameters() for model in models), strict=True):
        expected = there.mT if here.shape != there.shape else there
        assert torch.allclose(here, expected, rtol=1e-9, atol=1e-12)
