"""Models whose parameters are spread over processes, which neither a plan nor an optimizer can serve yet."""

from __future__ import annotations

import sys

from torch import nn

from mukron.params.errors import ParametrizationError


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which this process holds a part alone.

    Args:
        model: The model.

    Raises:
        ParametrizationError: Its parameters are sharded.
    """
    how = _sharded_by(model)
    if how:
        raise ParametrizationError(
            f"the parameters of this model are spread over processes by {how}, and a process sees a part of each "
            "matrix alone. That is not supported yet: replicate the model, by DistributedDataParallel"
        )


def _sharded_by(model: nn.Module) -> str:
    """What shards it; a kind that was never imported, which may take seconds, is not there."""
    if any(
        isinstance(module, _kind("torch.distributed.fsdp", "FullyShardedDataParallel")) for module in model.modules()
    ):
        return "FullyShardedDataParallel (FSDP1)"
    parameters = [*model.parameters()]
    if any(isinstance(parameter, _kind("torch.distributed.tensor", "DTensor")) for parameter in parameters):
        return "fully_shard (FSDP2) or another kind of DTensor"
    return "DeepSpeed's ZeRO" if any(hasattr(parameter, "ds_id") for parameter in parameters) else ""


def _kind(module: str, name: str) -> type | tuple[()]:
    kind: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return kind
