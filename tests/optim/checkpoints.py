"""Optimizers whose checkpoints are tested, and what ranks run in ``test_checkpoints.py``."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import batch, bounds, equal_everywhere, made
from states import contents
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.optim.saving import Bundle

if torch.distributed.is_available():
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import FSDPModule, fully_shard

# Every name of a state, with inverses that are stale when it is saved after 7 steps.
OPTIMIZERS = {
    "kfac": partial(mukron.KFAC, lr=0.05),
    "kfac, ema": partial(mukron.KFAC, lr=0.02, trust=None, memory="ema:0.9", momentum=0.9, inverse_every=4),
    "kfac, window": partial(mukron.KFAC, lr=0.05, memory="window:3", inverse_every=4, refresh_warmup=0),
    "kfac, rows": partial(mukron.KFAC, lr=0.05, memory="batch", form="rows", inverse_every=5, refresh_warmup=0),
    "kfac, graft": partial(mukron.KFAC, lr=0.01, trust="graft:adam", fisher="mc"),
    "foof": partial(mukron.FOOF, lr=0.05, factor_every=2, inverse_every=4, refresh_warmup=0),
    "shampoo": partial(mukron.Shampoo, lr=0.05, inverse_every=4, refresh_warmup=0),
    "shampoo, tracked": partial(mukron.Shampoo, lr=0.05, solver="tracked", trust="graft:adam", momentum=0.9),
    "soap": partial(mukron.SOAP, lr=0.05, inverse_every=4, refresh_warmup=0),
    "muon": partial(mukron.Muon, lr=0.02, weight_decay=0.1),
    "gauss-newton": partial(mukron.GaussNewton, lr=0.02, momentum=mukron.HeavyBall(0.9, nesterov=True)),
}
BEFORE, AFTER = 7, 6  # steps before and after a checkpoint
# Whose directions rounding chooses: SOAP's of no gradient, and Adam's steps along the bias of keys, which has none.
CHOSEN_BY_ROUNDING = ("soap", "shampoo, tracked")


def start(name: str, kind: str = "mlp", dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer; other seeds have other weights."""
    model = made(kind, dtype)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * seed)
    return model, OPTIMIZERS[name](model)


def train(model: nn.Module, optimizer: Any, first: int, steps: int, kind: str = "mlp") -> None:
    """Some steps of the joined batch, each rank with its part."""
    dtype = next(model.parameters()).dtype
    ranks, rank = 1, 0
    if isinstance(model, DistributedDataParallel | FSDPModule):
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    ends = bounds(ranks)
    for step in range(first, first + steps):
        x, y = (part[ends[rank] : ends[rank + 1]] for part in batch(kind, step, dtype))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def save(model: nn.Module, optimizer: Any, folder: Path, options: StateDictOptions) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, for a checkpoint of one process
        dcp.save(state, checkpoint_id=str(folder))


def load(model: nn.Module, optimizer: Any, folder: Path, options: StateDictOptions) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


# What ranks run: each folder is that of one number of ranks, inside the one that they share.


def _started(name: str, spread: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = made("small", torch.float64)
    if spread:
        fully_shard(model.hidden)
        fully_shard(model)
    elif torch.distributed.get_world_size() > 1:
        model = DistributedDataParallel(model)
        for _ in range(
            2
        ):  # it puts gradients into other buckets after its first pass, which are summed in other orders
            x, y = batch("small", 0, torch.float64)
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()
    return model, OPTIMIZERS[name](model)


def _flattened() -> dict[str, StateDictOptions]:
    return {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def write(rank: int, folder: Path) -> None:
    """Train, save, and train on."""
    warnings.simplefilter("ignore")
    for name in OPTIMIZERS:
        model, optimizer = _started(name)
        train(model, optimizer, 0, BEFORE, "small")
        for form, options in _flattened().items():
            save(model, optimizer, folder.parent / name / form, options)
        found = Bundle(contents(optimizer))  # on all ranks, each of which has a part of it
        if rank == 0:
            torch.save(found, folder.parent / name / "contents.pt")
        train(model, optimizer, BEFORE, 3, "small")
        if rank == 0:
            torch.save(get_model_state_dict(model), folder.parent / name / "end.pt")


def _contents(folder: Path) -> Bundle:
    """Those of the optimizer that was saved."""
    return Bundle(mukron.optim.saving.opened(torch.load(folder / "contents.pt", weights_only=True)))


def read(rank: int, folder: Path) -> None:
    """Load, compare what was loaded bit for bit, train on, and compare where that ends."""
    warnings.simplefilter("ignore")
    exact = folder.name == (folder.parent / "exact").read_text()
    for name in OPTIMIZERS:
        saved = _contents(folder.parent / name)
        end = torch.load(folder.parent / name / "end.pt", weights_only=True)
        for form, options in _flattened().items():
            model, optimizer = _started(name)
            load(model, optimizer, folder.parent / name / form, options)
            assert Bundle(contents(optimizer)) == saved, (name, form)
            train(model, optimizer, BEFORE, 3, "small")
            weights = get_model_state_dict(model)
            equal_everywhere(weights, name)
            for key, value in end.items():
                off = float((weights[key] - value).norm() / value.norm())
                near = off == 0 if exact else off < 1e-6 or name in CHOSEN_BY_ROUNDING
                assert near, (name, form, key, off)


SPREAD = ("kfac", "kfac, ema", "kfac, graft", "shampoo", "muon")


def write_spread(rank: int, folder: Path) -> None:
    """Train a sharded model, save, and train on."""
    warnings.simplefilter("ignore")
    for name in SPREAD:
        model, optimizer = _started(name, spread=True)
        train(model, optimizer, 0, BEFORE, "small")
        for form, options in _flattened().items():
            save(model, optimizer, folder.parent / name / form, options)
        train(model, optimizer, BEFORE, 3, "small")
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(weights, folder.parent / name / "end.pt")


def read_spread(rank: int, folder: Path) -> None:
    """Load on sharded or whole models, train on, and compare where that ends."""
    warnings.simplefilter("ignore")
    for name in SPREAD:
        for spread in (True, False) if torch.distributed.get_world_size() > 1 else (False,):
            _goes_on(name, spread, folder.parent / name)


def read_on_spread(rank: int, folder: Path) -> None:
    """Load what a whole model saved on sharded ones: the same state, bit for bit."""
    warnings.simplefilter("ignore")
    for name in SPREAD:
        _goes_on(name, True, folder.parent / name, _contents(folder.parent / name))


def _goes_on(name: str, spread: bool, folder: Path, saved: Bundle | None = None) -> None:
    """Whether training goes on from there; ``saved`` is what the optimizer must then have."""
    end = torch.load(folder / "end.pt", weights_only=True)
    for form, options in _flattened().items():
        model, optimizer = _started(name, spread)
        load(model, optimizer, folder / form, options)
        assert optimizer.steps == BEFORE
        assert saved is None or Bundle(contents(optimizer)) == saved, (name, form)
        train(model, optimizer, BEFORE, 3, "small")
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for key in end if torch.distributed.get_rank() == 0 else ():
            off = float((weights[key] - end[key]).norm() / end[key].norm())
            assert off < 1e-6, (name, form, spread, key, off)


def broadcast(rank: int, folder: Path) -> None:
    """The first rank alone has a state, which torch sends to the others."""
    warnings.simplefilter("ignore")
    for name in OPTIMIZERS:
        model, optimizer = _started(name)
        train(model, optimizer, 0, BEFORE, "small")
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = {key: value.clone() for key, value in get_model_state_dict(model).items()}
        state = get_optimizer_state_dict(model, optimizer, options=full)
        fresh, other = _started(name)
        set_model_state_dict(fresh, weights)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(fresh, other, state if rank == 0 else {}, options=options)
        assert Bundle(contents(other)) == Bundle(contents(optimizer)), name
        train(model, optimizer, BEFORE, 2, "small")
        train(fresh, other, BEFORE, 2, "small")
        assert all(map(torch.equal, model.parameters(), fresh.parameters())), name
