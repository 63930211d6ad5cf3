"""What ranks do that ``test_communication`` starts: steps whose bytes are counted, beside what was predicted."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import torch
from ranks import bounds
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.optim.communication import BY_FACTORS, BY_OWNER, WAYS, Communication, Speed, scheme_of
from mukron.optim.counting import CollectiveCount
from mukron.optim.prediction import predict
from mukron.optim.ranked_run import DDP, FSDP, PLAIN, RankedRun
from mukron.optim.shapes import shapes_of
from mukron.table import bytes_

NUMBER, BATCH, FIRST = 4, 12, 2  # bytes; samples of all ranks; steps that check what they see
OPTIMIZERS = {
    **{"kfac": mukron.KFAC, "foof": mukron.FOOF, "gauss-newton": mukron.GaussNewton},
    **{"shampoo": mukron.Shampoo, "soap": mukron.SOAP, "muon": mukron.Muon},
}
WIDE, NARROW = (40, 24), (6, 8)  # hidden sizes: more than a batch's samples, and fewer
EVERY_2 = {"factor_every": 2, "inverse_every": 2, "refresh_warmup": 0}
CASES = [  # method, its options, hidden sizes
    ("kfac", {}, WIDE),
    ("kfac", {}, NARROW),
    ("kfac", {"trust": "none"}, WIDE),
    ("kfac", {"trust": "none", **EVERY_2}, WIDE),
    ("kfac", {"fisher": "empirical", "trust": "none"}, NARROW),
    ("kfac", {"fisher": "mc:2", "memory": "window:2"}, WIDE),
    ("kfac", {"fisher": "exact", "exclude": ["0"]}, WIDE),
    ("kfac", {"trust": "graft:adam", "form": "matrix"}, NARROW),
    ("foof", {"trust": "none"}, WIDE),
    ("gauss-newton", {}, NARROW),
]
OF_GRADIENTS = [
    ("shampoo", {}, WIDE),
    ("shampoo", {"trust": "none", "exclude": ["0"]}, NARROW),
    ("soap", {}, WIDE),
    ("muon", {}, WIDE),
]


def network(sizes):
    torch.manual_seed(0)
    first, second = sizes
    return nn.Sequential(
        *(nn.Linear(10, first), nn.LayerNorm(first), nn.Tanh(), nn.Linear(first, second, bias=False), nn.Tanh()),
        nn.Linear(second, 4),
    )


class Mixed(nn.Module):
    """An embedding, a linear layer at every position, and a convolution in two groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.first = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.conv, self.head = nn.Conv1d(6, 8, 2, groups=2), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.first(self.embedding(x)))
        return self.head(torch.tanh(self.conv(h.transpose(1, 2))).mean(-1))


def numbers(step):
    return torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(step))


def tokens(step):
    return torch.randint(7, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def counted(model, inputs, run, steps):
    """Numbers that arrived in an average step over all ranks, and the optimizer."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    part = slice(*bounds(size, BATCH)[rank : rank + 2])
    called = {DDP: DistributedDataParallel, FSDP: sharded, PLAIN: lambda model: model}[run.sharding](model)
    group = {"process_group": distributed.group.WORLD} if run.sharding == PLAIN else {}
    group |= {"communication": run.communication} if run.measures else {}
    optimizer = OPTIMIZERS[run.method](called, **group, **run.spec.parsed(run.options))
    count = CollectiveCount()
    for step in range(FIRST + steps):
        with count if step >= FIRST else nullcontext():
            optimizer.zero_grad()
            F.cross_entropy(called(inputs(step)[part]), (torch.arange(BATCH) % 4)[part]).backward()
            optimizer.step()
    assert optimizer.steps == FIRST + steps
    found = [None] * size
    distributed.all_gather_object(found, count.by_kind())
    return sum(sum(of_rank.values()) for of_rank in found) / NUMBER / steps, optimizer


def compare(model, inputs, run, sample=None):
    """What arrived, what was predicted, and what the optimizer's own plan says, are the same."""
    plan = predict(shapes_of(model, run.spec, run.known, sample), run)
    arrived, optimizer = counted(model, inputs, run, steps=run.step.factor_every)
    chosen = {name: way.name for name, way in optimizer.together.schemes.items()}
    what = f"{run.method} {run.options}, {run.sharding}, {run.communication.scheme}, {run.ranks} ranks"
    assert chosen == {load.shape.name: load.scheme for load in plan.loads}, what
    assert math.isclose(arrived, plan.total, rel_tol=1e-12), f"{what}: {arrived} arrived, predicted {plan.total}"
    planned(optimizer, plan, what)


def planned(optimizer, plan, what):
    """``optimizer.plan()`` shows the owners and bytes of a prediction, whose total is what was counted."""
    table, of_rank = optimizer.plan(whole=True), NUMBER / plan.run.ranks
    owners, arrives = (
        {row[0].removesuffix(".weight"): row[table.columns.index(column)] for row in table.rows}
        for column in ("owner", "arrives")
    )
    for load, of, moved in zip(plan.loads, plan.owners, plan.moved, strict=True):
        name = load.shape.name
        assert owners[name] == (str(of[0]) if of else "all"), f"{what}, {name}: {owners}"
        expected = f"{bytes_(of_rank * moved.total)}, {load.scheme}"
        assert arrives[name] == expected, f"{what}, {name}: {arrives}, expected {expected}"
    (note,) = (note for note in table.notes if note.startswith("in all"))
    place = "in place of" if plan.run.sharding == PLAIN else "in addition to"
    said = f"in all {bytes_(of_rank * plan.exchanged.total)} arrive per step and rank, {place} the "
    assert note.startswith(f"{said}{bytes_(of_rank * plan.sgd)} of data-parallel SGD"), f"{what}: {note}"


def held(value):
    """Numbers in tensors and operators."""
    if isinstance(value, dict):
        return sum(map(held, value.values()))
    return value.numel() if isinstance(value, torch.Tensor) else getattr(value, "memory", 0) // NUMBER


def owned(sizes):
    """Each rank holds the factors, inverses and averages that were predicted for it."""
    run = RankedRun(distributed.get_world_size(), BATCH, communication=Communication(BY_OWNER), sharding=DDP)
    plan = predict(shapes_of(network(sizes), run.spec, run.known), run)
    _, optimizer = counted(network(sizes), numbers, run, steps=1)
    kept = ("memory", "operators", "gradient_average")
    found = sum(held(state[name]) for state in optimizer.state.values() for name in kept if name in state)
    assert found == plan.state[distributed.get_rank()], f"{sizes}: {found}, predicted {plan.state}"


def steps(rank, folder):
    """What arrives in a step is what was predicted, in all ways and for whoever averages gradients."""
    size = distributed.get_world_size()
    for method, options, sizes in CASES:
        for sharding in (PLAIN, DDP):
            for scheme in WAYS if sharding == PLAIN else (BY_OWNER,):
                way = {"communication": Communication(scheme), "sharding": sharding}
                compare(network(sizes), numbers, RankedRun(size, BATCH, 1, method, options, **way))
    for method, options, sizes in OF_GRADIENTS:
        for sharding in (PLAIN, DDP):
            compare(network(sizes), numbers, RankedRun(size, BATCH, 1, method, options, sharding=sharding))
    for sizes in (WIDE, NARROW):
        owned(sizes)


def all_layers(rank, folder):
    """Positions, groups, and inputs that are tokens."""
    size = distributed.get_world_size()
    for options in ({}, {"exclude": [], "trust": "none"}):
        for sharding in (PLAIN, DDP):
            for scheme in WAYS if sharding == PLAIN else (BY_OWNER,):
                way = {"communication": Communication(scheme), "sharding": sharding}
                compare(Mixed(), tokens, RankedRun(size, BATCH, 1, "kfac", options, **way), sample=(5,))
    for method, sharding in itertools.product(("shampoo", "soap", "muon"), (PLAIN, DDP)):
        compare(Mixed(), tokens, RankedRun(size, BATCH, 1, method, sharding=sharding))


def spread(rank, folder):
    """Weights that ``fully_shard`` has spread; sizes that are cut evenly, since FSDP2 pads others."""
    size = distributed.get_world_size()
    for method, options in (("kfac", {}), ("kfac", EVERY_2), ("foof", {"trust": "none"}), ("gauss-newton", {})):
        for scheme in (BY_OWNER, BY_FACTORS):
            way = {"communication": Communication(scheme), "sharding": FSDP}
            compare(network((40, 24)), numbers, RankedRun(size, BATCH, 1, method, options, **way))
    for method in ("shampoo", "soap", "muon"):
        compare(network((40, 24)), numbers, RankedRun(size, BATCH, 1, method, sharding=FSDP))


WITHOUT_OWN_PASSES = (  # methods that read weights nowhere but in the passes of the loss
    ("kfac", {"fisher": "empirical"}),
    *((method, {}) for method in ("foof", "shampoo", "soap", "muon")),
)
WITH_OWN_PASSES = (("kfac", {}), ("gauss-newton", {}))


def gathered(rank, folder):
    """Of spread weights: how often passes gather the model, beside SGD; no step does, not even for a part of it."""
    model = sharded(network(WIDE))
    weights = NUMBER * sum(parameter.numel() for parameter in model.parameters())
    sgd, _ = gathered_by(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert sgd > 0
    for method, options in (*WITHOUT_OWN_PASSES, *WITH_OWN_PASSES):
        model = sharded(network(WIDE))
        in_passes, in_steps = gathered_by(model, OPTIMIZERS[method](model, lr=0.01, **options))
        what = f"{method}, {options}: passes gather {in_passes / sgd} times what SGD's do, steps {in_steps}"
        assert (in_passes == sgd) if (method, options) in WITHOUT_OWN_PASSES else (in_passes > 1.2 * sgd), what
        moved = in_steps.pop("all_to_all", 0)  # gradients to owners, and moves back, each to those that lack it
        assert moved <= 2 * weights + SCALARS, what
        assert sum(in_steps.values()) <= SCALARS, what


SCALARS = 400  # bytes of norms and of other numbers on which ranks agree


def gathered_by(model, optimizer):
    """Bytes that passes have gathered here after the third step, and what arrived in that step, by kind."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    part = slice(*bounds(size, BATCH)[rank : rank + 2])
    for step in range(3):
        optimizer.zero_grad()
        with CollectiveCount() as passes:
            F.cross_entropy(model(numbers(step)[part]), (torch.arange(BATCH) % 4)[part]).backward()
        with CollectiveCount() as of_step:
            optimizer.step()
    return passes.by_kind()["all_gather"], of_step.by_kind()


def measured(rank, folder):
    """ "auto:measured": all ranks take the speeds of the slowest, which then decide; a resumed run keeps the choice."""
    from mukron.optim import schemes

    size, plain = distributed.get_world_size(), schemes._seconds
    run = RankedRun(size, BATCH, communication=Communication(measured=True), sharding=PLAIN)
    _, as_found = counted(network(WIDE), numbers, run, steps=1)
    told = [None] * size
    distributed.all_gather_object(told, as_found.together.schemes)
    assert told == [told[0]] * size
    taken = set()
    for network_seconds, work_seconds in ((1e3, 1e-9), (1e-9, 1e3)):  # of the last rank; others are quick
        times = iter((network_seconds, work_seconds) if rank == size - 1 else (1e-9, 1e-9))
        schemes._seconds = lambda call, device, times=times: next(times)
        try:
            _, optimizer = counted(network(WIDE), numbers, run, steps=1)
        finally:
            schemes._seconds = plain
        powers = [2.0 ** round(math.log2(of)) for of in (
            schemes.MESSAGE * NUMBER / network_seconds, schemes.SIDE**3 / work_seconds
        )]  # fmt: skip
        chosen = {name: way.name for name, way in optimizer.together.schemes.items()}
        slowest = Speed(*powers)
        assert chosen == {
            name: scheme_of(traffic, Communication(), slowest) for name, traffic in optimizer.exchange.traffic.items()
        }, f"{slowest}: {chosen}"
        taken.add(tuple(chosen.values()))
        group = distributed.group.WORLD
        resumed = OPTIMIZERS["kfac"](network(WIDE), communication="auto:measured", process_group=group)
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.together.schemes == optimizer.together.schemes
    assert len(taken) == 2, taken
