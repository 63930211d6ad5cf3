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

SUPPORTED = (
    "That is not supported, alone or below fully_shard: a process sees a part of a layer's inputs or outputs alone. "
    "Leave it out, and train with fully_shard (also on a mesh of two dimensions, HSDP), replicate or "
    "DistributedDataParallel over all processes"
)


def refuse_sharded(model: nn.Module, replicas: bool = True) -> None:
    """Refuse sharding other than that of ``fully_shard`` and ``replicate`` over all processes.

    Args:
        model: The model.
        replicas: Parameters of which every process has all may be DTensors that others have made.

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
    sharded = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    if not sharded:
        return
    by_hand = _sharded_by_hand(model)
    others = {name: parameter for name, parameter in sharded.items() if id(parameter) in by_hand}
    split = [name for name, parameter in others.items() if not (replicas and _is_replicated(parameter))]
    if split:
        parameter: Any = sharded[split[0]]
        names, more = ", ".join(f'"{name}"' for name in split[:3]), f" and {len(split) - 3} more"
        raise ParametrizationError(
            f"parameters {names}{more * (len(split) > 3)} are spread over processes by tensor parallelism "
            f"(parallelize_module), or by distribute_tensor: the first one as {list(parameter.placements)} over "
            f"{parameter.device_mesh.size()} of them. {SUPPORTED}"
        )
    for name, parameter in sharded.items():
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
    """Refuse what ``fully_shard`` does not make: it shards over the last dimension of a mesh of all processes."""
    kinds = [type(placement).__name__ for placement in parameter.placements]
    processes, size = torch.distributed.get_world_size(), parameter.device_mesh.size()
    if {*kinds[:-1]} <= {"Replicate"} and kinds[-1] in ("Replicate", "Shard") and size == processes:
        return
    raise ParametrizationError(
        f'parameter "{name}" is spread as {list(parameter.placements)} over {size} of {processes} processes. Expected '
        "what fully_shard makes of a plain model on a mesh of all processes, [Shard] or [Replicate, Shard]; meshes of "
        "some processes alone are not supported"
    )


def _is_replicated(parameter: Any) -> bool:
    return all(type(placement).__name__ == "Replicate" for placement in parameter.placements)


def _sharded_by_hand(model: nn.Module) -> set[int]:
    """Parameters, by identity, that FSDP2 does not keep, or that were DTensors before it took them.

    Meshes and placements alone do not tell: a layer of which each process has some rows looks like one of FSDP2.
    """
    kept = _kept_by_fsdp(model)
    taken = {id(of.sharded_param): of for of in kept.values()}
    found: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            of = kept.get((id(module), name)) or taken.get(id(parameter))
            found[id(parameter)] = found.get(id(parameter)) or of
    return {key for key, of in found.items() if of is None or _was_spread(of)}


def _kept_by_fsdp(model: nn.Module) -> dict[tuple[int, str], Any]:
    """What FSDP2 knows of each parameter that it keeps, by the identity of a module and the parameter's name there.

    Not by that of the parameter: ``load_state_dict(assign=True)`` and ``to_empty`` put others in their place.
    """
    kept: dict[tuple[int, str], Any] = {}
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 there was one
        for group in [state._fsdp_param_group] if groups is None else groups:
            for of in () if group is None else group.fsdp_params:
                info = of._module_info
                kept[id(info.module), info.param_name] = of
                kept |= {(id(m), n): of for m, n in zip(info.shared_modules, info.shared_param_names, strict=True)}
    return kept


def _was_spread(of: Any) -> bool:
    """Whether a parameter of FSDP2 was a DTensor before, over dimensions of a mesh that are not FSDP2's own."""
    own = getattr(of, "_dp_dim_indices", ())  # if fully_shard was told which dimensions of a mesh are its own
    return bool(of.is_dtensor) and len(own) < of.sharded_param.device_mesh.ndim


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp2 = _kind("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, fsdp2)]


def _kind(module: str, name: str) -> type | tuple[()]:
    """A class, if it was imported, which may take seconds; otherwise nothing is of it."""
    kind: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return kind
