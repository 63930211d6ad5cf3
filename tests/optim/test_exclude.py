"""``exclude=`` takes names, patterns and types of modules; what names nothing is refused with near names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import mukron
from mukron.models import MLP
from mukron.optim.shapes import known_shapes
from mukron.params.excluded import covers
from mukron.train import RunConfig
from mukron.train.build import optimizer_of


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.out(torch.tanh(self.query(x)) * self.key(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.mlp(self.attention(x))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv1d(2, width, 3), nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x).mean(-1)
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


ATTENTION = ("attention.query", "attention.key", "attention.out")
LAYERS = {"stem", "head", *(f"layer.{i}.{name}" for i in (0, 1) for name in ("mlp", *ATTENTION))}
METHODS = {
    "kfac": mukron.KFAC,
    "foof": mukron.FOOF,
    "shampoo": mukron.Shampoo,
    "soap": mukron.SOAP,
    "muon": mukron.Muon,
    "gauss-newton": mukron.GaussNewton,
}
CASES = [
    (("layer.*.attention.*",), {f"layer.{i}.{name}" for i in (0, 1) for name in ATTENTION}),
    (("layer.?.attention",), {f"layer.{i}.{name}" for i in (0, 1) for name in ATTENTION}),
    (("*.query",), {"layer.0.attention.query", "layer.1.attention.query"}),
    (("layer.[1-9]",), {name for name in LAYERS if name.startswith("layer.1")}),
    (("layer.*.attention.{query,key}", "head"), {"head", *(f"layer.{i}.{n}" for i in (0, 1) for n in ATTENTION[:2])}),
    ((nn.Conv1d,), {"stem"}),
    ((Attention, "stem"), {"stem", *(f"layer.{i}.{name}" for i in (0, 1) for name in ATTENTION)}),
    ((nn.modules.conv._ConvNd,), {"stem"}),  # a type that others derive from
    (("layer.1.mlp",), {"layer.1.mlp"}),
]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("exclude", "left"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("method", METHODS)
def test_what_is_left_to_the_fallback_rule(method, exclude, left, planned):
    model = Net()
    plan = mukron.parametrize(model, mukron.base_shapes(Net, width=4)) if planned else None
    optimizer = METHODS[method](model, plan, lr=0.01, exclude=exclude)
    assert {*optimizer.layers} == LAYERS - left
    assert all(isinstance(entry, str) for entry in optimizer.options.exclude)
    if plan is not None:
        fallen = {row[0] for row in plan.explain(method, exclude=exclude, whole=True).rows if "not precond" in row[-1]}
        assert {name for name in LAYERS if f"{name}.weight" in fallen} == left
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    nn.functional.cross_entropy(model(torch.randn(6, 2, 5)), torch.randint(3, (6,))).backward()
    optimizer.step()
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_patterns_of_parameters():
    optimizer = mukron.KFAC(Net(), lr=0.01, exclude=("*.bias",))
    assert {*optimizer.layers} == LAYERS
    assert {block for layer in optimizer.layers.values() for block in layer.blocks} == {"weight"}


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (("layer.*.attentoin.*",), 'pattern "layer.*.attentoin.*" matches no module of the model; did you mean \'lay'),
        (("layer.0.attention.quer",), "no module \"layer.0.attention.quer\"; did you mean 'layer.0.attention.query'"),
        (("query",), "no module \"query\"; did you mean 'layer.0.attention.query', 'layer.1.attention.query'"),
        (("xyz",), 'no module "xyz"; its modules: stem, layer'),
        ((nn.Conv2d,), "no module of type Conv2d; its types: Net, Conv1d, ModuleList, Layer, Attention, Linear"),
        (("head", "nothing.*"), 'pattern "nothing.*" matches no module of the model; its modules: stem, layer'),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_names_nothing_is_refused(method, exclude, message):
    with pytest.raises(ValueError, match="exclude: the.*" + re.escape(message)):
        METHODS[method](Net(), lr=0.01, exclude=exclude)
    plan = mukron.parametrize(model := Net(), mukron.base_shapes(Net, width=4))
    with pytest.raises(ValueError, match="exclude: the"):
        plan.explain(method, exclude=exclude)
    del model


@pytest.mark.parametrize("exclude", [(3,), (int,), (nn.Linear(2, 2),), nn.Linear])
def test_what_is_neither_a_name_nor_a_type(exclude):
    with pytest.raises(TypeError, match=r"exclude takes names of layers, patterns and types of modules"):
        mukron.KFAC(Net(), lr=0.01, exclude=exclude)
    with pytest.raises(TypeError, match=r"exclude takes names of layers, patterns and types of modules"):
        mukron.parametrize(Net(), mukron.base_shapes(Net, width=4)).explain("kfac", exclude=exclude)


def test_one_name_is_no_collection_of_its_letters():
    plan = mukron.parametrize(model := Net(), mukron.base_shapes(Net, width=4))
    for given in (lambda: plan.explain("kfac", exclude="layer.*"), lambda: mukron.KFAC(model, plan, exclude="layer.*")):
        with pytest.raises(ValueError, match=re.escape('exclude takes several names: exclude=("layer.*",)')):
            given()


def test_a_type_of_the_model_itself_leaves_all_of_it():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="nothing to precondition"):
        mukron.KFAC(model, lr=0.01, exclude=(nn.Sequential,))


def test_plans_of_networks_whose_shapes_are_known():
    llama = known_shapes("llama-7b")
    assert [layer.name for layer in llama.without(["layers.*.attention.*", "head"]).layers] == [
        "layers.*.mlp.{gate,up}",
        "layers.*.mlp.down",
    ]
    assert llama.without(["layers.*.attention.{q,o}"]).layers == tuple(
        layer for layer in llama.layers if layer.name != "layers.*.attention.{q,o}"
    )
    with pytest.raises(ValueError, match="no layer"):
        llama.without(["layers.*.moe.*"])


def test_patterns_in_runs():
    model = MLP(16)
    plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=8))
    config = RunConfig(model="mlp", width=16, method="kfac", method_options={"exclude": ["fc{1,3}"]})
    assert {*optimizer_of(config, model, plan).layers} == {"fc2"}
    with pytest.raises(ValueError, match=r"exclude='fc\{4,5\}' is no layer of this network; its layers: fc1, fc2, fc3"):
        optimizer_of(config.replace(method_options={"exclude": ["fc{4,5}"]}), model, plan)


@pytest.mark.parametrize(
    ("entry", "name", "covered"),
    [
        ("a.*", "a.b.c", True),
        ("*.a", "x.abc.a", True),
        ("*.a", "x.a.bc", True),  # inside of x.a
        ("*.a", "a", False),
        ("a.{b,c}.d", "a.c.d.weight", True),
        ("a.{b,{c,d}}", "a.d", True),
        ("a.b", "a.bc", False),
        ("a", "b.a", False),
        ("layers.*.{q,o}", "layers.*.{q,o}", True),
        (nn.Linear, "a", False),
    ],
)
def test_names_and_patterns(entry, name, covered):
    assert covers(entry, name) is covered
