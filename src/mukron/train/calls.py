"""Calls of a network for measurements: with the inputs of a batch, and without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def call(model: nn.Module, x: Any) -> Any:
    """Calls a model with the inputs of a batch.

    Args:
        model: The network.
        x: One input, a tuple or list of them, or a mapping by name.

    Returns:
        The network's output.

    Example:
        >>> call(nn.Flatten(0), {"input": torch.ones(1, 2)})
        tensor([1., 1.])
    """
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs a pass without side effects: no gradients, and buffers and random streams are restored afterwards.

    Args:
        model: The network; it stays in its training or evaluation mode.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with untouched(model):
        ...     _ = model(torch.ones(4, 2))
        >>> model.running_mean
        tensor([0., 0.])
    """
    restored = list(model.buffers())
    if any(getattr(module, "max_norm", None) is not None for module in model.modules()):
        restored += list(model.parameters())  # an embedding with max_norm renormalizes its weight in forward
    values = [(tensor, tensor.detach().clone()) for tensor in restored]
    with torch.no_grad(), torch.random.fork_rng(devices=gpu_indices(model)):
        torch.manual_seed(0)  # the same dropout each time
        try:
            yield
        finally:
            for tensor, before in values:
                tensor.copy_(before)


def gpu_indices(model: nn.Module) -> list[int]:
    """Returns the indices of the GPUs that hold parameters."""
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
