"""Training in several processes: what a step there would be, and refusals of what would go wrong in silence.

A step must be that of the joined batch. Shampoo, SOAP and Muon need gradients alone, which DistributedDataParallel
averages: their steps are right as they are. K-FAC, FOOF and Gauss-Newton measure curvature, each process on its own
batch, so that weights would drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

COMPARED_EVERY = 100  # steps between comparisons of the processes' gradients


def number_of_processes() -> int:
    """How many processes train together: 1 where no process group was made."""
    return torch.distributed.get_world_size() if _in_a_group() else 1


def check_processes(optimizer: SecondOrder) -> None:
    """Refuse methods whose steps would differ from process to process.

    Args:
        optimizer: The optimizer, at construction and before each step.

    Raises:
        RuntimeError: There are several processes, and they would drift apart.
    """
    processes = number_of_processes()
    if processes > 1 and not optimizer.method.gradients_alone:
        raise RuntimeError(
            f"{type(optimizer).__name__} in {processes} processes is not supported yet: each would precondition by the "
            "curvature of its own batch, and their weights would drift apart. Train in one process, or take Shampoo, "
            "SOAP or Muon, which need averaged gradients alone"
        )


def check_gradients_agree(optimizer: SecondOrder) -> None:
    """Refuse gradients that were not averaged: at the first step in this process, and every 100 steps.

    Args:
        optimizer: The optimizer, before a step.

    Raises:
        RuntimeError: The processes have different gradients. All of them are told.
    """
    if number_of_processes() == 1 or (optimizer.compared and optimizer.steps % COMPARED_EVERY):
        return
    optimizer.compared = True
    device = optimizer.generator.device
    own = _digest(optimizer).to(device)
    largest = torch.stack([own, -own])
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    if not torch.equal(largest[0], -largest[1]):
        raise RuntimeError(
            f"the gradients of {number_of_processes()} processes differ, and so would their weights: call the model "
            "through DistributedDataParallel (its last backward pass before a step outside of no_sync), or average "
            "gradients by all_reduce before the step"
        )


def _digest(optimizer: SecondOrder) -> Tensor:
    """Numbers that differ if gradients do: how many there are, and two sums over them (-1: not finite)."""
    gradients = [entry.parameter.grad for entry in optimizer.entries.values() if entry.parameter.grad is not None]
    sums = [torch.zeros(2, dtype=torch.float64)]
    for k, gradient in enumerate(gradients):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        both = torch.stack([values.double().sum(), values.double().abs().sum()]).cpu()
        sums.append(both.nan_to_num(-1.0, -1.0, -1.0) / (1.0 + 0.01 * k))
    return torch.cat([torch.stack(sums).sum(0), torch.tensor([float(len(gradients))], dtype=torch.float64)])


def _in_a_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
