"""The machine that the work runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

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


def source_commit() -> str:
    """Return the commit of the source that runs, with "-changed" if files of it differ from that commit.

    Returns:
        The commit; empty if the source is no checkout of its repository, as where the package was installed.

    Example:
        >>> isinstance(source_commit(), str)
        True
    """
    folder = Path(__file__).parents[1]  # the package

    def git(*arguments: str) -> str | None:
        command = ("git", "-C", str(folder), *arguments)
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # a folder that some other repository ignores
        return ""
    commit, changes = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--", ".")
    return f"{commit}-changed" if commit and changes else commit or ""


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
