"""What ranks run in ``test_set_ups.py``: set-ups that are refused on all of them, or not stumbled over."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from ranks import SPREAD, batch, bounds, compared, equal_everywhere, made
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron

warnings.simplefilter("ignore")
F64 = torch.float64


@contextmanager
def hidden_group():
    """What is trained inside is trained by one process."""
    initialized, distributed.is_initialized = distributed.is_initialized, lambda: False
    try:
        yield
    finally:
        distributed.is_initialized = initialized


def backward(model, step, scale=1.0):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    x, y = (part[slice(*bounds(size)[rank : rank + 2])] for part in batch("mlp", step, F64))
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()


def options_that_differ(rank, folder):
    for first, other in (
        ({"communication": "rows"}, {"communication": "owner"}),
        ({"factor_every": 1}, {"factor_every": 2}),
        ({"memory": "batch"}, {"memory": "sum"}),
        ({"exclude": ()}, {"exclude": ("4",)}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.1}),
    ):
        model = DistributedDataParallel(made("mlp", F64))
        given = {"inverse_every": 2, "refresh_warmup": 0, **(other if rank else first)}
        optimizer = mukron.KFAC(model, lr=0.05, **given)
        backward(model, 0)
        with pytest.raises(RuntimeError, match=rf"the options of 2 processes differ \({next(iter(other))}.* on rank 1"):
            optimizer.step()


def a_scaler(rank, folder):
    """Gradients are averaged after it has looked at them: it would let one rank step, and not another."""
    world, scaler = distributed.group.WORLD, torch.amp.GradScaler("cpu")
    model = made("mlp", F64)
    optimizer = mukron.KFAC(model, lr=0.05, process_group=world)
    scale = float(scaler.scale(torch.ones(())))
    backward(model, 0, float("inf") if rank else scale)
    with pytest.raises(RuntimeError, match="Wrap the model in DistributedDataParallel"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="without a GradScaler"):
        mukron.GaussNewton(model, lr=0.05, process_group=world, grad_scaler=scaler)
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    assert optimizer.steps == 1
    alone = mukron.KFAC(made("mlp", F64), lr=0.05, process_group=[distributed.new_group([k]) for k in range(2)][rank])
    scaler.scale(F.cross_entropy(alone.model(torch.ones(4, 6, dtype=F64)), torch.arange(4))).backward()
    scaler.step(alone)
    assert alone.steps == 1


def a_first_step_of_no_length(rank, folder):
    """A schedule begins at zero, and one rank has gradients of zeros: that step is none that makes a state."""
    model = made("mlp", F64)
    optimizer = mukron.Shampoo(model, lr=0.0, process_group=distributed.group.WORLD)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    assert optimizer.steps == 2
    fresh = mukron.Shampoo(made("mlp", F64), lr=0.0, process_group=distributed.group.WORLD)
    for parameter in fresh.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fresh.step()
    assert fresh.steps == 0


def replicas_that_differ(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = made("mlp", F64)
    with torch.no_grad():
        model[0].bias.add_(rank // 2)
    optimizer = mukron.KFAC(fully_shard(model, mesh=mesh), lr=0.05)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="the weights of 4 processes differ"):
        optimizer.step()


def replicate_without_shards(rank, folder):
    """Parameters are DTensors of which every rank has all."""
    import ranks
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    ranks.spread = partial(replicate, mesh=init_device_mesh("cpu", (2,)))
    for method in (mukron.KFAC, mukron.Shampoo):
        make = partial(method, lr=0.05, momentum=0.9)
        compared(f"{method.__name__}, replicate", "mlp", make, F64, 1e-10, steps=3, how=SPREAD)


def layers_added_later(rank, folder):
    """At a step that measures nothing: until its way is known, a layer is with all ranks, as those that are there."""
    weights = []
    for group in ({"process_group": distributed.group.WORLD}, {}):
        model = made("mlp", F64)
        with nullcontext() if group else hidden_group():
            first, *later = (list(model[k].parameters()) for k in (0, 2, 4))
            given = {"lr": 0.05, "factor_every": 2, "inverse_every": 2, "refresh_warmup": 0, "exclude": ()}
            optimizer = mukron.KFAC(model, params=first, communication="rows", **given, **group)
            for step in range(6):
                if step == 3:
                    optimizer.add_param_group({"params": [*later[0], *later[1]]})
                optimizer.zero_grad()
                if group:
                    backward(model, step)
                else:
                    x, y = batch("mlp", step, F64)
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
        weights.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    equal_everywhere(weights[0], "added later")
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-10, atol=1e-10, msg=name)


def tensor_parallelism(rank, folder):
    """A layer of which each rank has some rows looks like one of fully_shard, but sees the batch of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parallel(mesh, layers=layers, model=None):
        return parallelize_module(made("mlp", F64) if model is None else model, mesh, layers)

    def ignored(model):
        return fully_shard(model, ignored_params={p for p in model.parameters() if hasattr(p, "placements")})

    said = r'parameters "0.weight".* are spread over processes by tensor parallelism .*: the first one as \[\w*Shard'
    remedy = r".* train with fully_shard .*HSDP.*, replicate or DistributedDataParallel"
    for method in (mukron.KFAC, mukron.FOOF, mukron.GaussNewton, mukron.Shampoo, mukron.SOAP, mukron.Muon):
        with pytest.raises(ValueError, match=said + remedy):
            method(parallel(init_device_mesh("cpu", (2,))), lr=0.05)
    normed = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))
    parallel(init_device_mesh("cpu", (2,)), {"1": SequenceParallel()}, normed)
    with pytest.raises(ValueError, match=r'parameters "1.weight", "1.bias" .*: the first one as \[Replicate'):
        mukron.KFAC(normed, lr=0.05, exclude=())
    shapes = mukron.base_shapes(lambda width: torch.nn.Linear(6, width), 8)
    for model, what in (
        (parallel(init_device_mesh("cpu", (2,))), said),
        (ignored(parallel(init_device_mesh("cpu", (2,)))), said),
        (fully_shard(parallel(both["tensor"]), mesh=both["data"]), said),
        (fully_shard(parallel(both["tensor"], {"0": SequenceParallel()}), mesh=both["data"]), said),
    ):
        with pytest.raises(ValueError, match=what):
            mukron.KFAC(model, lr=0.05)
        with pytest.raises(ValueError, match=what):
            mukron.parametrize(model, shapes)


def sharded_parameters_in_other_places(rank, folder):
    """Parameters of fully_shard that others have taken the place of are still its own."""
    from torch.distributed.fsdp import fully_shard

    assigned = fully_shard(made("mlp", F64))
    assigned.load_state_dict({name: value.clone() for name, value in assigned.state_dict().items()}, assign=True)
    with torch.device("meta"):
        empty = fully_shard(made("mlp", F64)).to_empty(device="cpu")
    tied = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    tied[1].weight = tied[0].weight
    for model in (assigned, empty, fully_shard(tied)):
        assert mukron.Shampoo(model, lr=0.05, exclude=()).entries


def gradients_in_half_precision(model):
    """What fp16_compress_hook makes of the gradients of all ranks, by hand."""
    size = distributed.get_world_size()
    for parameter in model.parameters():
        half = parameter.grad.to(torch.float16).div_(size)
        distributed.all_reduce(half)
        parameter.grad.copy_(half)


COMPRESSED = (
    lambda model: mukron.KFAC(model, lr=0.05),
    lambda model: mukron.KFAC(model, lr=0.05, trust=None, fisher="empirical"),
    lambda model: mukron.FOOF(model, lr=0.05, communication="owner"),
    lambda model: mukron.GaussNewton(model, lr=0.05),
    lambda model: mukron.Shampoo(model, lr=0.05),
    lambda model: mukron.Muon(model, lr=0.02),
)


def compressed_gradients(rank, folder):
    """Hooks of DistributedDataParallel: a step of the compressed gradients, with the curvature of the joined batch."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    for make in COMPRESSED:
        ends = {}
        for hook in ("none", "half", "half, by hand", "low rank"):
            model = made("mlp", F64)
            called = model if "by hand" in hook else DistributedDataParallel(model)
            if hook == "half":
                called.register_comm_hook(None, fp16_compress_hook)
            if hook == "low rank":
                called.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
            optimizer = make(called)
            for step in range(6):
                optimizer.zero_grad()
                backward(called, step)
                if "by hand" in hook:
                    gradients_in_half_precision(model)
                optimizer.step()
            assert optimizer.steps == 6
            ends[hook] = {name: value.detach().clone() for name, value in model.named_parameters()}
            equal_everywhere(ends[hook], f"{optimizer.spec.name}, {hook}")
        off = {
            one: max(float((value - ends[other][name]).norm() / value.norm()) for name, value in ends[one].items())
            for one, other in (("half", "half, by hand"), ("none", "half"), ("low rank", "none"))
        }
        assert off["half"] == 0, f"{optimizer.spec.name}: {off}"
        assert 0 < off["none"] < off["low rank"], f"{optimizer.spec.name}: {off}"
