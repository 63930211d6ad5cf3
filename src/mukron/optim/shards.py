"""Weights that are spread over ranks, as ``fully_shard`` does: of each parameter every rank has a part.

Parts are cut along one dimension, as ``torch.chunk`` cuts: all are of one size, but the last ones may be smaller or
empty. On a mesh of two dimensions several groups of ranks, called replicas, have the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mukron.curvature import local

if TYPE_CHECKING:
    from mukron.optim.table import ParameterEntry


@dataclass(frozen=True)
class Shards:
    """Where the parts of one parameter are.

    Attributes:
        shape: Of the whole parameter.
        dim: The dimension that is cut.
        bounds: Where each rank's part begins and ends.
        replicas: Which replica each rank belongs to.
    """

    shape: torch.Size
    dim: int
    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Any, ranks: int) -> Shards | None:
        """How a parameter is spread over the ranks of its mesh; None: it is on no mesh, and every rank has all of it.

        A mesh without a dimension that is cut has a replica on each rank, as ``replicate`` makes it.

        Args:
            parameter: The parameter.
            ranks: How many ranks there are.
        """
        placements = getattr(parameter, "placements", ())
        if not placements:
            return None
        mesh, cut = parameter.device_mesh.mesh, [k for k, placement in enumerate(placements) if placement.is_shard()]
        dim = placements[cut[0]].dim if cut else 0
        # replicas, and the ranks of each
        order = mesh.movedim(cut[0], -1).reshape(-1, mesh.shape[cut[0]]) if cut else mesh.reshape(-1, 1)
        places = {int(rank): (r, s) for r, row in enumerate(order) for s, rank in enumerate(row)}
        at = [places[rank] for rank in sorted(places)]
        assert len(at) == ranks
        size, parts = parameter.shape[dim], order.shape[1]
        step = -(-size // parts)
        bounds = tuple((min(s * step, size), min((s + 1) * step, size)) for _, s in at)
        return cls(parameter.shape, dim, bounds, tuple(r for r, _ in at))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor of the parameter's shape."""
        begin, end = self.bounds[rank]
        return whole.narrow(self.dim, begin, end - begin)

    def sends(self, rank: int, owner: int) -> bool:
        """Whether the owner takes that rank's part: one replica has all parts."""
        return self.replicas[rank] == self.replicas[owner]

    def whole(self, parts: Sequence[Tensor | None], owner: int) -> Tensor:
        """The tensor from the parts of all ranks; those that the owner does not take may be missing."""
        taken = [rank for rank in range(len(parts)) if self.sends(rank, owner)]
        ordered = sorted(taken, key=lambda rank: self.bounds[rank])
        return torch.cat([part for rank in ordered if (part := parts[rank]) is not None], dim=self.dim)

    def embedded(self, part: Tensor, rank: int) -> Tensor:
        """A rank's part among zeros."""
        whole = part.new_zeros(self.shape)
        self.part(whole, rank).copy_(part)
        return whole

    @property
    def numbers(self) -> tuple[int, ...]:
        """How many numbers of the parameter each rank has."""
        of_one = self.shape.numel() // max(self.shape[self.dim], 1)
        return tuple((end - begin) * of_one for begin, end in self.bounds)


def shards_of(named: Mapping[str, Any], ranks: int) -> dict[str, Shards]:
    """Of the parameters that are spread, by name."""
    found = {name: Shards.of(parameter, ranks) for name, parameter in named.items()}
    return {name: shards for name, shards in found.items() if shards is not None}


def spread_state(entry: ParameterEntry, state: Mapping[str, Any], whole: bool = False) -> list[str]:
    """Names in a parameter's state under which there is a part for each part of the parameter.

    Args:
        entry: The parameter.
        state: Its state.
        whole: Tensors are those of the whole parameter, as they are saved.
    """
    shape = entry.parameter.shape if whole else local(entry.parameter).shape
    alike = [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape]
    return [name for name in alike if not entry.preconditioned or name == "momentum_buffer"]


def parts_of_state(entry: ParameterEntry, state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state as this rank keeps it.

    Args:
        entry: The parameter.
        state: Its state as it was saved, of the whole parameter.
    """
    parameter: Any = entry.parameter
    mesh = getattr(parameter, "device_mesh", None)
    shards = None if mesh is None else Shards.of(parameter, mesh.size())
    if shards is None:
        return dict(state)
    rank = torch.distributed.get_rank()
    parts = {name: shards.part(state[name], rank).clone() for name in spread_state(entry, state, whole=True)}
    return {**state, **parts}
