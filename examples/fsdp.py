"""Weights that are spread over processes by ``fully_shard``: each rank moves its own part of them.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

from __future__ import annotations

import gc
import os

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import mukron
from mukron.models import MLP

torch.set_num_threads(1)
on_gpu = torch.cuda.is_available()
distributed.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)


def main() -> None:
    torch.manual_seed(0)
    model = MLP(width=256).to(device)
    plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=64))  # or after fully_shard
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    optimizer = mukron.KFAC(model, plan, lr=0.2)  # of the sharded model

    x, y = torch.randn(64, 784), torch.arange(64) % 10
    part = slice(64 * rank // ranks, 64 * (rank + 1) // ranks)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part].to(device)), y[part].to(device)).backward()
        optimizer.step()

    with torch.no_grad():
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
    if rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"this rank holds {held} of {sum(parameter.numel() for parameter in model.parameters())} weights")
        print(f"loss {loss:.4f} with {ranks} processes")


main()
gc.collect()  # torch 2.13 aborts at times if a wrapped model outlives the process group
distributed.destroy_process_group()
