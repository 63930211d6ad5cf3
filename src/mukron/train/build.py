"""From a config to the things it describes: network, plan, optimizer, loss. Plain functions, each usable alone."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.arguments import check_type, check_whole
from mukron.data import Dataset, as_dataset, load
from mukron.data.dataset import checked
from mukron.imports import import_function
from mukron.layers import MatrixLayer, layer_of
from mukron.optim import SecondOrder
from mukron.optim.plan import DOES_NOT_FOLLOW
from mukron.params import BaseShapes, Parametrization, base_shapes, parametrize
from mukron.params.building import Factory
from mukron.params.building import build as build_at
from mukron.params.excluded import covers
from mukron.params.inventory import clean_name
from mukron.train.calls import untouched
from mukron.train.config import USUAL_DATA, RunConfig
from mukron.train.errors import RunError
from mukron.train.factories import base_width_of, factory_of, network_options
from mukron.train.losses import Loss, loss_of
from mukron.train.outputs import check_output, class_dim, given_class_dim, output_of
from mukron.train.processes import local_device
from mukron.train.surroundings import compiled_anew

USUAL_WINDOWS = 32  # of a text in a batch
_shapes: dict[tuple[Any, ...], BaseShapes] = {}  # of built-in networks: sizes and spreads, no weights
NO_MEMORY = re.compile("memory|alloc|overflow", re.IGNORECASE)  # what torch says then, in one of many errors


def check_request(config: RunConfig, dataset: Dataset | None, checkpoint_every: int) -> None:
    """Refuse wrong arguments of ``train``, and functions that a file alone names."""
    check_type("config", config, RunConfig)
    check_type("dataset", dataset, (Dataset, type(None)), "a Dataset")
    config.trusted(False)
    check_whole("checkpoint_every", checkpoint_every)
    if checkpoint_every < 1:
        raise RunError(f"checkpoint_every counts epochs: at least 1, got {checkpoint_every}")


@dataclass(frozen=True)
class Built:
    """A network ready for its first step.

    Attributes:
        config: The run.
        model: The network.
        network: What runs in training: the model, compiled if the config says so.
        plan: The network's parametrization.
        optimizer: The optimizer, with the plan's learning rates and damping.
        loss: The mean loss of outputs and labels.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(width=64, method="sgd")
        >>> data = dataset_of(config)
        >>> build(config, data).outputs(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """

    config: RunConfig
    model: nn.Module
    network: Callable[[Tensor], Any]
    plan: Parametrization
    optimizer: Optimizer
    loss: Loss

    def outputs(self, inputs: Tensor) -> Tensor:
        """Compute the network's output in its present mode, under autocast if the config says so.

        Args:
            inputs: A batch of inputs.
        """
        network = self.network if self.model.training else self.model
        with autocast(self.config):
            output: Tensor = output_of(self.config, network(inputs))
        return output

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What is run inside changes nothing in the network, and the optimizer does not measure it."""
        deaf = self.optimizer.paused() if isinstance(self.optimizer, SecondOrder) else nullcontext()
        with untouched(self.model), torch.enable_grad(), deaf:
            yield

    def try_out(self, inputs: Tensor, dataset: Dataset) -> None:
        """Run the network once on samples, so that a network that does not fit the data is refused at once.

        Args:
            inputs: A few samples.
            dataset: The data.

        Raises:
            RunError: The network does not take these samples, or its outputs cannot be trained.
        """
        with self.untouched():
            check_output(_tried(self.config, self.model, inputs), self.config, dataset)


@torch.no_grad()
def _tried(config: RunConfig, model: nn.Module, inputs: Tensor) -> Any:
    """The network's output for some samples."""
    try:
        with autocast(config):
            returned = model(inputs)
    except Exception as error:
        raise RunError(
            f"model={config.model!r} could not take samples {list(inputs.shape)} of {config.data}: "
            f"{' '.join(str(error).split())}.{_hint(config, inputs)} Give data that fits it (your own are a function "
            "module:function), or other model_options"
        ) from error
    return output_of(config, returned)


def _hint(config: RunConfig, inputs: Tensor) -> str:
    """What often is the cause: tokens that a network does not have, or data that nobody asked for."""
    if not inputs.is_floating_point() and inputs.numel():
        return f" These are token numbers up to {int(inputs.max())}; a text file has one of 256 for every byte."
    usual = config.data == USUAL_DATA and ":" in config.model
    return f" These are {USUAL_DATA}, which are taken where no data are named." if usual else ""


def build(config: RunConfig, dataset: Dataset) -> Built:
    """Build everything that a run needs, with all random numbers from the config's seed.

    Reseeds the global generators.

    Args:
        config: The run.
        dataset: The data.

    Returns:
        The network, its optimizer and its loss.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(width=64, method="sgd")
        >>> type(build(config, dataset_of(config)).optimizer).__name__
        'SGD'
    """
    model, plan = network_of(config, dataset)
    optimizer = optimizer_of(config, model, plan, dataset)
    network = compiled_anew(model) if config.compile else model
    return Built(config, model, network, plan, optimizer, loss_of(config, dataset))


def network_of(config: RunConfig, dataset: Dataset) -> tuple[nn.Module, Parametrization]:
    """The network with its initial weights, and its plan. Reseeds the global generators."""
    device = device_of(config)
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)
    random.seed(config.seed)
    factory = factory_of(config, dataset)
    with _memory_for(config), torch.device("cpu"):  # a seed draws the same weights for every device
        model = build_at(factory, config.width)
    shapes = _shapes_of(config, dataset, factory)
    plan = parametrize(model, shapes, **config.plan_options)
    with _memory_for(config):
        model = model.to(device, config.weights_dtype)
    return model, plan


def _shapes_of(config: RunConfig, dataset: Dataset, factory: Factory) -> BaseShapes:
    """The base shapes of the run's network; those of built-in networks are kept, since many runs have the same."""
    options, roles = (repr(sorted(values.items())) for values in (network_options(config, dataset), config.roles))
    key = (config.model, options, roles, base_width_of(config), config.base_depth)
    if ":" in config.model or key not in _shapes:
        _shapes[key] = base_shapes(factory, base_width_of(config), roles=dict(config.roles), depth=config.base_depth)
    return _shapes[key]


def dataset_of(config: RunConfig, dataset: Dataset | None = None, folder: str | Path | None = None) -> Dataset:
    """Load a run's samples onto its device.

    Args:
        config: The run.
        dataset: The whole data set, if it is loaded already.
        folder: Where data sets are kept; None: the usual folder.

    Returns:
        The data set with the config's samples.

    Example:
        >>> from mukron.train import RunConfig
        >>> len(dataset_of(RunConfig(samples=100)).train)
        100
    """
    device = device_of(config)
    samples, test_samples = config.samples, config.test_samples
    if dataset is None and ":" in config.data:
        dataset = as_dataset(config.data, _own_data(config))
    if dataset is None:  # some data sets are too large to be loaded whole: they draw the samples themselves
        dataset = load(config.data, folder, samples=samples, test_samples=test_samples, **config.data_options)
    elif dataset.name != config.data:
        raise RunError(f"the config's data is {config.data!r}, but the data set given is {dataset.name!r}")
    else:
        dataset = dataset.subset(samples, test_samples)
    return checked(dataset).to(device)


def _own_data(config: RunConfig) -> Any:
    function = import_function(config.data, "data")
    try:
        inspect.signature(function).bind(**config.data_options)
    except TypeError as error:
        raise RunError(f"data={config.data!r}, data_options={dict(config.data_options)}: {error}") from error
    return function(**config.data_options)


def device_of(config: RunConfig) -> torch.device:
    """Return a run's device, after a check that torch can use it.

    Args:
        config: The run.

    Returns:
        The device.

    Raises:
        RunError: torch cannot use the device here.

    Example:
        >>> from mukron.train import RunConfig
        >>> device_of(RunConfig())
        device(type='cpu')
    """
    device = local_device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device={config.device!r}: torch finds {torch.cuda.device_count()} GPUs here; choose cpu")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each device has its own
        said = str(error).partition("\n")[0]
        raise RunError(f"device={config.device!r}: torch cannot use it here ({said}); choose cpu or cuda") from error
    return device


@contextmanager
def _memory_for(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        said = str(error).partition("\n")[0]
        if not NO_MEMORY.search(said):
            raise
        raise RunError(f"width={config.width:g}: there is no memory for so wide a {config.model!r} ({said})") from error


def optimizer_of(
    config: RunConfig, model: nn.Module, plan: Parametrization, dataset: Dataset | None = None
) -> Optimizer:
    """Build a run's optimizer with the plan's learning rates and damping.

    Args:
        config: The run.
        model: The network.
        plan: Its parametrization.
        dataset: The data; None: those of a classification without positions.

    Returns:
        The optimizer.

    Example:
        >>> import mukron
        >>> from mukron.models import MLP
        >>> from mukron.train import RunConfig
        >>> model = MLP(64)
        >>> plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=16))
        >>> type(optimizer_of(RunConfig(method="foof"), model, plan)).__name__
        'FOOF'
    """
    spec = config.spec
    keywords = {**spec.keywords(config), **_of_the_output(config, model, dataset)}
    make: Callable[..., Optimizer] = spec.optimizer
    if not spec.layerwise:
        of_groups = {"weight_decay": config.weight_decay, "eps": keywords.pop("eps", None)}
        return make(plan.param_groups(config.method, config.lr, model=model, **of_groups), **keywords)
    _check_exclude(keywords.get("exclude", ()), model)
    keywords |= {} if config.damping is None else {"damping": config.damping}
    with warnings.catch_warnings():  # a run names its rule, often to compare rules; check, plan and transfer tell
        warnings.filterwarnings("ignore", f".* {DOES_NOT_FOLLOW}", UserWarning)
        return make(model, plan, config.lr, weight_decay=config.weight_decay, **keywords)


def _of_the_output(config: RunConfig, model: nn.Module, dataset: Dataset | None) -> dict[str, Any]:
    """The arguments of an optimizer that follow from the network's output and the targets."""
    found: dict[str, Any] = {} if given_class_dim(config) is None else {"class_dim": given_class_dim(config)}
    if config.output is not None:
        found["output"] = partial(output_of, config)
    if dataset is not None and dataset.train.targets.ndim > 1 and not dataset.regression:
        found["class_dim"] = class_dim_of(config, model, dataset)
    if dataset is not None and dataset.regression and ":" in config.loss:
        found["likelihood"] = config.method_options.get("likelihood", "gaussian")
    if dataset is not None and config.loss == "mse" and dataset.train.targets.ndim > (2 if dataset.regression else 1):
        found["reduction"] = "positions"  # squared errors do not show how they are reduced
    return {name: value for name, value in found.items() if name in config.spec.defaults}


def class_dim_of(config: RunConfig, model: nn.Module, dataset: Dataset) -> int | None:
    """Return the dimension of a network's output that holds the classes, of targets with positions.

    Args:
        config: The run.
        model: The network; it is run on two samples if its output alone shows the dimension.
        dataset: The data.

    Returns:
        The dimension; None if the shapes of output and targets do not show it.
    """
    if given_class_dim(config) is not None or ":" not in config.loss:
        return class_dim(config, dataset, ())
    inputs = dataset.prepare(dataset.train.inputs[:2], config.weights_dtype)
    with untouched(model):
        output = _tried(config, model, inputs)
    return class_dim(config, dataset, output.shape) if isinstance(output, Tensor) else None


def batch_of(config: RunConfig, dataset: Dataset) -> int:
    """Return the number of samples in a batch of a run.

    Args:
        config: The run.
        dataset: The data.

    Returns:
        The config's batch; if it has none, 32 windows of a text, and all samples of other data.

    Example:
        >>> from mukron.train import RunConfig
        >>> config = RunConfig(samples=100)
        >>> batch_of(config, dataset_of(config))
        100
    """
    samples = len(dataset.train)
    return min(config.batch or (USUAL_WINDOWS if dataset.tokens else samples), samples)


def warn_of_cut_batch(config: RunConfig, dataset: Dataset) -> None:
    """Warn of a batch that is larger than the data: the learning rate was perhaps chosen for the larger one.

    Args:
        config: The run.
        dataset: The data.
    """
    batch = batch_of(config, dataset)
    if config.batch is not None and batch < config.batch:
        unit = "windows" if dataset.tokens else "samples"
        warnings.warn(
            f"batch={config.batch}: {config.data} has {batch} {unit} to train on, so each step takes these {batch}, "
            "and an epoch is one step",
            UserWarning,
            stacklevel=2,
        )


def _check_exclude(exclude: tuple[str, ...], model: nn.Module) -> None:
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for name in exclude:
        if not any(covers(name, module) for module in modules):
            layers = ", ".join(layer for layer, module in modules.items() if isinstance(layer_of(module), MatrixLayer))
            raise RunError(f"method_options: exclude={name!r} is no layer of this network; its layers: {layers}")


def autocast(config: RunConfig) -> AbstractContextManager[Any]:
    """bfloat16 where the config says so."""
    if config.dtype != "bfloat16":
        return nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16)
