"""What each of several processes holds of a network: all of it (ddp), or a part of each weight (fsdp).

With "fsdp" a weight W [d_out, d_in] is a DTensor, and a rank keeps d_out / ranks of its rows. The plan is made before,
from whole weights. What is saved is whole too, so a run may go on with the other sharding or with another number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mukron.data import Dataset
from mukron.params import Parametrization
from mukron.train.batch_norms import join_batch_norms
from mukron.train.build import Built, build, network_of, optimizer_of
from mukron.train.config import RunConfig
from mukron.train.losses import loss_of
from mukron.train.outputs import output_of
from mukron.train.processes import Processes
from mukron.train.surroundings import compiled_anew

MANY_BLOCKS = (nn.ModuleList, nn.Sequential)  # their children are blocks, not they


def build_in(processes: Processes, config: RunConfig, dataset: Dataset) -> Built:
    """Build everything that a run needs, in one of its processes.

    Args:
        processes: The processes.
        config: The run.
        dataset: The data.
    """
    if processes.size == 1:
        return build(config, dataset)
    if config.sharding == "ddp":
        built = build(config.replace(compile=False), dataset)
        join_batch_norms(built.model)
        return replace(built, config=config)
    model, plan = network_of(config, dataset)
    join_batch_norms(model)
    optimizer = _optimizer_of_parts(config, model, plan, dataset)
    return Built(config, model, model, plan, optimizer, loss_of(config, dataset))


def joined(built: Built, processes: Processes) -> Built:
    """Let backward passes average gradients over processes. All of them must call this.

    Args:
        built: What ``build_in`` has made.
        processes: The processes.
    """
    if processes.size == 1 or built.config.sharding == "fsdp":
        return built
    # Without find_unused_parameters the wrapper groups gradients anew after its first step, so that sums of three ranks
    # and more would round in another way after a restart.
    wrapped = DistributedDataParallel(_Output(built.config, built.model), find_unused_parameters=True)
    network: Callable[[Tensor], Any] = compiled_anew(wrapped) if built.config.compile else wrapped
    return replace(built, network=network)


class _Output(nn.Module):
    """The part of a network's output that is trained: the wrapper waits for gradients of all that it sees."""

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        super().__init__()
        self.config, self.model = config, model
        device = next(model.parameters()).device
        self.never_used = nn.Parameter(torch.zeros((), device=device))  # if all are used, the wrapper warns

    def forward(self, inputs: Tensor) -> Any:
        output, name = output_of(self.config, self.model(inputs)), self.config.output
        return output if name is None else {name: output}


# Sharded networks.


def shard(model: nn.Module) -> None:
    """Leave each process a part of every weight: one group for each block of the network, one for what is left.

    Args:
        model: The network, parametrized.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type  # which need not be torch's own choice, a GPU wherever there is one
    mesh = init_device_mesh(kind, (distributed.get_world_size(),))
    for block in [*blocks_of(model), model]:
        fully_shard(block, mesh=mesh)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The top-level modules of a network that have parameters of their own; lists and sequences count child by child.

    Args:
        model: The network.

    Example:
        >>> len(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))
        2
    """
    found = [
        block
        for child in model.children()
        for block in (child.children() if isinstance(child, MANY_BLOCKS) else (child,))
    ]
    owners: dict[int, set[int]] = {}  # by parameter: the blocks that use it
    for block in [*found, _direct(model)]:
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(id(block))
    return [
        block
        for block in dict.fromkeys(found)
        if [*block.parameters()] and all(len(owners[id(parameter)]) == 1 for parameter in block.parameters())
    ]


def _direct(model: nn.Module) -> nn.ParameterList:
    """The parameters that a network holds itself."""
    return nn.ParameterList(model.parameters(recurse=False))


def _optimizer_of_parts(config: RunConfig, model: nn.Module, plan: Parametrization, dataset: Dataset) -> Optimizer:
    """torch's optimizers get groups of the plan, which reads whole weights, and then the parts in their place."""
    if config.spec.layerwise:
        shard(model)
        return optimizer_of(config, model, plan, dataset)
    optimizer = optimizer_of(config, model, plan, dataset)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shard(model)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(parameter)]] for parameter in group["params"]]
    return optimizer


# What is saved: whole, and the same files for every number of processes.


def saved_network(built: Built) -> dict[str, Any]:
    """The whole network's state. All processes must call this.

    Args:
        built: The network.
    """
    if not is_sharded(built.model):
        return built.model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(built.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_network(built: Built, state: Mapping[str, Any]) -> None:
    """Load the whole network's state, which every process has read.

    Args:
        built: The network.
        state: What ``saved_network`` returned.
    """
    if not is_sharded(built.model):
        built.model.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(built.model, dict(state), options=StateDictOptions(full_state_dict=True, strict=True))


def saved_optimizer(built: Built) -> dict[str, Any]:
    """The whole optimizer's state, with whole tensors. All processes must call this.

    Not by ``get_optimizer_state_dict``: it names parameters where ``Optimizer.state_dict`` numbers them, and takes a
    step of its own if there is no state yet.

    Args:
        built: The optimizer.
    """
    state = built.optimizer.state_dict()
    whole: dict[str, Any] = _mapped(state, _whole) if is_sharded(built.model) else state
    return whole


def load_optimizer(built: Built, state: Mapping[str, Any]) -> None:
    """Load the whole optimizer's state, which every process has read.

    Args:
        built: The optimizer.
        state: What ``saved_optimizer`` returned.
    """
    loaded = dict(state)
    if is_sharded(built.model) and not built.config.spec.layerwise:
        parameters = [parameter for group in built.optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        of = dict(zip(numbers, parameters, strict=True))
        loaded["state"] = {
            number: {name: _part_like(value, of[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        }
    built.optimizer.load_state_dict(loaded)


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds parts of the weights alone.

    Args:
        model: The network.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _whole(value: Any) -> Any:
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def _part_like(value: Any, parameter: Any) -> Any:
    """A tensor of a parameter's shape as that parameter is sharded; others as they are."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.ndim:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device, copy=True), parameter.device_mesh, parameter.placements)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)
