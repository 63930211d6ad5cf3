"""Backward passes of our own where a batch or a model is spread over ranks, as by ``fully_shard``.

A module's weights are gathered when a backward pass arrives at its output, and freed when it leaves at its input. Our
passes run inside the user's, which may have arrived at some modules already: those need their weights again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from mukron.curvature.fisher import CaptureOptions, Exact, targets
from mukron.curvature.ranks import IN_A_FORWARD_PASS, Ranks


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Modules that have gathered their weights have them afterwards, too."""
    gathered = [module for module in _spread_modules(model) if _is_gathered(module)]
    try:
        yield
    finally:
        for module in gathered:
            module.unshard()


def draw_nothing(options: CaptureOptions, generator: Generator, ranks: Ranks, errors: Tensor) -> None:
    """Other ranks draw for their parts of a batch of which this rank has none; it keeps in step with them.

    Args:
        options: What is measured.
        generator: Draws.
        ranks: The processes that train the model.
        errors: The derivative by the output, without samples.
    """
    list(targets(errors.new_empty(0, 2), options.fisher, options.likelihood, -1, generator, ranks))


def check_parts(model: nn.Module, options: CaptureOptions, ranks: Ranks, f: Tensor) -> None:
    """Refuse, on all ranks, a batch whose parts take other passes of our own than each other: none waits for another.

    Each such pass gathers weights, which takes all ranks. A rank without a sample has none.

    Args:
        model: The model, after a forward pass.
        options: What is measured in it.
        ranks: The processes that train it; all of them must call this.
        f: The model's output.
    """
    again = torch._C._current_graph_task_id() != -1  # a backward pass that computes the model once more
    if again or not any(not _is_replicated(module) for module in _spread_modules(model)):
        return
    passes = f.shape[1:].numel() if options.jacobian or isinstance(options.fisher, Exact) else 0
    samples, counts = zip(*ranks.numbers(IN_A_FORWARD_PASS, len(f), passes), strict=True)
    empty = [str(rank) for rank, number in enumerate(samples) if not number]
    who = "Gauss-Newton" if options.jacobian else f'fisher="{options.fisher.name}"'
    why = f"{who} takes backward passes of its own, for which all ranks gather weights that fully_shard has spread"
    if empty:
        others = 'FOOF and KFAC(fisher="empirical")' if options.jacobian else 'fisher="empirical"'
        raise RuntimeError(
            f"rank{'s' * (len(empty) > 1)} {', '.join(empty)} of {ranks.size} got no sample of this batch. {why}, and "
            f"without a sample there are none. Give every rank a sample; {others} can do without"
        )
    if len({*counts}) > 1:
        raise RuntimeError(
            f"the model's output has {', '.join(map(str, counts))} numbers a sample on ranks 0 to {ranks.size - 1}. "
            f"{why}, one for each of these numbers: give all ranks sequences of one length"
        )


def _spread_modules(model: nn.Module) -> list[Any]:
    kind: type | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _is_replicated(module: Any) -> bool:
    """Whether every rank has all of its weights, with nothing to gather."""
    kind = getattr(sys.modules.get("torch.distributed._composable.replicate_with_fsdp"), "ReplicateModule", ())
    return isinstance(module, kind)


def _is_gathered(module: nn.Module) -> bool:
    """Whether its parameters, without those of spread modules inside, are whole tensors now."""
    inside = {id(p) for other in _spread_modules(module)[1:] for p in other.parameters()}
    return any(not hasattr(p, "placements") for p in module.parameters() if id(p) not in inside)
