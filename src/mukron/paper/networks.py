"""The networks that several figures of the paper have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mukron.paper.recipe import Scale
from mukron.paper.settings import BATCH_128, FULL_BATCH, NORMAL, PAPER_SAMPLES, WEIGHTS, powers, setting
from mukron.train import RunConfig


@dataclass(frozen=True)
class Network:
    """A row of a figure: what is trained, and at which widths."""

    name: str
    fields: Mapping[str, Any]
    widths: tuple[float, ...]
    small: tuple[float, ...]  # on two cores
    smoke: tuple[float, ...]

    def config(self, scale: Scale, **fields: Any) -> RunConfig:
        """A run of the network, with some fields changed."""
        epochs = self.fields["epochs"]
        common = {"samples": PAPER_SAMPLES, "loss": "mse", "momentum": 0.9, "evaluate_every": max(1, epochs // 2)}
        config = setting(scale, **{**common, **self.fields, **fields})
        if scale is Scale.SMALL and self.fields["model"] != "mlp":
            config = config.replace(samples=256, test_samples=1000, epochs=5, evaluate_every=5)
        return config

    def of(self, scale: Scale) -> tuple[float, ...]:
        """The widths at a scale."""
        return scale.choose(self.smoke, self.small, self.widths)

    @property
    def choices(self) -> tuple[str, ...]:
        """What the paper leaves open about the network, and what is taken here."""
        batch = BATCH_128 if "batch" in self.fields else FULL_BATCH
        return (batch, *((WEIGHTS,) if self.fields.get("model_options") == NORMAL else ()))


MLP_NETWORK = Network(
    "MLP",
    {"model": "mlp", "data": "mnist", "epochs": 20, "model_options": NORMAL},
    *(powers(9, 14), powers(6, 9), (64, 128)),
)
CNN_NETWORK = Network(
    "CNN",
    {"model": "cnn", "data": "fashion-mnist", "epochs": 50, "dtype": "tf32", "model_options": NORMAL},
    (16, 32, 64),
    (16, 32),
    (16, 32),
)
MYRTLE_NETWORK = Network(
    "Myrtle-5",
    {"model": "myrtle5", "data": "fashion-mnist", "epochs": 20, "batch": 128, "dtype": "tf32"},
    *((16, 32, 64), (16, 32), (16, 32)),
)
RESNET_NETWORK = Network(
    "ResNet-18",
    {"model": "resnet18", "data": "fashion-mnist", "epochs": 20, "batch": 128, "dtype": "tf32"},
    *((1, 2, 4), (1, 2), (1, 2)),
)
