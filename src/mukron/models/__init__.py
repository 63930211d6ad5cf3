"""The paper's networks as plain modules by width. Each takes its width first and has a usual base width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mukron.models.cbow import CBOW
from mukron.models.cnn import CNN
from mukron.models.mlp import MLP
from mukron.models.resnet import ResNet18
from mukron.models.vgg import VGG19


@dataclass(frozen=True)
class Model:
    """A network by width, and the width at which it is usually tuned."""

    factory: Callable[..., nn.Module]
    base_width: int


MODELS: dict[str, Model] = {
    "mlp": Model(MLP, base_width=64),
    "cnn": Model(CNN, base_width=16),
    "resnet18": Model(ResNet18, base_width=1),
    "vgg19": Model(VGG19, base_width=1),
    "cbow": Model(CBOW, base_width=64),
}


def get_model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


__all__ = ["CBOW", "CNN", "MLP", "MODELS", "VGG19", "Model", "ResNet18", "get_model"]
