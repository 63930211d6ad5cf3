"""Training in several processes: what a step there would be, and refusals of what would go wrong in silence.

A step must be that of the joined batch. Shampoo, SOAP and Muon need gradients alone, which DistributedDataParallel
averages. K-FAC, FOOF and Gauss-Newton measure curvature, each process on its own batch, and exchange what they measured
(``curvature.ranks``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mukron.curvature import Ranks
from mukron.optim.exchange import Owned, Owners
from mukron.params.sharded import refuse_dtensors

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

COMPARED_EVERY = 100  # steps between comparisons
PIECE = 1 << 22  # entries that a digest is made of at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes that train this model; None: there is one.

    Args:
        model: The model, as the optimizer got it.
    """
    if _processes(model) == 1:
        return None
    return Ranks(_group(model), next(model.parameters()).device)


def exchange_of(optimizer: SecondOrder) -> Owners | None:
    """How the optimizer's step talks to other processes; None: there are none.

    Args:
        optimizer: The optimizer, before a step.
    """
    before, ranks = optimizer.exchange, ranks_of(optimizer.model)
    if ranks is None and optimizer.owned is None:
        return None
    if (
        isinstance(before, Owners)
        and ranks is not None
        and before.ranks.group is ranks.group
        and before.owner.keys() == optimizer.layers.keys()
    ):
        return before
    owned = optimizer.owned
    if owned is not None and (ranks is None or (owned.ranks, owned.rank) != (ranks.size, ranks.rank)):
        raise RuntimeError(
            f"the state of this optimizer's layers is spread over {owned.ranks} processes, this one being "
            f"rank {owned.rank} of them, and they are no longer the ones that train: call state_dict() on "
            "all ranks before that changes, and load it into a new optimizer"
        )
    if ranks is None:
        return None
    exchange = Owners(optimizer, ranks)
    optimizer.owned = Owned(ranks.size, ranks.rank, exchange.owner)
    exchange.forget_others()
    return exchange


def check_processes(optimizer: SecondOrder) -> None:
    """Refuse what would differ from process to process.

    Args:
        optimizer: The optimizer, at construction and before each step.

    Raises:
        RuntimeError: There are several processes, and they would drift apart.
    """
    processes = _processes(optimizer.model)
    if processes > 1 and optimizer.capture_options.fused:
        raise RuntimeError(
            f"{type(optimizer).__name__}(fused=True) in {processes} processes is not supported: gradients that are "
            "never formed cannot be averaged. Leave out fused=True"
        )


def check_alike(optimizer: SecondOrder) -> None:
    """Refuse gradients that were not averaged, and weights that differ: at the first step together, and every 100.

    Args:
        optimizer: The optimizer, before a step.

    Raises:
        RuntimeError: The processes differ. All of them are told.
    """
    check_processes(optimizer)
    if _processes(optimizer.model) == 1:
        return
    group = _group(optimizer.model)
    if optimizer.compared is not None and optimizer.compared[0] is group and optimizer.compared[1] < COMPARED_EVERY:
        optimizer.compared = (group, optimizer.compared[1] + 1)
        return
    refuse_dtensors(optimizer.model)  # a model that was sharded after the optimizer was made
    optimizer.compared = None
    device, parameters = optimizer.generator.device, [entry.parameter for entry in optimizer.entries.values()]
    gradients = [parameter.grad for parameter in parameters]
    rates = torch.tensor([float(group["lr"]) for group in optimizer.param_groups], dtype=torch.float64)
    digests = [_digest(gradients), _digest(parameters), _digest([rates])]
    own = torch.stack([*(digest.to(device) for digest in digests), torch.tensor(optimizer.steps, device=device)])
    both = torch.stack([own, -own])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    names = ("gradients", "weights", "learning rates", "numbers of steps")
    apart = [name for name, differs in zip(names, (both[0] != -both[1]).tolist(), strict=True) if differs]
    if apart:
        raise RuntimeError(
            f"the {' and '.join(apart)} of {_processes(optimizer.model)} processes differ. Start with the same weights "
            "and optimizer state everywhere, and call the model through DistributedDataParallel (its last backward "
            "pass before a step outside of no_sync), or average gradients by all_reduce before the step"
        )
    if any(gradient is not None for gradient in gradients):
        optimizer.compared = (group, 1)


def _processes(model: nn.Module) -> int:
    """How many processes train this model: 1 where no process group was made."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(_group(model))


def _group(model: nn.Module) -> Any:
    """The process group of a model that was wrapped before its optimizer was made; else that of all processes."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.process_group if wrapped else torch.distributed.group.WORLD


def _digest(tensors: list[Tensor] | list[nn.Parameter] | list[Tensor | None]) -> Tensor:
    """A whole number that differs if one bit does, whatever the order in which it is summed; wraps around."""
    total = torch.zeros((), dtype=torch.int64)
    for k, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach().reshape(-1)
        for begin in range(0, len(values), PIECE):
            piece = values[begin : begin + PIECE]
            piece = torch.where(piece.isnan(), 0.0, piece).contiguous()
            bits = piece.view(BITS[piece.element_size()]).to(torch.int64)
            places = torch.arange(begin, begin + len(piece), device=piece.device).mul_(2).add_(2 * k + 1)
            total = total.to(piece.device) + (bits + k + 1).mul_(places).sum()
    return total
