"""Run a function in several processes over gloo, and train tiny networks there and in one process.

Processes are forked from one that has imported torch and mukron, which takes longer than most of what ranks then do; it
has one thread, and has not looked for GPUs.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "mukron.optim", "mukron.params", "pytest"]
)
END = "reached the end"  # what a rank says last


def in_processes(target: Callable[..., None], size: int, folder: Path, *arguments: Any, timeout: int = 170) -> None:
    """Fail unless ``target(rank, *arguments)`` says in each process that it reached the end."""
    files = [folder / f"{target.__name__}.rank{rank}" for rank in range(size)]
    processes = [
        SERVER.Process(target=_process, args=(target, rank, file, arguments)) for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    said = [file.read_text() if file.exists() else "did not begin" for file in files]
    everything = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(said))
    assert all(f"{END}\n" in text for text in said), everything


def _process(target: Callable[..., None], rank: int, file: Path, arguments: tuple[Any, ...]) -> None:
    """One of them. It ends before torch tears its threads down."""
    with file.open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    try:
        target(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(END, flush=True)
    os._exit(0)


def in_ranks(function: str, size: int, folder: Path, timeout: int = 170) -> None:
    """Fail unless every rank reaches the end of ``module:function``, called as ``function(rank, folder)``."""
    in_processes(_rank, size, folder, size, folder, function, timeout=timeout)


def _rank(rank: int, size: int, folder: Path, function: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(rank, folder)


def in_code(code: str, size: int, folder: Path) -> None:
    """Fail unless the code reaches its end in each process; it knows its ``rank``, and a ``file`` to meet at."""
    in_processes(_code, size, folder, code, str(folder / "store"))


def _code(rank: int, code: str, file: str) -> None:
    exec(compile(code, "<code of ranks>", "exec"), {"__name__": "__main__", "rank": rank, "file": file})


class Small(nn.Module):
    """A convolution, an embedding, attention and a head that all share one output of [samples, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.conv = nn.Conv1d(6, 5, 2)
        self.hidden = nn.Linear(5, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = torch.tanh(self.conv(h.transpose(1, 2))).mean(-1)
        return self.head(torch.tanh(self.hidden(h)))


class Experts(nn.Module):
    """The second layer runs for some samples alone: a rank may have none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, chosen = torch.tanh(self.first(x)), x[:, 0] > 1e6
        delta = torch.zeros_like(h).masked_scatter(chosen[:, None].expand_as(h), self.expert(h[chosen]))
        return self.head(h + delta)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 4))


def made(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return {"mlp": mlp, "small": Small, "experts": Experts}[kind]().to(dtype)


def batch(kind: str, step: int, dtype: torch.dtype, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(7, (rows, 5), generator=generator)
    if kind != "small":
        x = torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "experts":  # of one rank's part alone
        x[: rows // 4, 0] = 2e6
        x[:, 0] = x[:, 0].clamp(max=2e6)
    return x, torch.arange(rows) % 4


def bounds(size: int, rows: int = 12, unequal: bool = False) -> list[int]:
    """Where the parts of a batch begin and end, by rank."""
    ends = [rows * rank // size for rank in range(size + 1)]
    if unequal:
        ends[1:-1] = [end + 2 for end in ends[1:-1]]
    return ends


WRAPPED, OWN, SPREAD = "wrapped", "own", "spread"  # who averages gradients: DDP, the step, or fully_shard


def spread(model: nn.Module, mesh=None) -> nn.Module:
    """Shard a model: each of its parts, and what is left of it."""
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        if any(True for _ in child.parameters()) and not isinstance(child, nn.MultiheadAttention):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu().clone()


def called_by(how: str | None, kind: str, model: nn.Module) -> nn.Module:
    if how == SPREAD:
        return spread(model)
    return DistributedDataParallel(model, find_unused_parameters=kind == "experts") if how == WRAPPED else model


def trained(
    kind, make, dtype, steps, ranks=None, rank=0, unequal=False, micro=1, how=WRAPPED, again=False, device="cpu"
):
    """The weights after some steps on the joined batch, in one process or by ranks; micro-batches take turns.

    again: layers are computed once more in the backward pass.
    """
    model = made(kind, dtype).to(device)
    called = called_by(None if ranks is None else how, kind, model)
    group = {"process_group": torch.distributed.group.WORLD} if ranks is not None and how == OWN else {}
    optimizer = make(called, **group)
    forward = partial(checkpoint, called, use_reentrant=False) if again else called
    rows = 12 // micro
    ends = [0, rows] if ranks is None else bounds(ranks, rows, unequal)
    part, parts = slice(ends[rank], ends[rank + 1]), 1 if ranks is None else ranks
    for step in range(steps):
        optimizer.zero_grad()
        x, y = (part.to(device) for part in batch(kind, step, dtype))
        for k in range(micro):
            xs, ys = x[k * rows : (k + 1) * rows][part], y[k * rows : (k + 1) * rows][part]
            weight = parts / (rows * micro)  # so that the mean over ranks is that of the joined batch
            (F.cross_entropy(forward(xs), ys, reduction="sum") * weight).backward()
        optimizer.step()
    assert optimizer.steps == steps
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in weights.items()
    }


def equal_everywhere(weights: dict[str, torch.Tensor], what: str) -> None:
    for name, value in weights.items():
        others = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), f"{what}: ranks differ in {name}"


def compared(what, kind, make, dtype, tolerance, steps=20, **how) -> None:
    """Ranks end bit-identical, and where one process on the joined batch ends."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    communication = how.pop("communication", None)
    if os.environ.get("SAY"):
        print(what, flush=True)
    by_ranks = make if communication is None else partial(make, communication=communication)
    ours = trained(kind, by_ranks, dtype, steps, size, rank, **how)
    equal_everywhere(ours, what)
    reference = reference_of(kind, make, dtype, steps, how.get("micro", 1), how.get("device", "cpu"))
    for name, value in reference.items():
        off = float((ours[name] - value).norm() / value.norm())
        assert off <= tolerance, f"{what}: {name} is {off:.1e} off"


@cache
def reference_of(kind, make, dtype, steps, micro, device):
    """One process on the joined batch, trained here, apart from the others: the process group is hidden from it."""
    initialized = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    try:
        return trained(kind, make, dtype, steps, micro=micro, device=device)
    finally:
        torch.distributed.is_initialized = initialized
