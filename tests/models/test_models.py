"""The built-in networks are what they say: shapes in, shapes out, and sizes that grow with the width."""

from __future__ import annotations

import pytest
import torch

from mukron.models import CBOW, MLP, MODELS, get_model

INPUTS = {
    "mlp": lambda: torch.randn(2, 1, 28, 28),
    "cnn": lambda: torch.randn(2, 1, 28, 28),
    "resnet18": lambda: torch.randn(2, 3, 32, 32),
    "vgg19": lambda: torch.randn(2, 3, 32, 32),
    "cbow": lambda: torch.randint(2048, (2, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_forward(name):
    model = get_model(name).factory(get_model(name).base_width)
    output = model(INPUTS[name]())
    assert output.shape == (2, 2048 if name == "cbow" else 10)
    output.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_usual_sizes():
    """Width 4 is the usual network: ResNet-18 for small images has 11.2 million weights, VGG-19 20.0 million."""

    def millions(name: str) -> float:
        with torch.device("meta"):
            model = get_model(name).factory(4)
        return sum(parameter.numel() for parameter in model.parameters()) / 1e6

    assert millions("resnet18") == pytest.approx(11.17, abs=0.01)
    assert millions("vgg19") == pytest.approx(20.03, abs=0.01)


def test_mlp_activations_and_depth():
    x = torch.randn(3, 12)
    linear = MLP(4, inputs=12, classes=2, depth=4, activation="identity")
    product = x
    for weight in linear.parameters():
        product = product @ weight.T
    assert torch.allclose(linear(x), product, atol=1e-6)
    outputs = []
    for activation in ("relu", "tanh", "gelu"):
        torch.manual_seed(0)
        outputs.append(MLP(4, inputs=12, activation=activation)(x))
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_cbow_does_not_see_the_order_of_words():
    model, words = CBOW(4, vocabulary=20), torch.randint(20, (2, 8))
    assert torch.allclose(model(words), model(words.flip(1)), atol=1e-6)


def test_wrong_requests():
    with pytest.raises(ValueError, match="unknown activation 'rleu'; known: relu"):
        MLP(4, activation="rleu")
    with pytest.raises(ValueError, match="got depth 1"):
        MLP(4, depth=1)
    with pytest.raises(ValueError, match="unknown model 'mpl'; known: mlp"):
        get_model("mpl")
