"""Whose gradients a step takes in several processes.

    Given     every rank has that of the joined batch: DistributedDataParallel, or the user, has averaged them
    Averaged  every rank has that of its own part: the step averages them (``process_group=``)
    Sharded   every rank has a part of that of the joined batch: ``fully_shard``

What a layer's owner needs goes to it in the message that brings the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from mukron.curvature import EVERY_RANK, Kinds, local
from mukron.layers import WEIGHT
from mukron.linalg import probe
from mukron.optim.shards import Shards
from mukron.optim.table import LayerEntry, ParameterEntry

if TYPE_CHECKING:
    from mukron.optim.exchange import Owners

Parcels = dict[int, dict[str, Tensor]]  # by rank and parameter
TIED = -1  # the kind of use whose gradient is no D^T H
WITHIN = 30  # roundings, within which a gradient is D^T H


class Given:
    """Every rank has the gradients of the joined batch."""

    averages = False  # the step averages gradients

    def __init__(self, exchange: Owners) -> None:
        self.exchange, self.optimizer, self.ranks = exchange, exchange.optimizer, exchange.ranks

    def sent(self, kinds: Kinds) -> tuple[Parcels, frozenset[str]]:
        """What goes to each rank, and the layers whose gradient is D^T H of all ranks' rows.

        kinds: what this rank's passes have measured.
        """
        return {}, frozenset()

    def taken(self, received: Sequence[Mapping[str, Tensor]], unformed: frozenset[str]) -> dict[str, Tensor | None]:
        """The gradients that this rank's step takes in place of ``grad``, by parameter."""
        return {}

    def moving(self) -> frozenset[str] | None:
        """Parameters that have a gradient on some rank; None: all ranks have the same ones."""
        return None

    def probed(self, layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
        """G v of the joined batch, for the weights of some layers; v is the probe."""
        return probed(layers)


class Averaged(Given):
    """Every rank has the gradients of its own part of the batch."""

    averages = True

    def __init__(self, exchange: Owners) -> None:
        super().__init__(exchange)
        self._moving: frozenset[str] = frozenset()
        self._everywhere: dict[str, Tensor] = {}

    def sent(self, kinds: Kinds) -> tuple[Parcels, frozenset[str]]:
        entries, owner = self.optimizer.entries, self.exchange.owner
        names = list(entries)
        known = {name: entry.layer for name, entry in entries.items() if self._may_be_product(entry)}
        there = [entry.parameter.grad is not None for entry in entries.values()]
        ran = [known.get(name) in kinds for name in names]
        off = [self._off(self.optimizer.layers[known[name]], kinds) if name in known else False for name in names]
        device = self.ranks.device
        differs = torch.stack([torch.as_tensor(verdict, device=device) for verdict in off])
        sparse = [entry.parameter.grad is not None and entry.parameter.grad.is_sparse for entry in entries.values()]
        flags = torch.stack([*torch.tensor([there, ran, sparse], device=device), differs]).int()
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self.ranks.group)
        there, ran, sparse, differs = flags.bool().tolist()
        if any(sparse):  # on one rank or on all of them, which all say so
            raise ValueError(
                f'parameter "{names[sparse.index(True)]}" has a sparse gradient; build it with sparse=False'
            )
        seen = zip(names, ran, differs, strict=True)
        unformed = {known[name] for name, some, changed in seen if name in known and some and not changed}
        self._moving = frozenset(
            name for name, some in zip(names, there, strict=True) if some or entries[name].layer in unformed
        )
        left = [
            entries[name] for name, some in zip(names, there, strict=True) if some and not self._of_rows(name, unformed)
        ]
        parcels: Parcels = {}
        everywhere = [entry for entry in left if owner.get(entry.layer, EVERY_RANK) == EVERY_RANK]
        for entry in left:
            to = owner.get(entry.layer, EVERY_RANK)
            if to != EVERY_RANK and entry.parameter.grad is not None:
                parcels.setdefault(to, {})[entry.name] = _plain(entry)
        self._everywhere = self._all_reduced(everywhere)
        return parcels, frozenset(unformed)

    def _of_rows(self, name: str, unformed: set[str]) -> bool:
        """Whether a parameter is the weight of a layer whose gradient is D^T H."""
        entry = self.optimizer.entries[name]
        layer = self.optimizer.layers.get(entry.layer)
        return entry.layer in unformed and layer is not None and layer.blocks.get(WEIGHT) is entry

    def _may_be_product(self, entry: ParameterEntry) -> bool:
        layer = self.optimizer.layers.get(entry.layer)
        if layer is None or layer.blocks.get(WEIGHT) is not entry:
            return False
        return entry.layer in self.optimizer.capture.products or self.optimizer.capture_options.fused

    def _off(self, layer: LayerEntry, kinds: Kinds) -> bool | Tensor:
        """Whether this rank's gradient is something else than D^T H of its passes, beyond rounding."""
        G, parts = _grad(layer), kinds.get(layer.name, {})
        if not parts:
            return False if G is None else G.any()
        if TIED in parts or not all(part.halves for part in parts.values()):
            return True
        if G is None:
            return not all(half.fused for part in parts.values() for half in part.halves)
        M, missing, size = layer.layer.block(WEIGHT, G), [], []
        v = probe(M.shape[-1], M.dtype, M.device)
        for place, kind in enumerate(sorted(parts)):
            of_kind = M[place : place + 1] if len(parts) > 1 else M
            halves = parts[kind].halves
            ours = sum(half.D.mT @ (half.H @ v.to(half.H.dtype)) for half in halves)
            missing.append((of_kind.to(v.dtype) @ v - ours).norm())
            size += [half.D.norm() * half.H.norm() for half in halves]
        return ~(torch.stack(missing).sum() <= WITHIN * torch.finfo(G.dtype).eps * torch.stack(size).sum())

    def _all_reduced(self, entries: Sequence[ParameterEntry]) -> dict[str, Tensor]:
        """Averages of gradients that every rank needs, one message for each dtype."""
        result: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(entry.parameter.dtype for entry in entries):
            alike = [entry for entry in entries if entry.parameter.dtype == dtype]
            flat = torch.cat([_plain(entry).reshape(-1) for entry in alike])
            distributed.all_reduce(flat, group=self.ranks.group)
            parts = torch.split(flat / self.ranks.size, [entry.parameter.numel() for entry in alike])
            for entry, part in zip(alike, parts, strict=True):
                result[entry.name] = part.reshape(entry.parameter.shape)
        return result

    def taken(self, received: Sequence[Mapping[str, Tensor]], unformed: frozenset[str]) -> dict[str, Tensor | None]:
        gradients: dict[str, Tensor | None] = {**self._everywhere}
        for name in dict.fromkeys(name for of_rank in received for name in of_rank):
            parts = [of_rank[name] for of_rank in received if name in of_rank]
            gradients[name] = sum(parts[1:], start=parts[0]) / self.ranks.size
        gradients |= {name: None for name in self.optimizer.entries if self._of_rows(name, set(unformed))}
        self._everywhere = {}
        return gradients

    def moving(self) -> frozenset[str] | None:
        return self._moving

    def probed(self, layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
        own = {**{layer.name: _zeros(layer) for layer in layers}, **super().probed(layers)}
        return {name: product / self.ranks.size for name, product in _summed(own, self.ranks.group).items()}


class Sharded(Given):
    """Every rank has a part of each gradient of the joined batch."""

    def __init__(self, exchange: Owners) -> None:
        super().__init__(exchange)
        self.shards: Mapping[str, Shards] = exchange.shards

    def sent(self, kinds: Kinds) -> tuple[Parcels, frozenset[str]]:
        parcels: Parcels = {}
        for entry in self.optimizer.entries.values():
            to = self.exchange.owner.get(entry.layer, EVERY_RANK)
            shards, grad = self.shards.get(entry.name), entry.parameter.grad
            if to != EVERY_RANK and grad is not None and shards is not None and shards.sends(self.ranks.rank, to):
                parcels.setdefault(to, {})[entry.name] = local(grad)
        return parcels, frozenset()

    def taken(self, received: Sequence[Mapping[str, Tensor]], unformed: frozenset[str]) -> dict[str, Tensor | None]:
        entries, own = self.optimizer.entries, self.ranks.rank
        gradients: dict[str, Tensor | None] = {
            name: local(entry.parameter.grad) for name, entry in entries.items() if entry.parameter.grad is not None
        }
        for name in dict.fromkeys(name for of_rank in received for name in of_rank):
            gradients[name] = self.shards[name].whole([of_rank.get(name) for of_rank in received], own)
        return gradients

    def probed(self, layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
        products, rank = {}, self.ranks.rank
        for layer in layers:
            if (grad := _grad(layer)) is None:
                continue
            shards = self.shards.get(layer.blocks[WEIGHT].name)
            if shards is None:
                products[layer.name] = _probed(layer, grad)
            elif shards.sends(rank, 0):
                products[layer.name] = _probed(layer, shards.embedded(grad, rank))
            else:
                products[layer.name] = _zeros(layer)
        spread = {name: p for name, p in products.items() if p is not None and self._is_spread(name)}
        return {**{n: p for n, p in products.items() if p is not None}, **_summed(spread, self.ranks.group)}

    def _is_spread(self, layer: str) -> bool:
        return self.optimizer.layers[layer].blocks[WEIGHT].name in self.shards


def probed(layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
    """G v of this process, for the weights of some layers that have a gradient; v is the probe."""
    return {layer.name: product for layer in layers if (product := _probed(layer, _grad(layer))) is not None}


def _plain(entry: ParameterEntry) -> Tensor:
    """This rank's gradient; zeros if it has none."""
    grad = entry.parameter.grad
    return torch.zeros_like(entry.parameter) if grad is None else grad


def _grad(layer: LayerEntry) -> Tensor | None:
    """What this rank has of the gradient of a layer's weight."""
    entry = layer.blocks.get(WEIGHT)
    grad = None if entry is None else entry.parameter.grad
    return None if grad is None or grad.is_sparse else local(grad)


def _probed(layer: LayerEntry, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    G = layer.layer.block(WEIGHT, grad)
    G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
    product: Tensor = G @ probe(G.shape[-1], G.dtype, G.device)
    return product


def _zeros(layer: LayerEntry) -> Tensor:
    dtype = torch.promote_types(layer.anchor.dtype, torch.float32)
    return torch.zeros(layer.layer.groups, layer.layer.d_out, 1, dtype=dtype, device=layer.anchor.device)


def _summed(products: Mapping[str, Tensor], group: object) -> dict[str, Tensor]:
    """Over all ranks, one message for each dtype."""
    result: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(product.dtype for product in products.values()):
        alike = {name: product for name, product in products.items() if product.dtype == dtype}
        flat = torch.cat([product.reshape(-1) for product in alike.values()])
        distributed.all_reduce(flat, group=group)
        parts = torch.split(flat, [product.numel() for product in alike.values()])
        result |= {name: part.reshape(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
    return result
