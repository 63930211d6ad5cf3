"""What ranks do that ``test_communication`` starts: counted steps, and what ``mukron.optim.prediction`` says of them."""

from __future__ import annotations

import torch
from ranks import bounds
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.optim.communication import Communication
from mukron.optim.counting import CollectiveCount
from mukron.optim.prediction import predict
from mukron.optim.ranked_run import DDP, FSDP, PLAIN, RankedRun
from mukron.optim.shapes import shapes_of
from mukron.optim.spec import spec_of

NUMBER, BATCH, FIRST = 4, 12, 2  # bytes; samples of all ranks; steps that check what they see
OPTIMIZERS = {"kfac": mukron.KFAC, "foof": mukron.FOOF, "gauss-newton": mukron.GaussNewton}
WIDE, NARROW = (40, 24), (6, 8)  # hidden sizes: more than a rank's samples, and fewer


def network(sizes, norm=False):
    torch.manual_seed(0)
    first, second = sizes
    between = nn.LayerNorm(first) if norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(10, first), nn.Tanh(), between, nn.Linear(first, second, bias=False), nn.Tanh(), nn.Linear(second, 4)
    )


def counted(model, method, options, sharding, scheme, steps):
    """Bytes of numbers that arrived in some steps over all ranks, and the optimizer."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    begin, end = bounds(size, BATCH)[rank], bounds(size, BATCH)[rank + 1]
    called = DistributedDataParallel(model) if sharding == DDP else model
    if sharding == FSDP:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for layer in (model[0], model[2], model[3], model[5]):
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    group = {"process_group": distributed.group.WORLD} if sharding == PLAIN else {}
    parsed = spec_of(method).parsed(options)
    optimizer = OPTIMIZERS[method](called, communication=scheme, **group, **parsed)
    count = CollectiveCount()
    for step in range(FIRST + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 10, generator=generator)[begin:end], (torch.arange(BATCH) % 4)[begin:end]
        optimizer.zero_grad()
        if step < FIRST:
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
            continue
        with count:
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
    assert optimizer.steps == FIRST + steps
    found = [None] * size
    distributed.all_gather_object(found, count.by_kind())
    return sum(sum(of_rank.values()) for of_rank in found), optimizer


def compare(name, sizes, method, options, sharding, scheme, steps=1):
    model = network(sizes, norm="norm" in name)
    spec = spec_of(method)
    run = RankedRun(
        distributed.get_world_size(), BATCH, 1, method, options, communication=Communication(scheme), sharding=sharding
    )
    shapes = shapes_of(model, spec, run.known)
    plan = predict(shapes, run)
    arrived, optimizer = counted(model, method, options, sharding, scheme, steps)
    chosen = {layer: optimizer.schemes[layer].name for layer in optimizer.layers}
    assert chosen == {load.shape.name: load.scheme for load in plan.loads}, f"{name}: {chosen}"
    return arrived / NUMBER / steps, plan.total


def explore(rank, folder):
    for method, options, steps in (("kfac", {}, 1), ("foof", {"trust": "none"}, 1)):
            for scheme in ("owner", "factors"):
                for sizes in ((40, 24), (32, 8)):
                    try:
                        got, said = compare("norm", sizes, method, options, FSDP, scheme, steps)
                    except AssertionError as e:
                        got, said = str(e), 0
                    if rank == 0:
                        print("OK " if got == said else "OFF", method, options, scheme, sizes, got, said, flush=True)
