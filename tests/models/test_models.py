"""The built-in networks are what they say: shapes in, shapes out, and sizes that grow with the width."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from mukron.models import CBOW, CNN, MLP, MODELS, ResNet18, get_model

INPUTS = {
    "mlp": lambda: torch.randn(2, 1, 28, 28),
    "cnn": lambda: torch.randn(2, 1, 28, 28),
    "myrtle5": lambda: torch.randn(2, 3, 32, 32),
    "resmlp": lambda: torch.randn(2, 1, 28, 28),
    "resnet18": lambda: torch.randn(2, 3, 32, 32),
    "resnet50": lambda: torch.randn(2, 3, 32, 32),
    "vgg19": lambda: torch.randn(2, 3, 32, 32),
    "cbow": lambda: torch.randint(2048, (2, 8)),
    "gpt": lambda: torch.randint(256, (2, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_forward(name):
    model = get_model(name).factory(get_model(name).base_width)
    output = model(INPUTS[name]())
    assert output.shape == {"cbow": (2, 2048), "gpt": (2, 64, 256)}.get(name, (2, 10))
    output.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_usual_sizes():
    """Width 4 is the usual network, whose size is known: for ResNet-50 on ImageNet 25.6 million weights."""

    def millions(name: str, **options: object) -> float:
        with torch.device("meta"):
            model = get_model(name).factory(4, **options)
        return sum(parameter.numel() for parameter in model.parameters()) / 1e6

    assert millions("resnet18") == pytest.approx(11.17, abs=0.01)
    assert millions("resnet18", stem="imagenet", classes=1000) == pytest.approx(11.69, abs=0.01)
    assert millions("resnet50", stem="imagenet", classes=1000) == pytest.approx(25.56, abs=0.01)
    assert millions("vgg19") == pytest.approx(20.03, abs=0.01)


def test_the_stem_of_large_images_halves_them_twice():
    small, large = (ResNet18(1, stem=stem) for stem in ("cifar", "imagenet"))
    x, sizes = torch.randn(1, 3, 64, 64), []
    for model in (small, large):
        model.blocks[0].register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[-1]))
        assert model(x).shape == (1, 10)
    assert sizes == [64, 16]


@pytest.mark.parametrize(
    ("name", "shape", "width", "parameters"),
    [
        # 9 x 3 x 32 + 3 (9 x 32 x 32) weights of convolutions, their biases, and the head
        ("myrtle5", (3, 32, 32), 32, 9 * 3 * 32 + 3 * 9 * 32 * 32 + 4 * 32 + 10 * 32 + 10),
        # 25 (1 x 16 + 16 x 32), biases, and the head over 32 channels of 7 x 7
        ("cnn", (1, 28, 28), 16, 25 * (16 + 16 * 32) + 48 + 10 * 32 * 49 + 10),
        ("mlp", (1, 8, 8), 32, 64 * 32 + 32 * 32 + 32 * 10),
        ("cbow", (8,), 16, 2 * 16 * 10),
    ],
)
def test_a_network_fits_itself_to_data(name, shape, width, parameters):
    entry = get_model(name)
    model = entry.factory(width, **entry.options(shape, 10))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    x = torch.randint(10, (2, *shape)) if name == "cbow" else torch.randn(2, *shape)
    assert model(x).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cnn", (8,), "takes images .* a sample here is \\[8\\]"),
        ("cnn", (1, 8, 12), "square images; here: 8 x 12"),
        ("vgg19", (1, 28, 28), "at least 32 x 32; here: 28 x 28"),
        ("cbow", (1, 8, 8), "numbers of neighbouring words"),
    ],
)
def test_data_that_a_network_cannot_take(name, shape, message):
    with pytest.raises(ValueError, match=message):
        get_model(name).options(shape, 10)


def test_mlp_activations_and_depth():
    x = torch.randn(3, 12)
    linear = MLP(4, inputs=12, classes=2, depth=4, activation="identity")
    product = x
    for weight in linear.parameters():
        product = product @ weight.T
    assert torch.allclose(linear(x), product, atol=1e-6)
    outputs = []
    for activation in ("relu", "tanh", "gelu", "erf"):
        torch.manual_seed(0)
        outputs.append(MLP(4, inputs=12, activation=activation)(x))
    assert all(not torch.allclose(one, other) for one, other in combinations(outputs, 2))


@pytest.mark.parametrize(("factory", "fan_ins"), [(MLP, [784, 64, 64]), (CNN, [25, 64 * 25, 128 * 49])])
def test_initial_weights_of_a_given_spread(factory, fan_ins):
    """Normal, with deviation sigma fan-in^-1/2 in every layer; biases zero; torch's own if nothing is said."""
    torch.manual_seed(0)
    parameters = [each.detach() for each in factory(64, sigma=1.5).parameters()]
    weights = [each for each in parameters if each.ndim > 1]
    for weight, fan_in in zip(weights, fan_ins, strict=True):
        noise = 4 / (2 * weight.numel()) ** 0.5
        assert float(weight.std()) * fan_in**0.5 == pytest.approx(1.5, rel=noise)
        assert float(weight.abs().max()) > 2 * float(weight.std())  # a uniform one ends at 1.73
    assert not any(each.any() for each in parameters if each.ndim == 1)
    own = next(factory(64).parameters()).detach()
    assert float(own.abs().max()) <= fan_ins[0] ** -0.5
    with pytest.raises(ValueError, match="sigma: a deviation, more than 0; got -1"):
        factory(64, sigma=-1.0)


def test_cbow_does_not_see_the_order_of_words():
    model, words = CBOW(4, vocabulary=20), torch.randint(20, (2, 8))
    assert torch.allclose(model(words), model(words.flip(1)), atol=1e-6)


def test_cbow_multiplies_its_initial_weights():
    torch.manual_seed(0)
    plain = CBOW(8, vocabulary=5)
    torch.manual_seed(0)
    scaled = CBOW(8, vocabulary=5, embedding=0.1, output=4.0)
    assert torch.equal(scaled.embedding.weight, 0.1 * plain.embedding.weight)
    assert torch.equal(scaled.head.weight, 4.0 * plain.head.weight)


def test_resnet_multiplies_its_last_layers_initial_weights():
    torch.manual_seed(0)
    plain = ResNet18(1)
    torch.manual_seed(0)
    assert torch.equal(ResNet18(1, output=1 / 16).head.weight, plain.head.weight / 16)


def test_wrong_requests():
    with pytest.raises(ValueError, match="unknown activation 'rleu'; known: relu"):
        MLP(4, activation="rleu")
    with pytest.raises(ValueError, match="got depth 1"):
        MLP(4, depth=1)
    with pytest.raises(ValueError, match="unknown stem 'small'; known: cifar, imagenet"):
        ResNet18(1, stem="small")
    with pytest.raises(ValueError, match=r"unknown model 'mpl' \(did you mean 'mlp'\?\); known: mlp"):
        get_model("mpl")
