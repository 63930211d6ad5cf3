"""Parametrizing before and after ``fully_shard``, in several processes: the weights are those of a model that is whole.

Sizes are not divisible by the number of processes, and some are smaller: a process may hold nothing of a parameter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from ranks import bounds, in_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mukron.params import Parametrization, ParametrizationError, base_shapes, parametrize

BASE, WIDTH, ROWS, VOCABULARY = 5, 10, 12, 7


class Odd(nn.Module):
    """Values that are scaled by a law, by their measured std, around 1, in a tied weight, and single ones."""

    mukron_roles: ClassVar = {"token.weight": "input", "gain": "vector"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 4 * width)
        self.turned = nn.Linear(4 * width, 34, bias=False)  # tall at the base width, wide here
        self.down = nn.Linear(34, width)
        self.gain = nn.Parameter(1 + 0.3 * width**-0.5 * torch.randn(width))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.value = nn.Linear(width, 1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        nn.init.orthogonal_(self.turned.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.token(tokens).mean(1)
        h = h + self.down(torch.tanh(self.turned(torch.tanh(self.up(h))))) * self.gain + self.frozen(h)
        return self.head(h) * (self.scale + self.value(h))


def made(width: int = WIDTH, seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd(width).double()


def shard(model: nn.Module, sizes: tuple[int, ...] | None = None, **options) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(sizes) :] if sizes else None
    mesh = init_device_mesh("cpu", sizes or (torch.distributed.get_world_size(),), mesh_dim_names=names)
    fully_shard(model.up, mesh=mesh, **options)  # a layer on its own, whose class changes
    return fully_shard(model, mesh=mesh, **options)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().full_tensor() for name, value in model.named_parameters()}


def same_weights(model: nn.Module, whole: nn.Module) -> None:
    weights = full(model)
    for name, value in whole.named_parameters():
        assert torch.equal(weights[name], value), name


def marks(model: nn.Module) -> list[tuple[str, int, bool, bool]]:
    return [(name, id(value), value.requires_grad, value.is_leaf) for name, value in model.named_parameters()]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (ROWS, 3), generator=generator), torch.arange(ROWS) % VOCABULARY


def rates(plan: Parametrization, model: nn.Module) -> dict[str, float]:
    """The learning rates of the model's own parameters, by name."""
    names = {id(value): name for name, value in model.named_parameters()}
    groups = plan.param_groups("adamw", lr=0.1)
    return {names[id(value)]: group["lr"] for group in groups for value in group["params"]}


# What the ranks run.


def weights_are_those_of_the_whole_model(rank: int) -> None:
    """Three ranks, some of which hold nothing of the smallest parameters."""
    laws, no_laws = base_shapes(Odd, width=BASE), base_shapes(made(BASE, seed=1))  # then types of layers decide
    for shapes, scheme, options in ((laws, "mup", {"output_exponent": "zero"}), (no_laws, "mup", {}), (laws, "sp", {})):
        whole, model, early = made(), shard(made()), made()
        expected = parametrize(whole, shapes, scheme, **options)
        before = marks(model)
        plan = parametrize(model, shapes, scheme, **options)
        assert plan == expected
        assert marks(model) == before
        same_weights(model, whole)
        unchanged = {name for name, value in made().named_parameters() if torch.equal(value, full(model)[name])}
        assert {"turned.weight", "up.bias"}.isdisjoint(unchanged) == (scheme == "mup")
        assert ("gain" in unchanged) == (scheme == "sp" or shapes is no_laws)
        assert parametrize(model, shapes, scheme, **options) == plan
        same_weights(model, whole)
        # sharded afterwards: the plan that was made before still knows the model
        plan = parametrize(early, shapes, scheme, **options)
        shard(early)
        assert parametrize(early, shapes, scheme, **options) == plan == plan.bind(early)
        same_weights(early, whole)
        assert rates(plan, early) == rates(expected, whole)
    assert model.value.weight.to_local().numel() == (WIDTH if rank == 0 else 0)
    plan.check(plan.to_dict())
    assert str(plan.explain("adamw")) == str(expected.explain("adamw"))
    assert set(model.state_dict()) == set(made().state_dict())
    with pytest.raises(ParametrizationError, match="already parametrized"):
        parametrize(model, shapes, "mup")


def meta_models_get_values_later(rank: int) -> None:
    """Three ranks: a plan on the meta device, refusals of memory without values, then the values."""
    from torch.distributed.tensor import distribute_tensor

    shapes, whole, start = base_shapes(Odd, width=BASE), made(), made()
    expected = parametrize(whole, shapes)
    with torch.device("meta"):
        model = Odd(WIDTH).double()
    early = parametrize(model, shapes)
    shard(model)
    assert parametrize(model, shapes) == early == expected
    assert all(value.is_meta for value in model.parameters())
    model.to_empty(device="cpu")

    def initialize() -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start.parameters(), strict=True):
                parameter.copy_(distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements))

    initialize()
    if rank == 1:  # one number on one rank
        model.up.weight.to_local().detach()[1, 1] = torch.nan
    with pytest.raises(ParametrizationError, match=r'"up.weight": its values are not all finite; initialize it'):
        parametrize(model, shapes)
    nn.init.zeros_(model.up.weight)
    with pytest.raises(ParametrizationError, match=r'"up.weight": its values are all equal here but vary at the base'):
        parametrize(model, shapes)
    initialize()
    assert parametrize(model, shapes) == expected
    same_weights(model, whole)
    trained = {id(value) for group in early.param_groups("sgd", lr=1.0) for value in group["params"]}
    assert trained == set(map(id, model.parameters()))


def hybrid_meshes_and_other_dimensions(rank: int) -> None:
    """Two ranks."""
    from torch.distributed.tensor import Shard

    shapes, whole = base_shapes(Odd, width=BASE), made()
    expected = parametrize(whole, shapes)

    def last(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    for sizes, options in (((1, 2), {}), ((2, 1), {}), ((2,), {"shard_placement_fn": last})):
        model = shard(made(), sizes, **options)
        assert parametrize(model, shapes) == expected
        same_weights(model, whole)
    assert model.up.weight.placements == (Shard(1),)
    with pytest.raises(ParametrizationError, match="processes that should hold the same values hold different"):
        parametrize(shard(made(seed=rank), (2, 1)), shapes)  # replicas that were drawn apart


def other_placements_are_refused(rank: int) -> None:
    """Two ranks."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shapes = base_shapes(lambda width: nn.Linear(4, width, bias=False), width=2)
    mesh, both = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    alone = DeviceMesh("cpu", torch.tensor([rank]))
    strided = _StridedShard(0, split_factor=2)
    for place, placements, named in (
        (mesh, [Partial()], r"\[P.*\] over 2 of them"),
        (mesh, [Shard(0)], r"\[S.*\] over 2 of them"),
        (both, [strided, Shard(0)], r"\[.*, .*\] over 2 of them"),
        (both, [Shard(0), Shard(1)], r"\[.*, .*\] over 2 of them"),
        (alone, [Shard(0)], r"\[.*\] over 1 of them"),
        (alone, [Replicate()], r"\[.*\] over 1 of 2 processes"),
    ):
        model = nn.Linear(4, 8, bias=False)
        values = DTensor.from_local(model.weight.detach().clone(), place, placements, run_check=False)
        model.weight = nn.Parameter(values)
        with pytest.raises(ParametrizationError, match=f'"weight" (is|are) spread .*as {named}'):
            parametrize(model, shapes)
    model = nn.Linear(4, 8, bias=False)
    torch.distributed.broadcast(model.weight.detach(), 0)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
    assert parametrize(model, shapes).parameters["weight"].shape == (8, 4)
    with pytest.raises(ParametrizationError, match="the factory returned a model whose parameters are DTensors"):
        base_shapes(lambda width: model, width=4)


def training_is_that_of_replicas(rank: int, folder: Path) -> None:
    """AdamW with the plan's groups on a sharded model takes the steps that it takes with DistributedDataParallel."""
    if (reason := no_forward_pass()) is not None:
        (folder / "skipped").write_text(reason)
        return
    size, shapes = torch.distributed.get_world_size(), base_shapes(Odd, width=BASE)
    ends = bounds(size, ROWS)
    part = slice(ends[rank], ends[rank + 1])

    def train(model: nn.Module, groups: list[dict]) -> None:
        optimizer = torch.optim.AdamW([{**group, "params": trained(group["params"])} for group in groups])
        for step in range(10):
            optimizer.zero_grad()
            x, y = batch(step)
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()

    whole, model = made(), shard(made())
    settings = {"lr": 0.01, "weight_decay": 0.1}
    train(DistributedDataParallel(whole), parametrize(whole, shapes).param_groups("adamw", **settings))
    model(batch(0)[0])  # leaves gathered parameters behind, which are not the ones that are trained
    plan = parametrize(model, shapes)
    model(batch(0)[0])
    train(model, plan.param_groups("adamw", **settings))
    x, _ = batch(11)
    assert torch.allclose(model(x), whole(x), rtol=0, atol=1e-10)
    model.reshard()
    weights, start = full(model), dict(made().named_parameters())
    for name, value in whole.named_parameters():
        assert float((weights[name] - value.detach()).abs().max()) <= 1e-10, name
        assert not value.requires_grad or not torch.equal(value, start[name]), name


def trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def no_forward_pass() -> str | None:
    """Why a model that is sharded over CPUs cannot be trained; None: it can. Old versions of gloo lack a collective."""
    model = shard(made())
    try:
        model(batch(0)[0]).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 9):
            raise
        return f"torch {torch.__version__} cannot train a model that is sharded over CPUs: {error}"
    return None


def two_ranks(rank: int, folder: Path) -> None:
    hybrid_meshes_and_other_dimensions(rank)
    other_placements_are_refused(rank)
    training_is_that_of_replicas(rank, folder)


def three_ranks(rank: int, folder: Path) -> None:
    weights_are_those_of_the_whole_model(rank)
    meta_models_get_values_later(rank)
    training_is_that_of_replicas(rank, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "size"), [(two_ranks, 2), (three_ranks, 3)])
def test_sharded_models_are_those_that_are_whole(function, size, tmp_path):
    in_ranks(f"params.test_sharded:{function.__name__}", size, tmp_path)
    if (skipped := tmp_path / "skipped").exists():
        pytest.skip(skipped.read_text())


def test_plain_models_need_no_dtensor():
    code = """
import sys, torch
from torch import nn
before = "torch.distributed.tensor" in sys.modules
import mukron
shapes = mukron.base_shapes(lambda width: nn.Linear(4, width), width=2)
model = nn.Linear(4, 8)
mukron.parametrize(model, shapes).param_groups("sgd", lr=1.0)
print(before, "torch.distributed.tensor" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[1] == result.stdout.split()[0]
