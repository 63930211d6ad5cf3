"""Peak memory. On a CPU it is the peak of a whole process, so a method is measured in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from mukron.imports import current_folder_after_python
from mukron.workers.foreman import START


def reset_peak(device: str) -> float:
    """Resets the peak to the memory in use.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The memory in use, in MiB.

    Example:
        >>> reset_peak("cpu") > 0
        True
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak to the memory in use
        return _status("VmRSS")
    except OSError:
        return peak(device)


def peak(device: str) -> float:
    """Returns the peak memory since ``reset_peak``.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The peak in MiB.

    Example:
        >>> peak("cpu") > 0
        True
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**10


def peak_in_subprocess(bench: str, method: str, width: int, batch: int) -> float | None:
    """Measures the peak memory of a method's steps on the CPU in a process of its own.

    Args:
        bench: Name of a benchmark of steps.
        method: Name of one of its methods.
        width: Width of the network.
        batch: Batch size.

    Returns:
        MiB above what torch itself takes, or None if the process failed.
    """
    command = [sys.executable, "-c", START, "mukron.bench.peak_process", bench, method, str(width), str(batch)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(current_folder_after_python(sys.path))}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return float(process.stdout.split()[-1]) if process.returncode == 0 else None
