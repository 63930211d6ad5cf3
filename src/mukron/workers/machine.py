"""The machine that the work runs on."""

from __future__ import annotations

import os
import platform

import torch

from mukron import __version__


def cores() -> int:
    """Return the number of cores that this process may use.

    Returns:
        The number.

    Example:
        >>> cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them for a process that gets one alone.

    Returns:
        A name for each.

    Example:
        >>> len(gpus()) == torch.cuda.device_count()
        True
    """
    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[:count] if len(visible) >= count else [str(number) for number in range(count)]


def describe_machine(device: str) -> dict[str, str]:
    """Return the machine and the versions of its software, in words.

    Args:
        device: A device of torch; a GPU is named.

    Returns:
        Text under "machine" and under "versions".

    Example:
        >>> sorted(describe_machine("cpu"))
        ['machine', 'versions']
    """
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    versions = f"mukron {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return {"machine": f"{platform.machine()}, {cores()} cores" + (f", {gpu}" if gpu else ""), "versions": versions}
