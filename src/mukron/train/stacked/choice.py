"""Which runs can be stacked, and how many at once are best."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mukron.damping import MaxEigenvalue
from mukron.data import Dataset
from mukron.optim.spec import SPECS
from mukron.train.build import batch_of, device_of
from mukron.train.config import RunConfig
from mukron.train.evaluation import EVALUATED

# Measured on one core, 8 to 32 runs of 3 layers, by the multiplications N width^2 of a hidden layer's product: a stack
# is 5 to 6 times as quick as its runs one by one at 2^18, 2 to 3 times at 2^21, 1.2 to 2.3 times at 2^24, no quicker
# at 2^28. On a GPU idle time is what is won, up to where one run's products fill it.
GAINS = {"cpu": 2**25, "cuda": 2**30}
LARGEST_STACK = {"cpu": 32, "cuda": 64}  # on a CPU 64 at once were no quicker than 32
MEMORY = 2**30  # bytes, on a CPU


def stackable(config: RunConfig) -> str:
    """Say why runs like this cannot be trained as a stack.

    Args:
        config: The run.

    Returns:
        The reason; "" if they can be stacked.

    Example:
        >>> from mukron.train import RunConfig
        >>> stackable(RunConfig(model="resnet18"))
        "model='resnet18': a stack is of MLPs"
    """
    for name, plain in (("augment", ()), ("record", ()), ("compile", False), ("clip_norm", None)):
        if getattr(config, name) != plain:
            return f"{name}={getattr(config, name)!r}: a stack has none"
    if ":" in config.loss:
        return f"loss={config.loss!r}: a stack has the built-in ones"
    if config.model != "mlp":
        return f"model={config.model!r}: a stack is of MLPs"
    spec = config.spec
    if not spec.stacks:
        *known, last = (name for name, each in SPECS.items() if each.stacks)
        return f"method={config.method!r}: a stack knows {', '.join(known)} and {last}"
    if config.dtype == "bfloat16" or torch.device(config.device).type not in ("cpu", "cuda"):
        return (
            f"dtype={config.dtype!r}, device={config.device!r}: a stack computes in float32 or float64 on cpu or cuda"
        )
    if isinstance(config.damping, MaxEigenvalue):
        return "damping: largest eigenvalues are not taken of a stack"
    for name, value in config.method_options.items():
        option = spec.known_options[name]
        if option.parse(value) not in option.stacks:
            return f"method_options: {name}={value!r}: a stack has the usual one alone"
    return ""


def stackable_data(dataset: Dataset) -> bool:
    """Say whether runs on these data can be stacked: one class number a sample.

    Args:
        dataset: The data.

    Example:
        >>> from mukron.data import load
        >>> stackable_data(load("digits")), stackable_data(load("coriolanus"))
        (True, False)
    """
    return dataset.train.targets.ndim == 1 and not dataset.regression


def stack_size(config: RunConfig, dataset: Dataset, workers: int = 1) -> int:
    """Return how many runs like this are best trained at once.

    Args:
        config: The run.
        dataset: The data.
        workers: Processes that share this machine, each with a stack of its own.

    Returns:
        The number of runs; 1: they cannot be stacked, or would gain nothing.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(width=64, momentum=0.0, method="adamw")
        >>> stack_size(config.replace(record=("features",)), dataset_of(config))
        1
    """
    if stackable(config) or not stackable_data(dataset):
        return 1
    device = device_of(config)
    width, depth = int(config.width), int(config.model_options.get("depth", 3))
    batch = batch_of(config, dataset)
    if batch * width**2 > GAINS[device.type]:
        return 1
    sizes = [math.prod(dataset.input_shape), *[width] * (depth - 1), dataset.classes]
    weights = 4 * sum(d_in * d_out for d_in, d_out in pairwise(sizes))  # with momentum, gradient and step
    values = (6 * batch + 2 * min(EVALUATED, len(dataset.test))) * sum(sizes)
    factors = 8 * sum(min(batch, d) ** 2 for d in sizes) if config.spec.captures else 0
    memory = (weights + values + factors) * config.weights_dtype.itemsize
    free = MEMORY if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
    return max(1, min(LARGEST_STACK[device.type], free // workers // memory))
