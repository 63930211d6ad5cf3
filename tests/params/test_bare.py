"""Parameters that no known module owns: what their shape says, what it leaves open, and roles that cannot hold."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from mukron import ParametrizationError, base_shapes, parametrize
from mukron.theory import Role


class Bare(nn.Module):
    def __init__(self, width: int, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width)
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))


def bare(*shapes):
    """A factory; "d" stands for the width, "2d" for twice it."""

    def make(width):
        sizes = {"d": width, "2d": 2 * width, "d+1": width + 1}
        return Bare(width, *(tuple(sizes.get(size, size) for size in shape) for shape in shapes))

    return make


def refused(*parts: str):
    return pytest.raises(ParametrizationError, match="(?s)" + ".*".join(map(re.escape, parts)))


@pytest.mark.parametrize(
    ("shape", "role"),
    [
        (("d",), Role.VECTOR),  # a gain, a bias
        (("2d",), Role.VECTOR),
        ((1, 1, "d"), Role.VECTOR),  # a class token
        ((1, "d"), Role.VECTOR),
        (("d", 1, 1), Role.VECTOR),  # a layer scale of channels
        ((1, 7, "d"), Role.INPUT),  # position embeddings
        ((1, "d", 4, 4), Role.INPUT),  # those of images
        ((7,), Role.SCALAR),
        ((1, 7, 3), Role.SCALAR),
    ],
)
@pytest.mark.parametrize("kind", ["factory", "network"])
def test_roles_that_follow_from_a_shape(shape, role, kind):
    make = bare(shape)
    plan = parametrize(make(32), base_shapes(make, width=8) if kind == "factory" else base_shapes(make(8)))
    growth = plan.parameters["p0"].growth
    assert growth.role is role
    assert (growth.r_in, growth.r_out) == (1, 1 if role is Role.SCALAR else 4)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((7, "d"), "[7, 16]: its owner Bare is not a known module; dimension 1 grows: input, output or vector"),
        (("d", 7), "[16, 7]: its owner Bare is not a known module; dimension 0 grows: input, output or vector"),
        (("d", 1, 7), "dimension 0 grows: input, output or vector"),
        (("d", "d"), "dimensions 0 and 1 grow: hidden"),
        (("d", "d", "d"), "dimensions 0, 1 and 2 grow: hidden"),
        ((1, "d", "2d"), "dimensions 1 and 2 grow: hidden"),
        (("d", "d+1"), "dimensions 0 and 1 grow: hidden, but by different ratios: register the type"),
    ],
)
def test_shapes_that_leave_the_role_open(shape, text):
    with refused('parameter "p0"', text):
        base_shapes(bare(shape), width=8)


def test_one_error_names_all_of_them_and_guesses_nothing():
    make = bare((7, "d"), ("d",), ("d", "d"), (1, 5, "d"), (7, 3, "d"))
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(make, width=8)
    text = str(caught.value)
    assert text.startswith("the roles of 3 of 7 parameters are not known:")
    assert re.findall(r'\n  parameter "(\w+)"', text) == ["p0", "p2", "p4"]
    assert not re.search(r'roles=\{"p\d', text)
    roles = {"p0": "input", "p2": "hidden", "p4": "output"}
    plan = parametrize(make(32), base_shapes(make, width=8, roles=roles))
    assert {name: plan.parameters[name].role.value for name in roles} == roles


def test_tied_and_unknown_parameters_are_reported_together():
    class Tied(Bare):
        def __init__(self, width):
            super().__init__(width, (7, width))
            self.tokens, self.head = nn.Embedding(9, width), nn.Linear(width, 9, bias=False)
            self.head.weight = self.tokens.weight

    with refused('"p0"', "Declare the role of each", '"tokens.weight" is tied', 'roles={"tokens.weight": "input"}'):
        base_shapes(Tied, width=8)


def test_the_remedy_of_a_tied_head_can_be_pasted():
    """The role and the hook that the error proposes: the logits of a wide network move like those of a narrow one."""

    class Tied(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.norm = nn.Embedding(9, width), nn.LayerNorm(width)
            self.head = nn.Linear(width, 9, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            return self.head(self.norm(self.tokens(tokens)))

    with pytest.raises(ParametrizationError) as caught:
        base_shapes(Tied, width=16)
    roles = eval(re.search(r"roles=(\{.*?\})", str(caught.value))[1])
    hook = re.search(r"model\.get_submodule.*\)\)$", str(caught.value))[0]

    def make(width, hooked=True):
        model = Tied(width)
        if hooked:
            exec(hook, {"model": model, "base_width": 16, "width": width})
        return model

    def moved(width, hooked):
        torch.manual_seed(0)
        model = make(width, hooked)
        plan = parametrize(model, base_shapes(lambda width: make(width, hooked), width=16, roles=roles))
        optimizer = torch.optim.AdamW(plan.param_groups("adamw", lr=0.1))
        tokens = torch.arange(9)
        before = model(tokens)
        nn.functional.cross_entropy(before, tokens.roll(1)).backward()
        optimizer.step()
        return float((model(tokens) - before).detach().std())

    assert moved(256, hooked=True) < 1.5 * moved(16, hooked=True)
    assert moved(256, hooked=False) > 8 * moved(16, hooked=False)


@pytest.mark.parametrize("role", ["input", "output", "vector"])
def test_two_dimensions_that_grow_make_a_hidden_weight(role):
    with refused(f'"p0" [16, 16]: declared {role}, which grows on one side alone, but dimensions 0 and 1 grow'):
        base_shapes(bare(("d", "d")), width=8, roles={"p0": role})


def test_a_role_that_the_owner_contradicts():
    def make(width):
        return nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2))

    for name, role, known in [("1.weight", "input", "hidden"), ("0.weight", "output", "input")]:
        with refused(f'"{name}"', f"declared {role}, but its owner is Linear", f'{known} as "{name}"'):
            base_shapes(make, width=8, roles={name: role})
    with refused('"0.bias"', "declared output", 'vector as "0.bias"'):
        base_shapes(make, width=8, roles={"0.bias": "output"})


def test_roles_that_a_known_owner_shares():
    """An input weight of a constant is a vector; who declares what is so already changes nothing."""

    def make(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.Linear(4 * width, width))

    roles = {"0.bias": "input", "2.weight": "hidden"}
    shapes = base_shapes(make, width=8, roles=roles)
    growths = {name: entry.growth for name, entry in parametrize(make(32), shapes).parameters.items()}
    assert growths["0.bias"].role is Role.INPUT
    assert (growths["2.weight"].r_in, growths["2.weight"].r_out) == (4, 4)


def test_roles_are_refused_where_a_network_is_parametrized_too():
    make = bare(("d", "d"))
    narrow = make(8)
    narrow.mukron_roles = {"p0": "input"}
    with refused('"p0"', "declared input", "dimensions 0 and 1 grow"):
        parametrize(make(32), base_shapes(narrow))


class Mask(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def reparametrized(kind, width_of_input=None):
    def make(width):
        layer = nn.Linear(width_of_input or width, width)
        if kind is Mask:
            nn.utils.parametrize.register_parametrization(layer, "weight", kind())
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the old ones are deprecated
                kind(layer)
        return nn.Sequential(layer, nn.Linear(width, 3))

    return make


REPARAMETRIZATIONS = {  # what computes a weight, and from what
    nn.utils.parametrizations.weight_norm: ("_WeightNorm", ("parametrizations.weight.original0", "original1")),
    nn.utils.parametrizations.spectral_norm: ("_SpectralNorm", ("parametrizations.weight.original",)),
    nn.utils.parametrizations.orthogonal: ("_Orthogonal", ("parametrizations.weight.original",)),
    nn.utils.weight_norm: ("WeightNorm", ("weight_g", "weight_v")),
    nn.utils.spectral_norm: ("SpectralNorm", ("weight_orig",)),
    Mask: ("Mask", ("parametrizations.weight.original",)),
}


@pytest.mark.parametrize("width_of_input", [3, None])
@pytest.mark.parametrize("kind", REPARAMETRIZATIONS)
def test_reparametrized_weights_are_refused_with_a_line_that_takes_them_off(kind, width_of_input):
    computes, parts = REPARAMETRIZATIONS[kind]
    make = reparametrized(kind, width_of_input)
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(make, width=8)
    text = str(caught.value)
    assert text.startswith("no role is known for what reparametrized weights are computed from:")
    assert re.search(f'"0.weight", by {computes} from "0.' + ".*".join(map(re.escape, parts)), text)
    assert "Declare the role of each" not in text
    assert ("of your own" in text) == (kind is Mask)
    if kind is nn.utils.parametrizations.orthogonal:
        assert "remove" not in text  # torch cannot, on the meta device
        return
    line = re.search(r"torch\.nn\.utils\.\S+\(model.*\)$", text, re.MULTILINE)[0]

    def plain(width):
        model = make(width)
        exec(line, {"model": model, "torch": torch})
        return model

    plan = parametrize(plain(32), base_shapes(plain, width=8))
    assert plan.parameters["0.weight"].role is (Role.INPUT if width_of_input else Role.HIDDEN)


@pytest.mark.parametrize("role", ["vector", "scalar", "input"])
def test_a_role_does_not_help_a_weight_that_torch_normalizes(role):
    part = "0.parametrizations.weight.original"
    for factory in (True, False):
        make = reparametrized(nn.utils.parametrizations.weight_norm)
        roles = {f"{part}0": role, f"{part}1": "hidden"}
        with refused("reparametrized weights", f'"0.weight", by _WeightNorm from "{part}0" [', f'"{part}1" ['):
            if factory:
                base_shapes(make, width=8, roles=roles)
            else:
                parametrize(make(32), base_shapes(make(8), roles=roles))


def test_a_mask_takes_a_declared_role():
    """Its entries are the weight's, each times a number: the law is that of the weight."""
    make, part = reparametrized(Mask), "0.parametrizations.weight.original"
    plan = parametrize(make(32), base_shapes(make, width=8, roles={part: "hidden"}))
    assert plan.parameters[part].role is Role.HIDDEN
    assert plan.parameters[part].growth.r_in == 4


def test_reparametrized_unknown_and_misdeclared_parameters_are_reported_together():
    def make(width):
        return nn.ModuleList(
            [bare((7, "d"), ("d", 7))(width), nn.utils.parametrizations.weight_norm(nn.Linear(3, width))]
        )

    roles = {"0.p1": "inptu", "0.p2": "input", "1.weight": "input"}
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(make, width=8, roles=roles)
    text = str(caught.value)
    for line in (
        "the roles of 1 of 7 parameters are not known:",
        '  parameter "0.p0" [7, 16]',
        '  "1.weight", by _WeightNorm from',
        "parameter \"0.p1\": unknown role 'inptu'",
        'roles: the network has no parameter "0.p2"',
        'roles: the network has no parameter "1.weight"',
    ):
        assert sum(other.startswith(line) for other in text.split("\n")) == 1, line
    assert text.count('"0.p1"') == 1


def test_a_role_of_a_misspelt_name_proposes_the_name():
    with pytest.raises(ParametrizationError, match=r'no parameter "0.positoin"; did you mean "0.position"\?'):
        base_shapes(
            lambda width: nn.Sequential(_with_position(width), nn.Linear(width, 2)),
            width=8,
            roles={"0.positoin": "input"},
        )


def _with_position(width):
    module = nn.Module()
    module.position = nn.Parameter(torch.randn(7, width))
    return module


@pytest.mark.parametrize("shape", [("d", 1, 1, 1), ("d", 1, 1)])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv1d])
def test_gains_of_output_channels(shape, kind):
    """As timm's ScaledStdConv2d has one."""

    class Scaled(kind):
        def __init__(self, width):
            super().__init__(width, width, 3)
            self.gain = nn.Parameter(torch.ones([width if size == "d" else size for size in shape]))

    growth = parametrize(Scaled(32), base_shapes(Scaled, width=8)).parameters["gain"].growth
    assert (growth.role, growth.r_in, growth.r_out) == (Role.VECTOR, 1, 4)


@pytest.mark.parametrize("shape", [(1, "d", 1, 1), ("d", 1), (1, "d")])
def test_other_tensors_of_known_modules_stay_open(shape):
    """They may be summed over, as a second weight with one output."""

    class Scaled(nn.Conv2d):
        def __init__(self, width):
            super().__init__(width, width, 3)
            self.gain = nn.Parameter(torch.ones([width if size == "d" else size for size in shape]))

    with refused("the roles of 1 of 3", '"gain"'):
        base_shapes(Scaled, width=8)


def test_known_modules_with_parameters_of_their_own():
    class Scaled(nn.Linear):
        def __init__(self, width):
            super().__init__(3, width)
            self.scale = nn.Parameter(torch.ones(width))
            self.gain = nn.Parameter(torch.ones(width, 1))

    with refused("the roles of 1 of 4", '"gain" [16, 1]'):
        base_shapes(Scaled, width=8)
    shapes = base_shapes(Scaled, width=8, roles={"gain": "vector"})
    assert parametrize(Scaled(32), shapes).parameters["scale"].role is Role.VECTOR
