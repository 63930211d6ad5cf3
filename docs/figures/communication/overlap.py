"""Time of a step where curvature is sent in the backward pass, beside one that sends all of it in the step.

Two processes with one thread each, an MLP 784-1024-1024-10, 256 samples each, K-FAC with its defaults; steps of both
kinds take turns. On a network of 1 Gbit/s (Linux, as root):

unshare -n sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms;
    GLOO_SOCKET_IFNAME=lo torchrun --nproc-per-node 2 --master-addr 127.0.0.1 \\
    docs/figures/communication/overlap.py FILE "1 Gbit/s"'

The second argument names the network in the file. Without `unshare` and `tc` the loopback device is used as it is.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mukron
from mukron.models import MLP

ROUNDS, WIDTH, BATCH = 30, 1024, 256


def main() -> None:
    rank = distributed.get_rank()
    x, y = torch.randn(BATCH, 784), torch.arange(BATCH) % 10
    arms = {}
    for overlap in (True, False):
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(MLP(width=WIDTH))
        communication = mukron.Communication("owner", overlap=overlap)
        arms[overlap] = wrapped, mukron.KFAC(wrapped, lr=0.05, communication=communication)
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for turn in range(ROUNDS + 12):
        for overlap, (wrapped, optimizer) in arms.items():
            optimizer.zero_grad()
            distributed.barrier()
            begin = time.perf_counter()
            F.cross_entropy(wrapped(x), y).backward()
            middle = time.perf_counter()
            optimizer.step()
            distributed.barrier()
            if turn >= 12 and optimizer.steps % 10 != 1:  # after the first steps, each of which makes inverses
                seconds[overlap].append((middle - begin, time.perf_counter() - middle))
    if rank == 0:
        found = {
            ("overlap" if overlap else "in the step"): {
                "passes": statistics.median(a for a, _ in times),
                "step": statistics.median(b for _, b in times),
                "both": statistics.median(a + b for a, b in times),
            }
            for overlap, times in seconds.items()
        }
        path, network = Path(sys.argv[1]), sys.argv[2]
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(kept | {network: {"torch": torch.__version__, "seconds": found}}, indent=1) + "\n")
        print(json.dumps(found, indent=1))


torch.set_num_threads(1)
distributed.init_process_group("gloo")
main()
distributed.destroy_process_group()
