"""Training in several processes: what a step there would be, and refusals of what would go wrong in silence.

A step must be that of the joined batch. Shampoo, SOAP and Muon need gradients alone, which DistributedDataParallel
averages. K-FAC, FOOF and Gauss-Newton measure curvature, each process on its own batch, and exchange what they measured
(``curvature.ranks``). Gradients of a plain model are averaged by the user, or by the step itself if it is given a
``process_group``. Of a model that ``fully_shard`` has spread, each rank keeps its part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mukron.curvature import IN_A_STEP, Ranks, local, said
from mukron.optim.apart import remedy
from mukron.optim.exchange import Owners
from mukron.params.sharded import is_sharded, refuse_sharded

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

COMPARED_EVERY = 100  # steps between comparisons
PIECE = 1 << 22  # entries that a digest is made of at a time
OF_RATES = ("lr", "fallback_lr", "reference_lr", "initial_lr")  # of a parameter group
COMPARED = ("gradients", "weights", "learning rates", "numbers of steps", "options")  # in the order of comparison
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry


def ranks_of(model: nn.Module, process_group: Any = None) -> Ranks | None:
    """The processes that train this model; None: there is one.

    Args:
        model: The model, as the optimizer got it.
        process_group: That of the optimizer; None: it was given none.
    """
    if _processes(model, process_group) == 1 and not _is_spread(model):
        return None  # of a spread model a single process, too, has parts
    return Ranks(_group(model, process_group), next(model.parameters()).device)


def exchange_of(optimizer: SecondOrder) -> Owners | None:
    """How the optimizer's step talks to other processes; None: there are none.

    Args:
        optimizer: The optimizer, before a step.
    """
    before, ranks = optimizer.exchange, ranks_of(optimizer.model, optimizer.together.group)
    if ranks is None and optimizer.together.owned is None:
        return None
    if (
        isinstance(before, Owners)
        and ranks is not None
        and before.ranks.group is ranks.group
        and before.owner.keys() == optimizer.layers.keys()
    ):
        return before
    owned = optimizer.together.owned
    if owned is not None and (ranks is None or (owned.ranks, owned.rank) != (ranks.size, ranks.rank)):
        raise RuntimeError(
            f"the state of this optimizer's layers is spread over {owned.ranks} processes, this one being "
            f"rank {owned.rank} of them, and they are no longer the ones that train: call state_dict() on "
            "all ranks before that changes, and load it into a new optimizer"
        )
    if ranks is None:
        return None
    return Owners(optimizer, ranks)


def check_processes(optimizer: SecondOrder) -> None:
    """Refuse what would differ from process to process.

    Args:
        optimizer: The optimizer, at construction and before each step.

    Raises:
        RuntimeError: There are several processes, and they would drift apart.
    """
    name, group = type(optimizer).__name__, optimizer.together.group
    processes, spread = _processes(optimizer.model, group), _is_spread(optimizer.model)
    if group is not None and (spread or isinstance(optimizer.model, nn.parallel.DistributedDataParallel)):
        how = "fully_shard" if spread else "DistributedDataParallel"
        raise RuntimeError(
            f"{name}(process_group=...) averages the gradients of a plain model, but {how} averages those of this one "
            "already: leave out process_group"
        )
    capture = optimizer.capture_options
    if processes > 1 and capture.fused and (group is None or not capture.measures):
        way = "Pass process_group= with a plain model, or leave out" if capture.measures else "Leave out"
        raise RuntimeError(
            f"{name}(fused=True) in {processes} processes is not supported: gradients that are never formed cannot be "
            f"averaged. {way} fused=True"
        )
    scaled = capture.grad_scaler is not None or vars(optimizer).pop("found_inf", None) is not None  # a scaler sets it
    if scaled and averages_itself(optimizer):
        raise RuntimeError(
            f"{name}(process_group=...) averages gradients in the step, after a GradScaler has looked at those of its "
            "own process: scales of processes would differ. Wrap the model in DistributedDataParallel and leave out "
            "process_group, or train in bfloat16 or float32 without a GradScaler"
        )
    if spread and any(group["weight_decay"] and not group["decoupled"] for group in optimizer.param_groups):
        raise RuntimeError(
            f"{name}(decoupled=False) adds weights to gradients, and a process has a part of each alone, since "
            "fully_shard has spread them: leave decoupled=True"
        )


def averages_itself(optimizer: SecondOrder) -> bool:
    """Whether the step averages the gradients of several processes.

    Args:
        optimizer: The optimizer.
    """
    group = optimizer.together.group
    return group is not None and _processes(optimizer.model, group) > 1


def warn_of_no_group() -> None:
    """Tell of processes that torchrun has started and that do not know of each other: each trains by itself."""
    started = os.environ.get("WORLD_SIZE", "1")
    if torch.distributed.is_available() and not torch.distributed.is_initialized() and started not in ("", "1"):
        warnings.warn(
            f"{started} processes were started (WORLD_SIZE), but torch.distributed is not initialized: each trains its "
            "own weights. Call torch.distributed.init_process_group() before the model and the optimizer are made",
            UserWarning,
            stacklevel=6,
        )


def check_alike(optimizer: SecondOrder, initializes: bool = False) -> bool:
    """Refuse gradients that were not averaged, and weights that differ: at the first step together, and every 100.

    Args:
        optimizer: The optimizer, before a step.
        initializes: The step is there to make a state, as far as this process sees.

    Returns:
        Whether that is so on all of them.

    Raises:
        RuntimeError: The processes differ. All of them are told.
    """
    check_processes(optimizer)
    given, spread = optimizer.together.group, _is_spread(optimizer.model)
    if _processes(optimizer.model, given) == 1:
        return initializes
    group, together = _group(optimizer.model, given), optimizer.together
    begins = not optimizer.steps + optimizer.skipped
    known = together.compared if together.compared is not None and together.compared[0] is group else None
    if known is not None and known[1] < COMPARED_EVERY and not begins:
        together.compared = (group, known[1] + 1)
        return False
    refuse_sharded(optimizer.model)
    if spread:
        _refuse_late_sharding(optimizer)
    together.compared = None
    settings = _settings(optimizer)
    own = torch.cat([_numbers(optimizer, settings), torch.tensor([initializes], device=optimizer.generator.device)])
    both = torch.stack([own, -own])
    with said(IN_A_STEP):
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    differs = (both[0] != -both[1]).tolist()
    differs[COMPARED.index("weights")] |= _replicas_differ(optimizer)
    apart = [name for name, other in zip(COMPARED, differs, strict=False) if other]
    if apart:
        where = _settings_apart(settings, group) if "options" in apart else ""
        found = f"the {' and '.join(apart)} of {_processes(optimizer.model, given)} processes differ{where}"
        raise RuntimeError(f"{found}. {remedy(optimizer, apart)}")
    if any(entry.parameter.grad is not None for entry in optimizer.entries.values()):
        together.compared = (group, 1)
    return int(both[1][-1]) == -1


def _numbers(optimizer: SecondOrder, settings: dict[str, str]) -> Tensor:
    """What processes compare, each of ``COMPARED`` as one whole number."""
    parameters = [entry.parameter for entry in optimizer.entries.values()]
    whole = [parameter for parameter in parameters if not is_sharded(parameter)]
    averaged = [parameter.grad for parameter in whole] if optimizer.together.group is None else []
    rates = [float(group[name] or 0) for group in optimizer.param_groups for name in ("lr", "fallback_lr")]
    digests = [_digest(averaged), _digest(whole), _digest([torch.tensor(rates, dtype=torch.float64)])]
    text = int.from_bytes(hashlib.sha256(str(settings).encode()).digest()[:7], "big")
    numbers = torch.tensor([*map(int, digests), optimizer.steps, text])
    return numbers.to(optimizer.generator.device)


def _settings(optimizer: SecondOrder) -> dict[str, str]:
    """What processes must have chosen alike, as text by name; learning rates move, and are compared by themselves."""
    found: dict[str, Any] = {"method": type(optimizer).__name__, "process_group": optimizer.together.group is not None}
    for options in (optimizer.options, optimizer.capture_options):
        found |= {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.init}
    found |= {"layers": list(optimizer.layers), "parameters": list(optimizer.entries)}
    for number, group in enumerate(optimizer.param_groups):
        kept = {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()}
        found |= {f"{name} of group {number}": kept[name] for name in kept if name not in ("params", *OF_RATES)}
    addresses = re.compile(" at 0x[0-9a-f]+")
    return {name: addresses.sub("", repr(value)) for name, value in found.items() if name != "grad_scaler"}


def _settings_apart(settings: dict[str, str], group: Any) -> str:
    """Those that differ, in words. All processes must call this."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, settings, group=group)
    apart: dict[str, str] = {}
    for rank, other in enumerate(found):
        for name in {**found[0], **other}:
            first, here = (of.get(name, "not there") for of in (found[0], other))
            if first != here:
                apart.setdefault(name, f"{name} is {first:.100} on rank 0 and {here:.100} on rank {rank}")
    return f" ({'; '.join(apart.values())})"


def _replicas_differ(optimizer: SecondOrder) -> bool:
    """Whether parts of weights that several ranks have are not the same there. All processes must call this."""
    exchange = optimizer.exchange
    shards = exchange.shards if isinstance(exchange, Owners) else {}
    copied = {name: of for name, of in shards.items() if len(set(of.replicas)) > 1}
    if not copied or not isinstance(exchange, Owners):
        return False
    parts = [local(optimizer.entries[name].parameter) for name in copied]
    digests = exchange.ranks.objects(torch.stack([_digest([part]).to(part.device) for part in parts]).tolist())
    for place, of in enumerate(copied.values()):
        by_part = {(bounds, digest[place]) for bounds, digest in zip(of.bounds, digests, strict=True)}
        if len(by_part) > len(set(of.bounds)):
            return True
    return False


def _refuse_late_sharding(optimizer: SecondOrder) -> None:
    here = {id(parameter) for parameter in optimizer.model.parameters()}
    if any(id(parameter) not in here for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"fully_shard has replaced the parameters that this {type(optimizer).__name__} trains: shard the model "
            "first, then make the optimizer"
        )


def _processes(model: nn.Module, process_group: Any) -> int:
    """How many processes train this model: 1 where no process group was made."""
    _check_group(process_group)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(_group(model, process_group))


def _group(model: nn.Module, process_group: Any) -> Any:
    """That which was given; of a model that was wrapped or sharded its own; else that of all processes."""
    if process_group is not None:
        return process_group
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    return torch.distributed.group.WORLD  # of a model that fully_shard has spread, too


def _check_group(process_group: Any) -> None:
    if process_group is not None and not isinstance(process_group, _kind_of_group()):
        raise TypeError(
            "process_group must be a group of torch.distributed that this process belongs to, such as "
            f"torch.distributed.group.WORLD, got {process_group!r:.80}"
        )


def _is_spread(model: nn.Module) -> bool:
    return any(map(is_sharded, model.parameters()))


def _kind_of_group() -> Any:
    return torch.distributed.ProcessGroup if torch.distributed.is_available() else ()


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
