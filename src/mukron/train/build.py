"""From a config to the things it describes: network, plan, optimizer, loss. Plain functions, each usable alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mukron.curvature import parse_memory
from mukron.data import Dataset, as_dataset, centred_one_hot, load
from mukron.imports import import_function
from mukron.models import get_model
from mukron.optim import FOOF, KFAC, GaussNewton, Shampoo
from mukron.optim.base import SecondOrder
from mukron.params import Parametrization, base_shapes, parametrize
from mukron.params.shapes import Factory
from mukron.params.shapes import build as build_at
from mukron.train.config import RunConfig
from mukron.train.errors import RunError

Loss = Callable[[Tensor, Tensor], Tensor]
SECOND_ORDER: dict[str, type[SecondOrder]] = {
    "kfac": KFAC,
    "foof": FOOF,
    "shampoo": Shampoo,
    "gauss-newton": GaussNewton,
}


@dataclass(frozen=True)
class Built:
    """A network ready for its first step."""

    config: RunConfig
    model: nn.Module
    network: Callable[[Tensor], Tensor]  # what runs in training: the model, compiled if the config says so
    plan: Parametrization
    optimizer: Optimizer
    loss: Loss

    def outputs(self, inputs: Tensor) -> Tensor:
        """The network's outputs in its present mode, under autocast if the config says so."""
        network = self.network if self.model.training else self.model
        with autocast(self.config):
            return network(inputs)


def build(config: RunConfig, dataset: Dataset) -> Built:
    """Everything that a run needs, with all random numbers from the config's seed. Reseeds the global generators."""
    device = device_of(config)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)
    random.seed(config.seed)
    factory = factory_of(config, dataset)
    with torch.device("cpu"):  # a seed draws the same weights for every device
        model = build_at(factory, config.width)
    shapes = base_shapes(factory, base_width_of(config), roles=dict(config.roles))
    plan = parametrize(model, shapes, config.scheme, output_exponent=config.output_exponent)
    model = model.to(device, config.weights_dtype)
    optimizer = optimizer_of(config, model, plan)
    network = _compiled(model) if config.compile else model
    return Built(config, model, network, plan, optimizer, loss_of(config, dataset.classes))


def dataset_of(config: RunConfig, dataset: Dataset | None = None, folder: str | Path | None = None) -> Dataset:
    """The config's samples, on its device. ``dataset`` is the whole data set, if it is loaded already."""
    device = device_of(config)
    samples, test_samples = config.samples, config.test_samples
    if dataset is None and ":" in config.data:
        dataset = as_dataset(config.data, import_function(config.data, "data")(**config.data_options))
    if dataset is None:  # some data sets are too large to be loaded whole: they draw the samples themselves
        dataset = load(config.data, folder, samples=samples, test_samples=test_samples, **config.data_options)
    elif dataset.name != config.data:
        raise RunError(f"the config's data is {config.data!r}, but the data set given is {dataset.name!r}")
    else:
        dataset = dataset.subset(samples, test_samples)
    if not len(dataset.train):
        raise RunError(f"data={config.data!r}: there are no samples to train on")
    return dataset.to(device)


def device_of(config: RunConfig) -> torch.device:
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device={config.device!r}: torch finds {torch.cuda.device_count()} GPUs here; choose cpu")
    return device


def factory_of(config: RunConfig, dataset: Dataset) -> Factory:
    """The network by its width alone."""
    if ":" in config.model:
        make, options = import_function(config.model, "model"), dict(config.model_options)
    else:
        entry = get_model(config.model)
        try:
            fitted = entry.options(dataset.input_shape, dataset.classes)
        except ValueError as error:
            raise RunError(f"model={config.model!r}, data={config.data!r}: {error}") from error
        make, options = entry.factory, {**fitted, **config.model_options}
    if not options:
        return make

    def factory(width: float) -> nn.Module:
        try:
            model: nn.Module = make(width, **options)
            return model
        except TypeError as error:
            raise RunError(f"model={config.model!r}, model_options={dict(config.model_options)}: {error}") from error

    return factory


def base_width_of(config: RunConfig) -> float:
    return config.base_width if config.base_width is not None else get_model(config.model).base_width


def loss_of(config: RunConfig, classes: int) -> Loss:
    """From outputs [samples, classes] and labels [samples] to the mean loss."""
    smoothing = config.label_smoothing

    def checked(output: Tensor) -> Tensor:
        if output.ndim != 2 or output.shape[1] != classes:
            raise RunError(
                f"the network's output has shape {list(output.shape)}; {config.data} wants [samples, {classes}]"
            )
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output

    def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(checked(output), labels, label_smoothing=smoothing)

    def half_squares(output: Tensor, labels: Tensor) -> Tensor:
        output = checked(output)
        targets = (1 - smoothing) * centred_one_hot(labels, classes, output.dtype)
        loss: Tensor = (output - targets).square().sum(1).mean() / 2
        return loss

    return half_squares if config.loss == "mse" else cross_entropy


def optimizer_of(config: RunConfig, model: nn.Module, plan: Parametrization) -> Optimizer:
    """The config's method with the plan's learning rates and damping."""
    options = dict(config.method_options)
    if config.method in ("sgd", "adamw"):
        groups = plan.param_groups(config.method, config.lr, weight_decay=config.weight_decay, model=model)
        if config.method == "sgd":
            return torch.optim.SGD(groups, momentum=config.momentum, **options)
        return torch.optim.AdamW(groups, betas=(config.momentum, options.pop("beta2", 0.999)), **options)
    options.update(momentum=config.momentum, weight_decay=config.weight_decay, kl_clip=config.kl_clip)
    if config.damping is not None:
        options["damping"] = config.damping
    if "memory" in options:
        options["memory"] = parse_memory(options["memory"])
    if config.method == "kfac":
        options["likelihood"] = "gaussian" if config.loss == "mse" else "categorical"
        options["seed"] = config.seed
    if config.family == "shampoo":
        _, _, e = config.method.partition(":")
        options["e"] = Fraction(e or "1/2")
    return SECOND_ORDER[config.family](model, plan, config.lr, **options)


def autocast(config: RunConfig) -> AbstractContextManager[Any]:
    """bfloat16 where the config says so."""
    if config.dtype != "bfloat16":
        return nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16)


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Anew for every run: torch would reuse what it compiled for another one of this class, without its hooks."""
    reset: Callable[[], None] = torch.compiler.reset
    reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False)

    def network(inputs: Tensor) -> Tensor:
        try:
            return compiled(inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise RunError(
                f"compile=True: torch could not compile the network ({str(error).splitlines()[0]}); it needs a C++ "
                "compiler, and Triton on a GPU. Install what is missing, or train with compile=False"
            ) from error

    return network
