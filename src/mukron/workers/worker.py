"""A worker process: the other end of ``Foreman``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

import torch

from mukron.imports import current_folder_after_python
from mukron.workers.exits import BROKEN, DONE, STOPPED, WRONG_REQUEST
from mukron.workers.interrupts import Stopped, interruptible

Tick = Callable[[], None]  # called by the work now and then
WorkerTask = dict[str, Any]  # JSON data


def serve(order: IO[str], work: Callable[[WorkerTask, Stopped, Tick], bool]) -> int:
    """Do the work of a foreman's order, with modules from where it imports them.

    Args:
        order: The task and what the foreman says of itself, as JSON: the standard input.
        work: Does the task; returns whether it is done, False if it was stopped. It must call its last argument now
            and then, which ends the work if the foreman is gone.

    Returns:
        The exit code of the process: see ``mukron.workers.exits``.

    Example:
        >>> import io
        >>> order = {"path": [], "threads": torch.get_num_threads(), "foreman": os.getppid(), "task": {"name": "first"}}
        >>> serve(io.StringIO(json.dumps(order)), lambda task, stopped, tick: task["name"] == "first")
        0
    """
    given = json.load(order)
    sys.path[:] = current_folder_after_python([*given["path"], *sys.path])
    torch.set_num_threads(given["threads"])

    def stop_if_orphaned() -> None:
        if os.getppid() != given["foreman"]:
            raise KeyboardInterrupt

    try:
        with interruptible(terminate=True) as stopped:
            return DONE if work(given["task"], stopped, stop_if_orphaned) else STOPPED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt:
        return STOPPED
    except Exception:
        traceback.print_exc()
        return BROKEN
