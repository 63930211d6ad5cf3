"""Save on some processes, go on with another number of them, by torch's distributed checkpoints.

torchrun --nproc-per-node 2 examples/resume.py run
torchrun --nproc-per-node 3 examples/resume.py run
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.models import MLP

torch.set_num_threads(1)
folder = Path(sys.argv[1])
distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()


def main() -> None:
    torch.manual_seed(0)
    model = MLP(width=128)
    plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=64))  # before a checkpoint is loaded
    wrapped = DistributedDataParallel(model)
    optimizer = mukron.KFAC(wrapped, plan, lr=0.2)

    if folder.exists():
        weights, state = get_state_dict(wrapped, optimizer)  # what is to be filled
        checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(wrapped, optimizer, model_state_dict=weights, optim_state_dict=state)

    x, y = torch.randn(48, 784, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 10
    part = slice(48 * rank // ranks, 48 * (rank + 1) // ranks)
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[part]), y[part]).backward()
        optimizer.step()

    weights, state = get_state_dict(wrapped, optimizer)  # on every rank: each has the curvature of its own layers
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    loss = F.cross_entropy(model(x), y)
    if rank == 0:
        print(f"loss {loss:.4f} after {optimizer.steps} steps, the last of them with {ranks} processes")


main()
gc.collect()  # torch 2.13 aborts at times if a wrapped model outlives the process group
distributed.destroy_process_group()
