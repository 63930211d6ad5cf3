"""Initial values: whatever the initializer, std at any width is std at the base times r_in^-b."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from mukron.params import BaseShapes, ParametrizationError, base_shapes, parametrize
from mukron.params import shapes as shapes_module
from mukron.params.initial import Law, Spread, correction, distance
from mukron.theory import Role
from networks import CLASSES, INPUTS, Net

BASE, WIDTH = 32, 512
R = WIDTH // BASE


def constant_std(weight):
    nn.init.normal_(weight, std=0.02)


def truncated(weight):
    nn.init.trunc_normal_(weight, std=0.02, a=-0.02, b=0.02)


def fan_out(weight):
    nn.init.kaiming_normal_(weight, mode="fan_out")


INITIALIZERS = {
    "torch's default": None,
    "fan-in": nn.init.kaiming_normal_,
    "fan-out": fan_out,
    "Xavier": nn.init.xavier_uniform_,
    "constant std": constant_std,
    "truncated": truncated,
    "orthogonal": nn.init.orthogonal_,
}


def factory_with(initializer):
    def factory(width):
        model = nn.Sequential(nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, CLASSES))
        if initializer is not None:
            for layer in model:
                initializer(layer.weight)
        return model

    return factory


@pytest.mark.parametrize("scheme", ["mup", "ntk", "uniform:1/4"])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_every_initializer_ends_at_the_law(name, scheme):
    factory = factory_with(INITIALIZERS[name])
    shapes = base_shapes(factory, width=BASE)
    torch.manual_seed(1)
    model = factory(WIDTH)
    plan = parametrize(model, shapes, scheme)
    exponents = {Role.HIDDEN: 1 / 2, Role.OUTPUT: {"mup": 1, "ntk": 1 / 2, "uniform:1/4": 3 / 4}[scheme]}
    for parameter, values in model.named_parameters():
        entry = plan.parameters[parameter]
        expected = shapes.parameters[parameter].spread.std * R ** -exponents.get(entry.role, 0)
        assert entry.std == pytest.approx(expected)
        noise = 4 / math.sqrt(2 * values.numel()) + 4 / math.sqrt(2 * shapes.parameters[parameter].spread.numbers)
        assert float(values.detach().std(correction=0)) == pytest.approx(expected, rel=noise + 0.005), parameter


def test_torchs_default_needs_an_exact_correction_or_none():
    """Fan-in weights of input and hidden layers are right as drawn; the output's are divided by the root of r_in."""
    torch.manual_seed(0)
    model = Net(WIDTH)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    parametrize(model, base_shapes(Net, width=BASE))
    after = model.state_dict()
    for name in ("first.weight", "first.bias", "hidden.weight", "norm.weight", "norm.bias"):
        assert torch.equal(after[name], before[name]), name
    assert torch.equal(after["head.weight"], before["head.weight"] * R**-0.5)
    # torch draws biases with std fan-in^-1/2, but they must keep one size at every width
    assert torch.equal(after["hidden.bias"], before["hidden.bias"] * R**0.5)
    assert torch.equal(after["head.bias"], before["head.bias"] * R**0.5)


def test_zeros_and_ones_are_left_alone():
    def factory(width):
        model = Net(width)
        nn.init.zeros_(model.head.weight)
        nn.init.ones_(model.hidden.bias)
        return model

    model = factory(64)
    parametrize(model, base_shapes(factory, width=8))
    assert torch.equal(model.head.weight, torch.zeros(CLASSES, 64))
    assert torch.equal(model.hidden.bias, torch.ones(64))


def test_sp_leaves_the_weights_as_drawn():
    factory = factory_with(constant_std)
    model = factory(WIDTH)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    plan = parametrize(model, base_shapes(factory, width=BASE), "sp")
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
    assert plan.parameters["1.weight"].std == pytest.approx(0.02, rel=0.01)
    assert all(scale.lr == 1 for method in ("sgd", "adamw", "kfac") for scale in plan.scales(method).values())
    assert all(rho == 1 for scale in plan.scales("kfac").values() for rho in scale.damping.values())


@pytest.mark.parametrize("exponent", [0.5, 1, 2, Fraction(3, 4), 64])
def test_output_exponent(exponent):
    torch.manual_seed(0)
    model, reference = Net(64), Net(64)
    reference.load_state_dict(model.state_dict())
    shapes = base_shapes(Net, width=8)
    plan = parametrize(model, shapes, output_exponent=exponent)
    parametrize(reference, shapes)
    ratio = 8.0 ** (1 - float(exponent))
    assert torch.allclose(model.head.weight, reference.head.weight * ratio, rtol=1e-6, atol=0)
    assert torch.equal(model.hidden.weight, reference.hidden.weight)
    assert plan.output_exponent == Fraction(str(exponent))
    # only the initial weights move: learning rates and damping stay the scheme's
    assert plan.scales("kfac")["head.weight"].damping == {"A": 8.0, "B": 1.0}


def test_output_zero():
    model = Net(64)
    plan = parametrize(model, base_shapes(Net, width=8), output_exponent="zero")
    assert not model.head.weight.any()
    assert plan.parameters["head.weight"].std == 0
    assert model.head.bias.any()


@pytest.mark.parametrize("exponent", [-1, "one", "1/0", float("nan")])
def test_wrong_output_exponents_are_refused(exponent):
    with pytest.raises(ParametrizationError, match="output_exponent must be a number not below 0"):
        parametrize(Net(8), base_shapes(Net, width=4), output_exponent=exponent)


def test_sp_takes_no_output_exponent():
    with pytest.raises(ParametrizationError, match="leaves the initial weights as drawn"):
        parametrize(Net(8), base_shapes(Net, width=4), "sp", output_exponent=1)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_second_call_changes_nothing(name):
    factory = factory_with(INITIALIZERS[name])
    shapes, model = base_shapes(factory, width=BASE), factory(WIDTH)
    plan = parametrize(model, shapes)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    assert parametrize(model, shapes) == plan
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())


def test_a_second_call_after_training_changes_nothing():
    shapes, model = base_shapes(Net, width=8), Net(64)
    plan = parametrize(model, shapes)
    with torch.no_grad():
        for values in model.parameters():
            values.add_(torch.randn_like(values))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    assert parametrize(model, shapes) == plan
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())


@pytest.mark.parametrize(
    "change", [{"scheme": "sp"}, {"scheme": "ntk"}, {"output_exponent": 2}, {"shapes": base_shapes(Net, width=4)}]
)
def test_another_parametrization_of_the_same_model_is_refused(change):
    shapes, model = base_shapes(Net, width=8), Net(16)
    parametrize(model, shapes)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises(ParametrizationError, match="already parametrized, differently"):
        parametrize(model, **{"shapes": shapes, **change})
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())


def test_trained_weights_are_not_taken_for_initial_ones():
    trained = Net(16)
    with torch.no_grad():
        trained.norm.weight.add_(0.1 * torch.randn(16))
    before = {name: values.clone() for name, values in trained.state_dict().items()}
    with pytest.raises(
        ParametrizationError, match=r'"norm.weight": its values vary here but are all equal at the base'
    ):
        parametrize(trained, base_shapes(Net, width=8))
    assert all(torch.equal(before[name], values) for name, values in trained.state_dict().items())


def test_half_precision():
    def factory(width):
        return Net(width).bfloat16()

    model = factory(WIDTH)
    head = model.head.weight.clone()
    parametrize(model, base_shapes(factory, width=BASE))
    assert torch.equal(model.head.weight, head * R**-0.5)


@pytest.mark.parametrize("seed", range(20))
def test_few_numbers_are_still_told_apart(seed):
    """Ten uniform numbers at four times the width: the law of a fan-in bias is found in spite of the noise."""
    torch.manual_seed(seed)
    std = distance(nn.Linear(256, 10).bias, center=0.0)
    base = Spread(64**-0.5 / 3**0.5, 80, kurtosis=1.8)  # what eight draws of a uniform bias show
    assert correction(std, 10, base, Fraction(1), Fraction(0), [Fraction(4)]) == 2.0


def test_tiny_tensors_are_never_blown_up():
    """One or two numbers tell no spread; whatever they are, they are corrected by a law or not at all."""

    def factory(width):
        return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2), nn.Linear(2, 1))

    shapes = base_shapes(factory, width=64)
    for seed in range(300):
        torch.manual_seed(seed)
        narrow, wide = factory(64), factory(128)
        before = wide[2].bias.detach().clone()
        parametrize(narrow, shapes)
        torch.manual_seed(seed)
        assert torch.equal(narrow[2].bias, factory(64)[2].bias)  # nothing to correct at the base width
        parametrize(wide, shapes)
        ratio = (wide[2].bias / before).detach()
        assert float(ratio[0]) in (1.0, pytest.approx(2**0.5), pytest.approx(2.0))
        assert wide[2].bias.abs().max() < 2 * 64**-0.5


def torch_default(layer):
    pass


def everything_002(layer):
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.normal_(layer.bias, std=0.02)


def weights_002(layer):
    nn.init.normal_(layer.weight, std=0.02)


def zero_biases(layer):
    nn.init.zeros_(layer.bias)


def normal_fan_in_biases(layer):
    nn.init.normal_(layer.bias, std=layer.in_features**-0.5)


# k of weights and of biases: the initializer's std ~ fan_in^-k
HALF = Fraction(1, 2)
TINY_INITIALIZERS = {
    torch_default: (HALF, HALF),
    everything_002: (0, 0),
    weights_002: (0, HALF),
    zero_biases: (HALF, 0),
    normal_fan_in_biases: (HALF, HALF),
}


def tiny_factory(outputs, initializer, hidden=False):
    def factory(width):
        layers = [nn.Linear(3, width), *([nn.Linear(width, width)] if hidden else []), nn.Linear(width, outputs)]
        for layer in layers:
            initializer(layer)
        return nn.Sequential(*layers)

    return factory


def check_factors(model, shapes, ratio, exponents):
    """Every parameter is multiplied by exactly ratio^(k - b)."""
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    parametrize(model, shapes)
    for name, values in model.named_parameters():
        layer, kind = int(name.split(".")[0]), name.split(".")[1]
        b = 0 if kind == "bias" or layer == 0 else 1 if layer == len(model) - 1 else HALF
        k = 0 if layer == 0 else exponents[kind == "bias"]
        assert torch.equal(values, before[name] * math.pow(ratio, k - b)), name


@pytest.mark.parametrize("outputs", [1, 5, 20])
@pytest.mark.parametrize("initializer", TINY_INITIALIZERS)
def test_tiny_tensors_follow_the_law_of_their_initializer(initializer, outputs):
    """One to twenty numbers are scaled by the same, exact factor whatever the seed."""
    factory = tiny_factory(outputs, initializer)
    shapes = base_shapes(factory, width=16)
    for seed in range(200):
        torch.manual_seed(seed)
        ratio = 2 ** (1 + seed % 6)
        check_factors(factory(16 * ratio), shapes, ratio, TINY_INITIALIZERS[initializer])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("initializer", [torch_default, everything_002, weights_002, zero_biases])
def test_tiny_tensors_without_a_factory_follow_their_kind(initializer, outputs, hidden):
    """Only one draw at each width: the other tensors of the kind, or torch's own initializer, determine the law."""
    factory = tiny_factory(outputs, initializer, hidden)
    for seed in range(40):
        torch.manual_seed(seed)
        shapes, ratio = base_shapes(factory(16)), 2 ** (1 + seed % (3 if hidden else 6))
        check_factors(factory(16 * ratio), shapes, ratio, TINY_INITIALIZERS[initializer])


@pytest.mark.parametrize("initializer", [torch_default, everything_002, zero_biases])
def test_tiny_tensors_of_networks_too_large_to_be_drawn_twice(initializer, monkeypatch):
    monkeypatch.setattr(shapes_module, "NUMBERS_TO_PROBE", 0)
    factory = tiny_factory(5, initializer, hidden=True)
    shapes = base_shapes(factory, width=64)
    assert all(entry.law is None for entry in shapes.parameters.values())
    for seed in range(40):
        torch.manual_seed(seed)
        ratio = 2 ** (1 + seed % 3)
        check_factors(factory(64 * ratio), shapes, ratio, TINY_INITIALIZERS[initializer])


def test_tiny_tensors_in_half_precision():
    def factory(width):
        return tiny_factory(1, torch_default)(width).bfloat16()

    shapes = base_shapes(factory, width=16)
    for seed in range(20):
        torch.manual_seed(seed)
        check_factors(factory(64), shapes, 4, (HALF, HALF))


def test_a_tiny_bias_follows_the_fan_in_of_its_own_layer():
    """Where layers grow by different ratios, the law names the side of the layer that it follows."""

    class Two(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, first), nn.Linear(first, second), nn.Linear(second, 1)

    shapes = base_shapes(lambda width: Two(width, width), width=8)
    assert shapes.parameters["c.bias"].law == Law(HALF, "c.weight", "r_in")
    for seed in range(20):
        torch.manual_seed(seed)
        model = Two(32, 16)
        before = model.c.bias.detach().clone()
        parametrize(model, shapes)
        assert torch.equal(model.c.bias, before * 2**0.5)


def test_laws_are_found_from_one_draw_at_each_width():
    shapes = base_shapes(Net, width=8)
    laws = {name: entry.law for name, entry in shapes.parameters.items()}
    assert laws == {
        "first.weight": Law(Fraction(0)),
        "first.bias": Law(Fraction(0)),
        "hidden.weight": Law(HALF, "hidden.weight", "r_in"),
        "hidden.bias": Law(HALF, "hidden.weight", "r_in"),
        "norm.weight": None,  # ones
        "norm.bias": None,  # zeros
        "head.weight": Law(HALF, "head.weight", "r_in"),
        "head.bias": Law(HALF, "head.weight", "r_in"),
    }
    assert BaseShapes.from_dict(shapes.to_dict()) == shapes


def test_laws_of_other_initializers():
    weights = {name: base_shapes(factory_with(INITIALIZERS[name]), width=BASE).parameters for name in INITIALIZERS}
    assert weights["fan-out"]["0.weight"].law == Law(HALF, "0.weight", "r_out")
    assert weights["fan-out"]["2.weight"].law == Law(Fraction(0))
    assert weights["truncated"]["1.weight"].law == weights["constant std"]["1.weight"].law == Law(Fraction(0))
    assert weights["orthogonal"]["1.weight"].law is None  # its values do not differ by one factor


def test_a_gain_around_one_has_a_law():
    shapes = base_shapes(
        lambda width: nn.ParameterDict({"gain": 1 + torch.randn(width) / width**0.5}), 64, roles={"gain": "vector"}
    )
    assert shapes.parameters["gain"].law == Law(HALF, "gain", "r_out")


def test_laws_of_factories_with_random_numbers_of_their_own():
    """A factory that seeds torch, one with its own generator, which is left alone, and one that draws from numpy."""
    generator = torch.Generator().manual_seed(3)

    def seeded(width):
        torch.manual_seed(0)
        return nn.Linear(width, 1)

    def generated(width):
        layer = nn.Linear(width, 1)
        nn.init.normal_(layer.bias, std=width**-0.5, generator=generator)
        return layer

    def from_numpy(width):
        layer = nn.Linear(width, 1)
        layer.bias.data = torch.tensor(np.random.randn(1) * width**-0.5)
        return layer

    assert base_shapes(seeded, width=8).parameters["bias"].law == Law(HALF, "weight", "r_in")
    assert base_shapes(generated, width=8).parameters["bias"].law == Law(HALF, "weight", "r_in")
    assert base_shapes(from_numpy, width=8).parameters["bias"].law is None


def test_initializers_that_draw_until_the_values_please():
    """Rejection sampling ends, and the tensors after it are still drawn from the same numbers at both widths."""

    def factory(width):
        first = nn.Linear(3, width)
        weight = torch.randn(width, 3)
        while bool((rejected := weight.abs() > 1).any()):
            weight[rejected] = torch.randn(int(rejected.sum()))
        first.weight.data = weight
        while True:
            weight, bias = torch.randn(1, width), torch.randn(1)
            if 0.5 < float(bias.abs()) < 0.6:  # two shapes in turn
                break
        return nn.Sequential(first, nn.Linear(width, 1))

    shapes = base_shapes(factory, width=8)
    assert shapes.parameters["1.bias"].law == Law(HALF, "1.weight", "r_in")


def test_base_shapes_of_another_version_or_with_a_damaged_law_are_refused():
    data = base_shapes(Net, width=8).to_dict()
    with pytest.raises(ParametrizationError, match=r"format version 1, this mukron reads version 3; .* make the file"):
        BaseShapes.from_dict({**data, "version": 1})
    data["parameters"]["head.bias"]["law"]["parameter"] = "tail.weight"
    with pytest.raises(ParametrizationError, match=r"damaged, .*there is no such law"):
        BaseShapes.from_dict(data)


@pytest.mark.parametrize("documented", [base_shapes, parametrize, BaseShapes], ids=lambda item: item.__name__)
def test_examples_of_docstrings_run(documented):
    tests = [test for test in doctest.DocTestFinder().find(documented, documented.__name__) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_a_spread_that_follows_no_law_is_corrected_as_measured():
    base = Spread(1.0, 10**6)
    assert correction(0.7, 10**6, base, Fraction(16), Fraction(0), []) == pytest.approx(1 / 0.7)
    assert correction(0.7, 10**6, base, Fraction(16), Fraction(1, 2), []) == pytest.approx(1 / (4 * 0.7))


def test_absolute_spreads():
    """Not by our own measure: torch's fan-in draw has std (3 fan-in)^-1/2, and muP's head another r^-1/2."""
    torch.manual_seed(0)
    model = Net(1024)
    parametrize(model, base_shapes(Net, width=64))
    spreads = {name: float(values.detach().square().mean().sqrt()) for name, values in model.named_parameters()}
    assert spreads["first.weight"] == pytest.approx((3 * INPUTS) ** -0.5, rel=0.03)
    assert spreads["hidden.weight"] == pytest.approx((3 * 1024) ** -0.5, rel=0.01)
    assert spreads["hidden.bias"] == pytest.approx((3 * 64) ** -0.5, rel=0.06)
    assert spreads["head.weight"] == pytest.approx((3 * 64) ** -0.5 / 16, rel=0.03)


@pytest.mark.parametrize(("base", "width"), [(16, 20), (16, 24), (16, 32), (64, 80)])
def test_gains_around_one_are_left_alone(base, width):
    """DCGAN's norm gains, N(1, 0.02), at ratios so close to 1 that no law could be told from noise."""

    def factory(size):
        model = nn.Sequential(nn.Linear(INPUTS, size), nn.BatchNorm1d(size), nn.Linear(size, 2))
        nn.init.normal_(model[1].weight, 1.0, 0.02)
        return model

    shapes = base_shapes(factory, width=base)
    for seed in range(40):
        torch.manual_seed(seed)
        model = factory(width)
        parametrize(model, shapes)
        assert float((model[1].weight.detach() - 1).abs().max()) < 0.15


def test_values_around_one_keep_their_center():
    """A gain drawn around 1 with a spread that shrinks with the width: its spread is corrected, its mean is not."""

    class Gain(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = nn.Parameter(1 + torch.randn(width) / width**0.5)

    shapes = base_shapes(Gain, width=64, roles={"gain": "vector"})
    torch.manual_seed(0)
    model = Gain(1024)
    parametrize(model, shapes)
    gain = model.gain.detach()
    assert float(gain.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(gain.std()) == pytest.approx(1 / 8, rel=0.1)


def test_a_parametrized_part_of_a_model_is_refused():
    class Whole(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.trunk, self.head = Net(width), nn.Linear(CLASSES, 3)

    model = Whole(16)
    parametrize(model.trunk, base_shapes(Net, width=8))
    with pytest.raises(ParametrizationError, match=r'part "trunk" of this model is already parametrized'):
        parametrize(model, base_shapes(Whole, width=8))


def test_values_that_are_not_finite():
    model = Net(16)
    with torch.no_grad():
        model.hidden.weight[0, 0] = float("nan")
    with pytest.raises(ParametrizationError, match=r'"hidden.weight": its values are not all finite'):
        parametrize(model, base_shapes(Net, width=8))
