"""Models whose parameters are spread over processes, each of which holds a shard of a parameter.

``fully_shard`` (FSDP2) makes every parameter a DTensor. Its shape is that of the whole parameter, so that roles and
multipliers are those of the model that was not sharded; values are gathered, one parameter at a time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mukron.params.errors import ParametrizationError


def refuse_sharded(model: nn.Module) -> None:
    """Refuse sharding other than that of ``fully_shard`` over all processes.

    Args:
        model: The model.

    Raises:
        ParametrizationError: It is sharded by FSDP1, by DeepSpeed's ZeRO, or as tensor parallelism does.
    """
    how = _other_sharding(model)
    if how:
        raise ParametrizationError(
            f"the parameters of this model are spread over processes by {how}, and a process sees a part of each "
            "matrix alone. That is not supported: shard it by torch.distributed.fsdp.fully_shard (FSDP2), or replicate "
            "it by DistributedDataParallel"
        )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            _check_placements(name, parameter)


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor, of which each process may hold a part."""
    return isinstance(parameter, _kind("torch.distributed.tensor", "DTensor"))


def reshard(model: nn.Module) -> None:
    """Give modules of FSDP2 their sharded parameters back: after a forward pass they may have gathered copies.

    These are thrown away, with what is written to them, and gathered again where a backward pass needs them.

    Args:
        model: The model.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def whole(parameter: Tensor) -> Tensor:
    """All entries of a parameter. All processes that hold a part of it must call this.

    Args:
        parameter: A tensor, or a DTensor.
    """
    values: Any = parameter.detach()
    if not is_sharded(values):
        return parameter.detach()
    device = values.device_mesh.device_type
    if values.device.type != device:  # offloaded to where its processes cannot exchange it
        values = values.to(device)
    gathered: Tensor = values.full_tensor()
    return gathered


def part_here(parameter: Tensor) -> Tensor:
    """The entries that this process holds, which may be none.

    Args:
        parameter: A tensor, or a DTensor.
    """
    values: Any = parameter.detach()
    part: Tensor = values.to_local() if is_sharded(values) else values
    return part


def extremes(rows: Tensor, sharded: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of every entry over the processes that hold a sharded parameter.

    Args:
        rows: Numbers of this process.
        sharded: A DTensor, for its processes.
    """
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    both = torch.stack([-rows, rows]).to(mesh.device_type)
    for group in mesh.get_all_groups():
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    both = both.to(rows.device)
    return -both[0], both[1]


def type_of(module: nn.Module) -> type:
    """The type that the user gave a module: ``fully_shard`` gives it another, which derives from it."""
    added = _kind("torch.distributed.fsdp", "FSDPModule")
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, added))


def _other_sharding(model: nn.Module) -> str:
    """What shards it, if that is not FSDP2."""
    fsdp1 = _kind("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(module, fsdp1) for module in model.modules()):
        return "FullyShardedDataParallel (FSDP1)"
    return "DeepSpeed's ZeRO" if any(hasattr(parameter, "ds_id") for parameter in model.parameters()) else ""


def _check_placements(name: str, parameter: Any) -> None:
    """Refuse what ``fully_shard`` does not make: it shards over one dimension of a mesh of all processes."""
    kinds = [type(placement).__name__ for placement in parameter.placements]
    processes, size = torch.distributed.get_world_size(), parameter.device_mesh.size()
    if set(kinds) <= {"Replicate", "Shard"} and kinds.count("Shard") <= 1 and size == processes:
        return
    placements = ", ".join(map(str, parameter.placements))
    raise ParametrizationError(
        f'parameter "{name}" is spread as [{placements}] over {size} of {processes} processes. Expected what '
        "fully_shard makes of a plain model on a mesh of all processes, [Shard] or [Replicate, Shard]; tensor "
        "parallelism and meshes of some processes alone are not supported"
    )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp2 = _kind("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, fsdp2)]


def _kind(module: str, name: str) -> type | tuple[()]:
    """A class, if it was imported, which may take seconds; otherwise nothing is of it."""
    kind: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return kind
