"""Run a script in each process that torch.distributed.run starts: launch.py SCRIPT ARGUMENTS."""

import os
import runpy
import sys

import operators  # noqa: F401
import torch

torch.set_num_threads(1)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # torch with Gloo and DistributedDataParallel now and then aborts as it ends, without mukron too
