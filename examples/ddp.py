"""Several processes, each with its part of the batch: the steps are those of one process with the whole batch.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import gc
import os

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.models import MLP

torch.set_num_threads(1)
on_gpu = torch.cuda.is_available()
distributed.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")


def main() -> None:
    torch.manual_seed(0)  # the same weights everywhere
    model = MLP(width=256).to(device)
    plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=64))
    wrapped = DistributedDataParallel(model)
    optimizer = mukron.KFAC(wrapped, plan, lr=0.2)

    x, y = torch.randn(64, 784), torch.arange(64) % 10  # in a program of your own: a DistributedSampler
    part = slice(64 * rank // ranks, 64 * (rank + 1) // ranks)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[part].to(device)), y[part].to(device)).backward()
        optimizer.step()

    if rank == 0:
        print(optimizer.plan())  # which rank owns which layer, and what travels
        print(f"loss {F.cross_entropy(model(x.to(device)), y.to(device)):.4f} with {ranks} processes")


main()
gc.collect()  # torch 2.13 aborts at times if a wrapped model outlives the process group
distributed.destroy_process_group()
