"""The most memory that something took. On a CPU that is told of a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch


def reset_peak(device: str) -> float:
    """Start a new peak, and say what is held now, in MiB."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is held
        return _status("VmRSS")
    except OSError:
        return peak(device)


def peak(device: str) -> float:
    """In MiB."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**10


def elsewhere(bench: str, method: str, width: int, batch: int) -> float | None:
    """MiB that a method's steps take above what torch itself takes, on the CPU; None if that process broke."""
    command = [sys.executable, "-m", "mukron.bench.alone", bench, method, str(width), str(batch)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None
