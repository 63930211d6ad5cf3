"""Counts what arrives in a step of an MLP, in several processes over gloo on the CPU.

``python -m mukron.bench.communication.ranks RANK RANKS STORE SIZES`` is one of them; SIZES is JSON. ``count_in_ranks``
starts them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mukron.imports import current_folder_after_python
from mukron.models import MLP
from mukron.optim import KFAC
from mukron.optim.communication import BY_TIME, WAYS, Communication
from mukron.optim.counting import CollectiveCount
from mukron.optim.prediction import predict
from mukron.optim.ranked_run import DDP, PLAIN, RankedRun
from mukron.optim.shapes import shapes_of
from mukron.workers.foreman import START

INPUTS, OUTPUTS, LR = 784, 10, 1e-4
UNCOUNTED = 2  # steps at the start, which look at their passes more closely
COUNTING_LIMIT = 1800.0  # seconds for all steps of one number of ranks
SGD, ALL_REDUCED = "SGD", "all-reduced factors"
AS_IT_IS, EMPIRICAL, PAPERS_STEP = "defaults", "empirical Fisher", "plain step"  # K-FAC as it is, or with an option
OPTIONS: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    EMPIRICAL: {"fisher": "empirical"},
    PAPERS_STEP: {"trust": "none"},
}
COUNTED_KFACS = ((AS_IT_IS, PLAIN), (EMPIRICAL, PLAIN), (PAPERS_STEP, PLAIN), (AS_IT_IS, DDP))  # who averages


@dataclass(frozen=True)
class CountedStep:
    """What arrived in one step, the mean over ranks.

    Attributes:
        ranks, width, batch: How many processes, the network's width, and samples of all processes together.
        optimizer: "SGD", "all-reduced factors", or K-FAC's "defaults", "empirical Fisher" or "plain step".
        averaged: Who averages gradients: "ddp", or "plain": the optimizer.
        communication: How curvature travels.
        bytes: Of numbers.
        headers: Bytes of integers: sizes and pickled objects.
        predicted: Bytes of numbers by the formulas.
        schemes: How the curvature of each layer has travelled.
    """

    ranks: int
    width: int
    batch: int
    optimizer: str
    averaged: str
    communication: str
    bytes: float
    headers: float
    predicted: float
    schemes: dict[str, str]


@dataclass(frozen=True)
class CountedSizes:
    """Which steps are counted.

    Attributes:
        widths: Of the network.
        batches: Samples of all processes together.
        ranks: Numbers of processes.
        bandwidth: Bytes a second, which "auto" chooses by.

    Example:
        >>> CountedSizes((256,), (64,), (2,)).bandwidth
        10000000.0
    """

    widths: tuple[int, ...]
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    bandwidth: float = 1e7

    def __post_init__(self) -> None:
        if min(self.ranks) < 2:
            raise ValueError(f"ranks={min(self.ranks)}: nothing travels; give at least 2")
        if min(self.batches) < max(self.ranks):
            raise ValueError(f"batch {min(self.batches)}: {max(self.ranks)} ranks need a sample each")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth={self.bandwidth:g}: expected a positive number a second")


def count_in_ranks(sizes: CountedSizes, ranks: int) -> list[CountedStep]:
    """Count all steps with one number of processes.

    Args:
        sizes: Widths and batches.
        ranks: The number of processes.

    Raises:
        RuntimeError: A process failed; the error has its last line.
    """
    places = os.pathsep.join(current_folder_after_python(sys.path))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", START, __spec__.name]
        given = [str(ranks), str(Path(folder) / "store"), json.dumps(asdict(sizes))]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *given],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            ends = [process.communicate(timeout=COUNTING_LIMIT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, ends, strict=True)):
        if process.returncode:
            lines = errors.strip().splitlines()
            raise RuntimeError(f"rank {rank} of {ranks} failed: {lines[-1] if lines else process.returncode}")
    return [CountedStep(**step) for step in json.loads(ends[0][0].splitlines()[-1])]


def count_here(sizes: CountedSizes) -> list[CountedStep]:
    """Count all steps, in one of several processes.

    Args:
        sizes: Widths and batches.
    """
    steps = []
    for width in sizes.widths:
        for batch in sizes.batches:
            steps += [count_sgd(width, batch), count_all_reduced(width, batch)]
            for optimizer, averaged in COUNTED_KFACS:
                for way in (*WAYS, BY_TIME):
                    communication = Communication(way, sizes.bandwidth if way == BY_TIME else None)
                    steps.append(count_kfac(width, batch, optimizer, averaged, communication))
    return steps


def count_sgd(width: int, batch: int) -> CountedStep:
    """A step of SGD in DistributedDataParallel.

    Args:
        width: Of the network.
        batch: Samples of all processes.
    """
    model = DistributedDataParallel(_network(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    arrived = _counted(model, batch, optimizer.step, optimizer.zero_grad)
    predicted = predict(shapes_of(_network(width), *_kfac({})), _run(batch, AS_IT_IS, DDP, Communication())).sgd
    return _step(width, batch, (SGD, DDP, ""), arrived, predicted, {})


def count_all_reduced(width: int, batch: int) -> CountedStep:
    """The collectives of a K-FAC that all-reduces both factors of each layer whole, and broadcasts moves.

    Args:
        width: Of the network.
        batch: Samples of all processes.
    """
    model = DistributedDataParallel(_network(width))

    def step() -> None:
        for number, weight in enumerate(model.parameters()):
            for d in weight.shape:
                distributed.all_reduce(torch.zeros(d, d))
            distributed.broadcast(torch.zeros_like(weight), number % distributed.get_world_size())

    arrived = _counted(model, batch, step, model.zero_grad)
    predicted = predict(shapes_of(_network(width), *_kfac({})), _run(batch, AS_IT_IS, DDP, Communication())).kaisa
    return _step(width, batch, (ALL_REDUCED, DDP, ""), arrived, predicted, {})


def count_kfac(width: int, batch: int, optimizer: str, averaged: str, communication: Communication) -> CountedStep:
    """A step of K-FAC.

    Args:
        width: Of the network.
        batch: Samples of all processes.
        optimizer: "defaults", "empirical Fisher" or "plain step".
        averaged: "ddp" or "plain".
        communication: How curvature travels.
    """
    network, options = _network(width), OPTIONS[optimizer]
    shapes, run = shapes_of(network, *_kfac(options)), _run(batch, optimizer, averaged, communication)
    model = DistributedDataParallel(network) if averaged == DDP else network
    group = distributed.group.WORLD if averaged == PLAIN else None
    kfac = KFAC(model, lr=LR, communication=communication, process_group=group, **KFAC.spec.parsed(options))
    arrived = _counted(model, batch, kfac.step, kfac.zero_grad)
    schemes = {name: way.name for name, way in kfac.together.schemes.items()}
    of_layers = {shape.name: schemes[shape.name] for shape in shapes.layers}
    predicted = predict(shapes, run, of_layers).total
    return _step(width, batch, (optimizer, averaged, communication.scheme), arrived, predicted, schemes)


def _network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return MLP(width, inputs=INPUTS, classes=OUTPUTS)


def _kfac(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return KFAC.spec, KFAC.spec.all_options(options)


def _run(batch: int, optimizer: str, averaged: str, communication: Communication) -> RankedRun:
    options = OPTIONS[optimizer]
    ranks = distributed.get_world_size()
    return RankedRun(ranks, batch, 1, "kfac", options, communication=communication, sharding=averaged)


def _counted(
    model: nn.Module, batch: int, step: Callable[[], object], forget: Callable[[], object]
) -> tuple[float, float]:
    """Bytes of numbers and of headers in one step, the means over ranks."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    part = slice(batch * rank // ranks, batch * (rank + 1) // ranks)
    count = CollectiveCount()
    for number in range(UNCOUNTED + 1):
        x, y = _samples(number, batch)
        with count if number == UNCOUNTED else nullcontext():
            forget()
            F.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            step()
    both = torch.tensor([count.numbers, count.headers], dtype=torch.float64)
    distributed.all_reduce(both)
    numbers, headers = (both / ranks).tolist()
    return numbers, headers


def _samples(number: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(batch, INPUTS, generator=generator), torch.randint(OUTPUTS, (batch,), generator=generator)


def _step(
    width: int,
    batch: int,
    how: tuple[str, str, str],
    arrived: tuple[float, float],
    predicted: float,
    schemes: dict[str, str],
) -> CountedStep:
    ranks = distributed.get_world_size()
    return CountedStep(ranks, width, batch, *how, *arrived, 4 * predicted / ranks, schemes)


def main(arguments: Sequence[str]) -> None:
    """One process: its rank, how many there are, the file they meet at, and what to count."""
    rank, ranks, store, sizes = arguments
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    given = json.loads(sizes)
    widths, batches, of_ranks = (tuple(given[name]) for name in ("widths", "batches", "ranks"))
    steps = count_here(CountedSizes(widths, batches, of_ranks, given["bandwidth"]))
    print(json.dumps([asdict(step) for step in steps]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
