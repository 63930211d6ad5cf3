"""Fan-in and fan-out as each kind of module defines them, and who preconditions its parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mukron.layers import Fans, Layer, MatrixLayer, layer_of, register
from mukron.params import ParametrizationError, base_shapes, parametrize
from mukron.theory import Role


def vector(size: int) -> Fans:
    return Fans(1, size, vector=True)


CASES = [
    (nn.Linear(3, 4), {"weight": Fans(3, 4), "bias": vector(4)}),
    (nn.Bilinear(3, 4, 5), {"weight": Fans(12, 5, inputs=2), "bias": vector(5)}),
    (nn.Conv1d(4, 6, 3), {"weight": Fans(12, 6), "bias": vector(6)}),
    (nn.Conv2d(4, 6, (3, 5)), {"weight": Fans(60, 6), "bias": vector(6)}),
    (nn.Conv3d(4, 6, 2), {"weight": Fans(32, 6), "bias": vector(6)}),
    (nn.Conv2d(4, 6, 3, groups=2), {"weight": Fans(18, 6), "bias": vector(6)}),
    (nn.Conv2d(6, 6, 3, groups=6), {"weight": Fans(9, 6), "bias": vector(6)}),
    (nn.ConvTranspose1d(4, 6, 3), {"weight": Fans(12, 6), "bias": vector(6)}),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": Fans(18, 6), "bias": vector(6)}),
    (nn.ConvTranspose3d(4, 4, 2, groups=4), {"weight": Fans(8, 4), "bias": vector(4)}),
    (nn.Embedding(50, 8), {"weight": Fans(1, 8)}),
    (nn.EmbeddingBag(50, 8), {"weight": Fans(1, 8)}),
    (nn.BatchNorm2d(8), {"weight": vector(8), "bias": vector(8)}),
    (nn.InstanceNorm1d(8, affine=True), {"weight": vector(8), "bias": vector(8)}),
    (nn.LayerNorm((3, 8)), {"weight": vector(24), "bias": vector(24)}),
    (nn.GroupNorm(2, 8), {"weight": vector(8), "bias": vector(8)}),
    (nn.RMSNorm(8), {"weight": vector(8)}),
    (nn.PReLU(8), {"weight": vector(8)}),
    (
        nn.MultiheadAttention(8, 2, add_bias_kv=True),
        {"in_proj_weight": Fans(8, 8), "in_proj_bias": vector(24), "bias_k": vector(8), "bias_v": vector(8)},
    ),
    (
        nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False),
        {"q_proj_weight": Fans(8, 8), "k_proj_weight": Fans(3, 8), "v_proj_weight": Fans(5, 8)},
    ),
    (
        nn.LSTM(3, 4),
        {
            **{"weight_ih_l0": Fans(3, 16), "weight_hh_l0": Fans(4, 16)},
            **{"bias_ih_l0": vector(16), "bias_hh_l0": vector(16)},
        },
    ),
    (nn.GRUCell(3, 4, bias=False), {"weight_ih": Fans(3, 12), "weight_hh": Fans(4, 12)}),
]
SUMS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@pytest.mark.parametrize(("module", "expected"), CASES, ids=lambda value: type(value).__name__)
def test_fans(module, expected):
    layer, own = layer_of(module), dict(module.named_parameters(recurse=False))
    assert {name: layer.fans(name, tuple(values.shape)) for name, values in own.items()} == expected
    # what the optimizers have no layout for is left to their fallback rule, and nothing else is
    products = {name for product in layer.products().values() for name in product.blocks.values()}
    assert {name for name in own if layer.preconditions(name)} == (
        set(own) if isinstance(layer, MatrixLayer) and not layer.depthwise else products
    )
    assert bool(products) == isinstance(module, nn.MultiheadAttention)
    assert isinstance(layer, MatrixLayer) == isinstance(module, (*SUMS, nn.Embedding))
    assert layer.fans("other", (3,)) is None
    assert not layer.preconditions("other")


@pytest.mark.parametrize("module", [module for module, _ in CASES if isinstance(module, SUMS)], ids=repr)
def test_fan_in_is_what_one_output_depends_on(module):
    """The number of non-zero derivatives of one output by the inputs, counted by autograd."""
    positions = {nn.Conv1d: (9,), nn.Conv2d: (9, 9), nn.Conv3d: (9, 9, 9)}.get(type(module), ())
    size = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    x = torch.randn(1, size, *positions, requires_grad=True)
    output = module(x)
    middle = (0, 0, *(length // 2 for length in output.shape[2:]))
    output[middle].backward()
    assert int((x.grad != 0).sum()) == layer_of(module).fans("weight", tuple(module.weight.shape)).fan_in


class Odd(nn.Module):
    """A layer that stores its weight the other way round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, width))


def test_a_custom_layer_is_refused_then_registered():
    class Mine(Odd):
        pass

    with pytest.raises(ParametrizationError, match=r'"kernel".*Mine is not a known module; dimension 1 grows'):
        base_shapes(Mine, width=4)

    @register(Mine)
    class MineLayer(Layer):
        def fans(self, name, shape):
            return Fans(*shape)

    plan = parametrize(Mine(16), base_shapes(Mine, width=4))
    assert plan.parameters["kernel"].role is Role.INPUT
    assert plan.parameters["kernel"].growth.r_out == 4


@pytest.mark.parametrize(
    ("make", "role"),
    [
        (lambda width: nn.Conv2d(width, width, 3, groups=width), Role.INPUT),  # depthwise: no sum over channels
        (lambda width: nn.ConvTranspose2d(width, width, 3, groups=width), Role.INPUT),
        (lambda width: nn.Conv2d(width, width, 3, groups=2), Role.HIDDEN),
        (lambda width: nn.ConvTranspose2d(width, 3, 3), Role.OUTPUT),
        (lambda width: nn.ConvTranspose2d(3, width, 3), Role.INPUT),
        (lambda width: nn.Bilinear(width, 3, 7), Role.OUTPUT),
        (lambda width: nn.EmbeddingBag(20, width), Role.INPUT),
    ],
)
def test_roles_follow_the_fans(make, role):
    plan = parametrize(make(12), base_shapes(make, width=4))
    growth = plan.parameters["weight"].growth
    assert growth.role is role
    assert (growth.r_in, growth.r_out) == (3 if role.fan_in else 1, 3 if role.fan_out else 1)


def test_bilinear_of_two_wide_inputs():
    def hidden(width):
        return nn.Bilinear(width, width, width)

    growth = parametrize(hidden(12), base_shapes(hidden, width=4)).parameters["weight"].growth
    assert (growth.role, growth.r_in, growth.r_out) == (Role.HIDDEN, 9, 3)  # it sums over both inputs
    with pytest.raises(ParametrizationError, match="product of two growing inputs"):
        base_shapes(lambda width: nn.Bilinear(width, width, 7), width=4)


def test_the_projections_of_attention():
    """MultiheadAttention uses its weights without calling a module; extra keys and values have no matrix."""
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    layer = layer_of(attention)
    assert layer.uncalled() == ("out_proj",)
    assert dict(layer.products()["in_proj_weight"].blocks) == {"weight": "in_proj_weight", "bias": "in_proj_bias"}
    assert not layer.preconditions("bias_k")
    assert not layer.preconditions("bias_v")
    projection = layer_of(attention.out_proj)
    assert projection.fans("weight", (8, 8)) == Fans(8, 8)
    assert projection.preconditions("weight")
    assert not projection.called
    separate = layer_of(nn.MultiheadAttention(8, 2, kdim=3)).products()
    assert {name: dict(product.blocks) for name, product in separate.items()} == {
        name: {"weight": name} for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    }
    assert [product.layer.d_in for product in separate.values()] == [8, 3, 8]


def test_old_style_weight_norm_is_not_taken_for_a_weight():
    def make(width):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(width, width)))

    with pytest.raises(ParametrizationError, match=r'"0.weight", by WeightNorm from "0.weight_g" .* "0.weight_v"'):
        base_shapes(make, width=4)


def test_lazy_modules_are_refused():
    with pytest.raises(ParametrizationError, match=r'"weight" of a lazy LazyLinear has no shape yet'):
        base_shapes(lambda width: nn.LazyLinear(width), width=4)  # noqa: PLW0108


def test_half_a_layout_is_refused_when_it_is_registered():
    class Half(MatrixLayer):
        def fans(self, name, shape):
            return Fans(*shape)

        def inputs(self, x):
            return x

    with pytest.raises(TypeError, match="Half must also define matrix, signals, weight"):
        register(Odd)(Half)
    assert type(layer_of(Odd(4))) is Layer  # which knows nothing of it
    assert layer_of(Odd(4)).fans("kernel", (3, 4)) is None
