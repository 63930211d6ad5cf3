"""What the tests of methods for matrices share: a small network without biases, its batches, and comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def network(seed: int = 0, sizes: Sequence[int] = (32, 64, 64, 64, 10)) -> nn.Module:
    torch.manual_seed(seed)
    layers = [
        part for d_in, d_out in itertools.pairwise(sizes) for part in (nn.Linear(d_in, d_out, bias=False), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1])


def batch(seed: int, inputs: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(96, inputs, generator=generator), torch.randint(10, (96,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype = torch.float32) -> None:
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()


def outputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The outputs of the network's own linear layers, by name."""
    found = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: found.__setitem__(name, out.detach()))
        for name, module in model.named_children()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def flat(value: Any) -> list[Any]:
    """All that nested dictionaries and sequences hold."""
    if isinstance(value, dict):
        return [part for item in value.values() for part in flat(item)]
    return [part for item in value for part in flat(item)] if isinstance(value, (tuple, list)) else [value]
