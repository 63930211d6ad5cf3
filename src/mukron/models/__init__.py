"""The paper's networks as plain modules by width. Each takes its width first and has a usual base width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import nn

from mukron.models.cbow import CBOW
from mukron.models.cnn import CNN
from mukron.models.mlp import MLP
from mukron.models.myrtle import Myrtle5
from mukron.models.resnet import ResNet18, ResNet50
from mukron.models.vgg import VGG19

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A network by width, the widths at which it is usually tuned and looked at, and how it is fitted to a data set."""

    factory: Callable[..., nn.Module]
    base_width: int
    widths: tuple[int, ...]  # to check a law on: wide enough for it, narrow enough for two cores
    options: Callable[[Shape, int], dict[str, int]]  # keyword arguments, from one sample's shape and the classes


def _flat(shape: Shape, classes: int) -> dict[str, int]:
    return {"inputs": prod(shape), "classes": classes}


def _image(smallest: int, sized: bool = False) -> Callable[[Shape, int], dict[str, int]]:
    """For images [channels, height, width] of at least that size; a ``sized`` network wants to know it."""

    def options(shape: Shape, classes: int) -> dict[str, int]:
        if len(shape) != 3:
            raise ValueError(f"this network takes images [channels, height, width]; a sample here is {list(shape)}")
        channels, height, width = shape
        if min(height, width) < smallest:
            raise ValueError(f"this network pools images of at least {smallest} x {smallest}; here: {height} x {width}")
        if sized and height != width:
            raise ValueError(f"this network takes square images; here: {height} x {width}")
        return {"channels": channels, "classes": classes, **({"size": height} if sized else {})}

    return options


def _words(shape: Shape, classes: int) -> dict[str, int]:
    if len(shape) != 1:
        raise ValueError(f"this network takes the numbers of neighbouring words; a sample here is {list(shape)}")
    return {"vocabulary": classes}


MODELS: dict[str, Model] = {
    "mlp": Model(MLP, 64, (256, 512, 1024, 2048), _flat),
    "cnn": Model(CNN, 16, (64, 128, 256, 512), _image(4, sized=True)),
    "myrtle5": Model(Myrtle5, 16, (64, 128, 256, 512), _image(4)),
    "resnet18": Model(ResNet18, 1, (2, 4, 8), _image(1)),
    "resnet50": Model(ResNet50, 1, (2, 4, 8), _image(1)),
    "vgg19": Model(VGG19, 1, (2, 4, 8), _image(32)),
    "cbow": Model(CBOW, 64, (256, 512, 1024, 2048), _words),
}


def get_model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


__all__ = ["CBOW", "CNN", "MLP", "MODELS", "VGG19", "Model", "Myrtle5", "ResNet18", "ResNet50", "get_model"]
