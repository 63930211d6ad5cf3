"""``python -m mukron.bench.alone BENCH METHOD WIDTH BATCH``: the memory of a method's steps on the CPU, in MiB."""

from __future__ import annotations

import sys

from mukron.bench.conv import conv
from mukron.bench.kfac_step import KFAC_STEP
from mukron.bench.shampoo_step import SHAMPOO_STEP
from mukron.bench.steps import peak_alone

if __name__ == "__main__":
    name, method, width, batch = sys.argv[1:]
    bench = {each.name: each for each in (KFAC_STEP, SHAMPOO_STEP, conv(), conv(100))}[name]
    pool = bench.task.pool(int(batch), "cpu")[:2]
    print(peak_alone(bench.task, bench.method(method), int(width), pool, "cpu"))
