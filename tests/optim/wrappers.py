"""What ranks run in ``test_wrappers.py``: options of what wraps or shards a model."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import ranks
import torch
from joined_batches import METHODS
from ranks import OWN, SPREAD, WRAPPED, batch, bounds, compared, equal_everywhere, made, reference_of
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
F64, F32 = torch.float64, torch.float32
EVERY = ("kfac", "kfac, exact", "kfac, empirical", "foof", "gauss-newton", "shampoo", "muon")


def accumulated(called, optimizer, steps, micro):
    """Micro-batches, of which the last one alone is inside of what averages gradients."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    rows = 12 // micro
    part = slice(*bounds(size, rows)[rank : rank + 2])
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch("mlp", step, F64)
        for k in range(micro):
            called.require_backward_grad_sync = k == micro - 1  # as no_sync() has it
            xs, ys = x[k * rows : (k + 1) * rows][part], y[k * rows : (k + 1) * rows][part]
            (F.cross_entropy(called(xs), ys, reduction="sum") * size / 12).backward()
        optimizer.step()


def no_sync(rank, folder):
    """Curvature of all micro-batches, also of those whose gradients wait for the last one."""
    for name in EVERY:
        for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            model = made("mlp", F64)
            called = DistributedDataParallel(model, **options)
            accumulated(called, METHODS[name](called), 6, 2)
            ours = {key: value.detach().clone() for key, value in model.state_dict().items()}
            equal_everywhere(ours, name)
            for key, value in reference_of("mlp", METHODS[name], F64, 6, 2, "cpu").items():
                off = float((ours[key] - value).norm() / value.norm())
                assert off < 1e-10, f"{name}, {options}: {key} is {off:.1e} off"


def static_graph(rank, folder):
    """A graph that stays, and the function that wraps in place."""
    from torch.distributed._composable.replicate import replicate

    for wrap in (partial(DistributedDataParallel, static_graph=True), replicate):
        ranks.DistributedDataParallel = lambda model, find_unused_parameters=False, wrap=wrap: wrap(model)
        for name in EVERY:
            compared(f"{name}, {wrap}", "mlp", METHODS[name], F64, 1e-10, steps=6)


def twenty_steps(rank, folder):
    """In float64, after as many steps as in float32: ranks are bit-identical, and where one process is."""
    for name in ("kfac", "kfac, empirical", "foof", "gauss-newton", "shampoo", "muon"):
        for how in (WRAPPED, OWN, SPREAD):
            compared(f"{name}, {how}", "mlp", METHODS[name], F64, 1e-10, steps=20, how=how)


def casts(rank, folder):
    """What the last layer returns is cast by fully_shard before anybody sees it; with bfloat16, that of every layer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def spread(model, policy, last=None):
        for place, child in enumerate(model):
            if any(True for _ in child.parameters()):
                fully_shard(child, mp_policy=last if last is not None and place == len(model) - 1 else policy)
        return fully_shard(model, mp_policy=last or policy)

    single = MixedPrecisionPolicy(param_dtype=F32)
    ranks.spread = partial(spread, policy=single, last=MixedPrecisionPolicy(param_dtype=F32, output_dtype=F64))
    measured = ("kfac", "kfac, exact", "kfac, empirical", "foof", "gauss-newton")
    for name in measured:
        compared(f"{name}, cast", "mlp", METHODS[name], F32, 1e-5, steps=6, how=SPREAD)
    ranks.spread = partial(spread, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=F32))
    for name in measured:
        equal_everywhere(ranks.trained("mlp", METHODS[name], F32, 6, 2, rank, how=SPREAD), name)


def a_small_gradient(rank, folder):
    """That of a bias which was unfrozen after the model was wrapped is not averaged, and is small beside the others."""
    for name in ("kfac", "foof", "shampoo"):
        model = made("mlp", F64)
        model[1] = model[3] = torch.nn.Identity()
        model[4].bias.requires_grad_(False)
        called = DistributedDataParallel(model)
        optimizer = METHODS[name](called)

        def backward(step, called, optimizer=optimizer):
            optimizer.zero_grad()
            x, y = (part[6 * rank : 6 * rank + 6] for part in batch("mlp", step, F64))
            F.cross_entropy(called(1e3 * x), y).backward()

        for step in range(2):
            backward(step, called)
            optimizer.step()
        model[4].bias.requires_grad_(True)
        backward(2, called)
        own = torch.stack([parameter.grad.abs().sum() for parameter in model.parameters()])
        told = [torch.empty_like(own) for _ in range(2)]
        distributed.all_gather(told, own)
        assert abs(float(told[0].sum() / told[1].sum()) - 1) < 1e-4  # all together do not show it
        with pytest.raises(RuntimeError, match=r'the gradients of 2 .* differ \(of "4.bias"\).* wrap the model again'):
            optimizer.step()
        backward(2, DistributedDataParallel(model))
        optimizer.step()
        assert optimizer.steps == 3
