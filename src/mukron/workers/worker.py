"""A worker process: the other end of ``Foreman``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mukron.workers.exits import BROKEN, DONE, STOPPED, WRONG_REQUEST
from mukron.workers.interrupts import Stopped, interruptible

Tick = Callable[[], None]  # called by the work now and then
WorkerTask = dict[str, Any]  # JSON data


def serve(file: str, work: Callable[[WorkerTask, Stopped, Tick], bool]) -> int:
    """Do the work of a foreman's file, with modules from where he imports them.

    Args:
        file: Holds the task and what the foreman says of himself, as JSON.
        work: Does the task; returns whether it is done, False if it was stopped. It must call its last argument now
            and then, which ends the work if the foreman is gone.

    Returns:
        The exit code of the process: see ``mukron.workers.exits``.

    Example:
        >>> order = {"path": [], "threads": torch.get_num_threads(), "foreman": os.getppid(), "task": {"name": "first"}}
        >>> _ = Path("order.json").write_text(json.dumps(order))
        >>> serve("order.json", lambda task, stopped, tick: task["name"] == "first")
        0
    """
    order = json.loads(Path(file).read_text())
    sys.path[:] = list(dict.fromkeys([*order["path"], *sys.path]))
    torch.set_num_threads(order["threads"])

    def stop_if_orphaned() -> None:
        if os.getppid() != order["foreman"]:
            raise KeyboardInterrupt

    try:
        with interruptible(terminate=True) as stopped:
            return DONE if work(order["task"], stopped, stop_if_orphaned) else STOPPED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt:
        return STOPPED
    except Exception:
        traceback.print_exc()
        return BROKEN
