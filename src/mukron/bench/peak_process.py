"""Prints the peak memory of a method's steps on the CPU in MiB, measured in a process of its own.

Run as ``python -m mukron.bench.peak_process BENCH METHOD WIDTH BATCH``.
"""

from __future__ import annotations

import sys

from mukron.bench.conv import conv_bench
from mukron.bench.kfac_step import KFAC_STEP
from mukron.bench.shampoo_step import SHAMPOO_STEP
from mukron.bench.steps import peak_memory

if __name__ == "__main__":
    name, method, width, batch = sys.argv[1:]
    bench = {bench.name: bench for bench in (KFAC_STEP, SHAMPOO_STEP, conv_bench(), conv_bench(100))}[name]
    pool = bench.task.pool(int(batch), "cpu")[:2]
    print(peak_memory(bench.task, bench.method(method), int(width), pool, "cpu"))
