"""Backward passes of our own through a model that ``fully_shard`` has spread.

A module's weights are gathered when a backward pass arrives at its output, and freed when it leaves at its input. Our
passes run inside the user's, which may have arrived at some modules already: those need their weights again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Modules that have gathered their weights have them afterwards, too."""
    gathered = [module for module in _spread_modules(model) if _is_gathered(module)]
    try:
        yield
    finally:
        for module in gathered:
            module.unshard()


def refuse_empty(model: nn.Module) -> None:
    """Refuse a batch without samples: other ranks gather weights in passes of which this one has none."""
    if _spread_modules(model):
        raise RuntimeError(
            "this process has no sample of the batch, and fully_shard has spread the model: the Fisher signals of the "
            'other processes need its part of the weights. Give each process a sample, or choose fisher="empirical"'
        )


def _spread_modules(model: nn.Module) -> list[Any]:
    kind: type | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _is_gathered(module: nn.Module) -> bool:
    """Whether its parameters, without those of spread modules inside, are whole tensors now."""
    inside = {id(p) for other in _spread_modules(module)[1:] for p in other.parameters()}
    return any(not hasattr(p, "placements") for p in module.parameters() if id(p) not in inside)
