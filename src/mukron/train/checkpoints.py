"""Checkpoints: everything that a run needs to go on. They are whole, whatever each of several processes holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mukron.params.storage import Data
from mukron.train.errors import RunError
from mukron.train.probes import Spectra
from mukron.train.processes import Processes
from mukron.train.randomness import own_random_numbers, random_states, restore_random_states
from mukron.train.records import RunFolder
from mukron.train.rows import EpochRow
from mukron.train.sharding import load_network, load_optimizer, saved_network, saved_optimizer

if TYPE_CHECKING:
    from mukron.train.loop import Loop


@dataclass
class LoopState:
    """Everything that the loop keeps besides the network, the optimizer and the random streams."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches completed in the current epoch
    step: int = 0
    loss: float = 0.0  # this and the next two are sums over the current epoch
    correct: int | None = 0  # None: shapes do not show it
    seen: int = 0
    first_loss: float | None = None
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    rows: list[EpochRow] = field(default_factory=list)


def checkpoint_of(loop: Loop) -> Data:
    """Return the state of a run, whole on rank 0. All processes must call this: each has a part of it.

    Args:
        loop: The run.
    """
    with own_random_numbers(loop.device):
        probes = {name: probe.state() for name, probe in loop.probes.items() if isinstance(probe, Spectra)}
    return {
        "model": saved_network(loop.built),
        "optimizer": saved_optimizer(loop.built),
        "probes": probes,
        "random": random_states(loop.device),
        "state": asdict(loop.state),
    }


def same_checkpoint(files: RunFolder, processes: Processes) -> Data | None:
    """Return the checkpoint of a folder, which every process reads; None if there is none.

    Args:
        files: The folder.
        processes: The processes.

    Raises:
        RunError: The processes do not see the same file.
    """
    with processes.together():
        checkpoint = files.saved()
    steps = processes.of_all(None if checkpoint is None else checkpoint["state"]["step"])
    if len(set(steps)) > 1:
        seen = ", ".join(f"rank {rank} {'none' if step is None else f'step {step}'}" for rank, step in enumerate(steps))
        raise RunError(
            f"{files.checkpoints.last}: processes see different checkpoints ({seen}); give a folder that all machines "
            "share (--out)"
        )
    return checkpoint


def restore(loop: Loop, checkpoint: Mapping[str, Any]) -> None:
    """Set a run to the state of a checkpoint.

    Args:
        loop: The run.
        checkpoint: What ``checkpoint_of`` returned.

    Raises:
        RunError: It is that of another network or optimizer.
    """
    try:
        load_network(loop.built, checkpoint["model"])
        load_optimizer(loop.built, checkpoint["optimizer"])
        for name, probe in loop.probes.items():
            if isinstance(probe, Spectra):
                probe.load(checkpoint["probes"][name])
        restore_random_states(checkpoint["random"], loop.device)
        loop.state = LoopState(**checkpoint["state"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint does not fit what {loop.config.model!r} builds now: {' '.join(str(error).split())}; "
            "begin the run anew with --restart (resume=False)"
        ) from error
