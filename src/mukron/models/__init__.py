"""The paper's networks, a residual MLP and a GPT as plain modules. The first argument of each is its width.

>>> from mukron.models import MLP
>>> MLP(64, inputs=784, classes=10).fc2
Linear(in_features=64, out_features=64, bias=False)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from mukron.layers import Shape
from mukron.models.cbow import CBOW
from mukron.models.cnn import CNN
from mukron.models.gpt import GPT
from mukron.models.mlp import MLP
from mukron.models.myrtle import Myrtle5
from mukron.models.residual_mlp import ResidualMLP
from mukron.models.resnet import ResNet18, ResNet50
from mukron.models.vgg import VGG19
from mukron.readers import nearest

NEIGHBOURS = 8  # of a word in the usual data: 4 on each side


@dataclass(frozen=True)
class Model:
    """A built-in network: how to build it, and the widths at which it is usually tuned and checked.

    Attributes:
        factory: The class of the network. Its first argument is the width.
        base_width: The usual base width.
        widths: The usual widths of a coordinate check: wide enough for the laws to hold, narrow enough for a CPU.
        options: The keyword arguments of the factory that suit a data set, from the shape of one sample and the number
            of classes. It raises a ``ValueError`` if the network cannot take such samples.
        data: The data set that it is trained on if none is named.
        batch: The usual batch size of a study.
        sample: Of a network of tokens, the shape of the samples that it usually takes, from the network itself.

    Example:
        >>> from mukron.models import get_model
        >>> model = get_model("mlp")
        >>> model.options((1, 8, 8), 10)
        {'inputs': 64, 'classes': 10}
        >>> model.factory(128, **model.options((1, 8, 8), 10)).fc1
        Linear(in_features=64, out_features=128, bias=False)
    """

    factory: Callable[..., nn.Module]
    base_width: int
    widths: tuple[int, ...]
    options: Callable[[Shape, int], dict[str, int]]
    data: str = "digits"
    batch: int = 128
    sample: Callable[[Any], Shape] | None = None


def _flat_options(shape: Shape, classes: int) -> dict[str, int]:
    return {"inputs": prod(shape), "classes": classes}


def _image_options(smallest: int, takes_size: bool = False) -> Callable[[Shape, int], dict[str, int]]:
    """Return the options of a network for images of at least this size; some networks take the size as an argument."""

    def options(shape: Shape, classes: int) -> dict[str, int]:
        if len(shape) != 3:
            raise ValueError(f"this network takes images [channels, height, width]; a sample here is {list(shape)}")
        channels, height, width = shape
        if min(height, width) < smallest:
            raise ValueError(f"this network pools images of at least {smallest} x {smallest}; here: {height} x {width}")
        if takes_size and height != width:
            raise ValueError(f"this network takes square images; here: {height} x {width}")
        return {"channels": channels, "classes": classes, **({"size": height} if takes_size else {})}

    return options


def _word_options(shape: Shape, classes: int) -> dict[str, int]:
    if len(shape) != 1:
        raise ValueError(f"this network takes the numbers of neighbouring words; a sample here is {list(shape)}")
    return {"vocabulary": classes}


def _token_options(shape: Shape, classes: int) -> dict[str, int]:
    if len(shape) != 1:
        raise ValueError(f"this network takes the numbers of tokens [positions]; a sample here is {list(shape)}")
    return {"vocabulary": classes, "context": shape[0]}


def _usual_words(network: CBOW) -> Shape:
    return (NEIGHBOURS,)


def _usual_tokens(network: GPT) -> Shape:
    return (network.context,)  # a run builds the network with the length of its windows as the context


MODELS: dict[str, Model] = {
    "mlp": Model(MLP, 64, (256, 512, 1024, 2048), _flat_options),
    "cnn": Model(CNN, 16, (64, 128, 256, 512), _image_options(4, takes_size=True)),
    "myrtle5": Model(Myrtle5, 16, (64, 128, 256, 512), _image_options(4)),
    "resmlp": Model(ResidualMLP, 64, (256, 512, 1024, 2048), _flat_options),
    "resnet18": Model(ResNet18, 1, (2, 4, 8), _image_options(1)),
    "resnet50": Model(ResNet50, 1, (2, 4, 8), _image_options(1)),
    "vgg19": Model(VGG19, 1, (2, 4, 8), _image_options(32)),
    "cbow": Model(CBOW, 64, (256, 512, 1024, 2048), _word_options, data="wikitext2", sample=_usual_words),
    "gpt": Model(GPT, 32, (128, 256, 512, 1024), _token_options, data="coriolanus", batch=32, sample=_usual_tokens),
}


def get_model(name: str) -> Model:
    """Return the built-in network of a name.

    Args:
        name: A key of ``MODELS``, such as ``"mlp"`` or ``"resnet18"``.

    Returns:
        The network's entry.

    Raises:
        ValueError: There is no network of this name.

    Example:
        >>> from mukron.models import get_model
        >>> get_model("cnn").base_width
        16
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}{nearest(name, MODELS)}; known: {', '.join(MODELS)}")
    return MODELS[name]


__all__ = [
    "CBOW",
    "CNN",
    "GPT",
    "MLP",
    "MODELS",
    "VGG19",
    "Model",
    "Myrtle5",
    "ResNet18",
    "ResNet50",
    "ResidualMLP",
    "get_model",
]
