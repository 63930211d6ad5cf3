"""The processes that train one run as one joined batch: what they share, sum up and decide together.

Every process has all samples and computes the same order of them, so a rank takes its part of a batch without asking
anybody. What ranks do say to each other goes through ``Processes``, and every call of it must be made by all of them:

    totals     each step: losses, hits, and whether somebody pressed Ctrl-C
    of_first   what rank 0 alone does, such as writing a file: its result, or its error, on all ranks
    together   what may fail on one rank: then it fails on all, and none waits for another that has left

In one process nothing is said and every answer is the process's own.
"""

from __future__ import annotations

import datetime
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import distributed

from mukron.train.config import RunConfig
from mukron.train.errors import LostProcessError, RunError
from mukron.train.randomness import OWN_DRAWS, seed_for
from mukron.train.rendezvous import meeting_point
from mukron.workers.launch import launched, launched_rank, local_rank

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by device
LONGEST_WAIT = datetime.timedelta(minutes=10)  # of a rank for the others
LOST_MESSAGES = re.compile(  # what errors say then; few have a type of their own
    r"gloo|NCCL|connection (closed|reset|refused)|broken pipe|timed out|not on all of \d+ ranks", re.IGNORECASE
)


@dataclass(frozen=True)
class Processes:
    """The processes that train a run, as one of them sees them.

    Attributes:
        rank: The number of this process.
        size: How many there are.
        device: Where tensors are that they exchange.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def part(self, samples: int) -> slice:
        """This rank's part of so many samples: parts differ by one sample at most, the first ones are larger."""
        fewest, more = divmod(samples, self.size)
        begin = self.rank * fewest + min(self.rank, more)
        return slice(begin, begin + fewest + (self.rank < more))

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Sums over ranks, added up in the order of ranks, so that all have the same."""
        if self.size == 1:
            return list(numbers)
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own)
        return [sum(column) for column in zip(*(row.tolist() for row in found), strict=True)]

    def of_all(self, own: T) -> list[T]:
        """Every rank's object, in the order of ranks."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, own)
        return found

    def of_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks. An error of rank 0 is raised on all of them."""
        if self.size == 1:
            return make()
        made, error = None, None
        if self.first:
            try:
                made = make()
            except Exception as raised:
                error = raised
        sent = [(made, "" if error is None else f"{type(error).__name__}: {error}")]
        distributed.broadcast_object_list(sent, src=0)
        if error is not None:
            raise error
        if sent[0][1]:
            raise RunError(f"rank 0 of {self.size} failed, so the run cannot go on: {sent[0][1]}")
        return cast(T, sent[0][0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error that one rank raises inside is raised on all. Ranks may not talk to each other inside."""
        if self.size == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        words = self.of_all("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None and (self.first or not words[0]):
            raise error
        for rank, word in enumerate(words):
            if word:
                raise RunError(f"rank {rank} of {self.size} failed, so the run cannot go on: {word}") from error

    def in_turn(self, load: Callable[[], T]) -> T:
        """What every process loads: one of each machine before the others, so that one alone downloads."""
        if self.size == 1:
            return load()
        loaded: list[T] = []
        for turn in (True, False):
            with self.together():
                if (local_rank() == 0) == turn:
                    loaded.append(load())
        return loaded[0]

    def collect(self) -> None:
        """Free what a run has left: torch aborts at times if its wrapper outlives the process group."""
        if self.size > 1:
            gc.collect()

    def draw_apart(self, seed: int, step: int) -> None:
        """Seed torch for a step, so that ranks draw different numbers (dropout), which a resumed run draws again."""
        if self.size > 1:
            torch.manual_seed(seed_for(seed, OWN_DRAWS, step * self.size + self.rank))


ONE_PROCESS = Processes()


@contextmanager
def joined_processes(config: RunConfig) -> Iterator[Processes]:
    """The processes that torchrun has started, or those of the process group that the caller has made.

    The group stays when the run ends, for the next one: torch cannot make another with the same store. An error that
    comes of a process that has ended is raised as ``LostProcessError``.

    Args:
        config: The run.

    Raises:
        RunError: The run cannot be trained in several processes as it is described.
    """
    ready = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if ready else launched()
    if size == 1:
        yield ONE_PROCESS
        return
    _refuse_what_cannot_be_joined(config, size)
    device = local_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if not ready:
            bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
            where = meeting_point(LONGEST_WAIT)
            distributed.init_process_group(BACKENDS[device.type], timeout=LONGEST_WAIT, **where, **bound)
        processes = Processes(distributed.get_rank(), size, device)
        check_same_run(config, processes)
        yield processes
    except RuntimeError as error:
        if not _tells_of_a_lost_process(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise LostProcessError(
            f"rank {launched_rank()} of {size} lost the others: one of them has ended, or did not answer for "
            f"{LONGEST_WAIT.seconds // 60} minutes ({said}). In a folder the same command continues the run from its "
            "last checkpoint; torchrun --max-restarts N does that by itself"
        ) from error


def local_device(name: str) -> torch.device:
    """A run's device in this process: where several train, a plain "cuda" is the GPU of its rank on this machine."""
    device = torch.device(name)
    several = launched() > 1 or (distributed.is_available() and distributed.is_initialized())
    if device.type != "cuda" or device.index is not None or not several:
        return device
    rank, gpus = local_rank(), torch.cuda.device_count()
    if rank >= gpus:
        raise RunError(
            f"device={name!r}: process {rank + 1} of this machine has no GPU, torch finds {gpus} here; start as many "
            "processes as there are GPUs (torchrun --nproc-per-node gpu)"
        )
    return torch.device("cuda", rank)


def leave_processes(code: int) -> NoReturn:
    """End this process, after a run that has ended on all of them.

    At once: Python's own end aborts at times ("terminate called without an active exception") if something of torch's
    is still there, and torchrun would take that for a failure.

    Args:
        code: The exit code.
    """
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_same_run(config: RunConfig, processes: Processes) -> None:
    """Refuse processes that were given different runs.

    Args:
        config: This process's run.
        processes: All of them.

    Raises:
        RunError: The runs differ.
    """
    keys = processes.of_all(config.key())
    if len(set(keys)) > 1:
        raise RunError(
            f"{processes.size} processes train one run together, but they were given {len(set(keys))} different ones; "
            "give all the same config, or start processes without torchrun to train a run in each"
        )


def check_batch(batch: int, processes: Processes) -> None:
    """Refuse a batch of which a rank would get no sample."""
    if batch < processes.size:
        raise RunError(
            f"batch={batch}: {processes.size} processes share a batch and each needs a sample of it; give a larger "
            "batch (--batch), or start fewer processes"
        )


def _refuse_what_cannot_be_joined(config: RunConfig, size: int) -> None:
    problems, device = [], torch.device(config.device)
    if device.type not in BACKENDS:
        problems.append(f"device={config.device!r}: processes exchange gradients on {' and '.join(BACKENDS)} alone")
    elif device.index is not None:
        problems.append(f"device={config.device!r}: say {device.type!r}; each process takes a GPU of its own")
    if config.method_options.get("fused"):
        problems.append("method_options: fused=True forms no gradients, so they cannot be averaged; leave it out")
    if config.sharding == "fsdp" and config.record:
        problems.append('record: probes read whole weights, and sharding="fsdp" leaves each process a part; use "ddp"')
    if config.sharding == "fsdp" and config.compile:
        problems.append('compile=True beside sharding="fsdp" is not supported yet; leave out one of the two')
    if problems:
        raise RunError(f"not in {size} processes: {'; '.join(problems)}")


def _tells_of_a_lost_process(error: RuntimeError) -> bool:
    kinds = tuple(
        kind
        for name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
        if isinstance(kind := getattr(distributed, name, None), type)
    )
    return isinstance(error, kinds) or bool(LOST_MESSAGES.search(str(error)))
