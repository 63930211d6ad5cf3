"""Where the processes of torchrun find each other.

torchrun keeps one store for all its attempts, with the addresses of killed processes in it, and torch reads those where
new ones are not there yet: the restarted processes then wait for the dead. So each attempt gets a part of the store of
its own, under a name that rank 0 draws. (torchrun's count of restarts is no such name: machines count by themselves.)

    rank 0    sets the name              waits for all answers    sets the list of answers
    others    answer it, with a draw     wait for a list in which their answer stands; read the name again until then
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

ASKED_AGAIN = 0.05  # seconds


def meeting_point(wait: datetime.timedelta) -> dict[str, Any]:
    """Return what ``init_process_group`` is to be told of where processes meet.

    Args:
        wait: How long to wait for the others.

    Raises:
        RuntimeError: Another process did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}  # rank 0 opens a store of its own for each attempt
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, size, is_master=False, timeout=wait)
    return {"store": own_part(store, rank, size, wait), "rank": rank, "world_size": size}


def own_part(store: Any, rank: int, size: int, wait: datetime.timedelta) -> Any:
    """Return the part of a store that belongs to this attempt. All its processes must call this.

    Args:
        store: The store, with what earlier attempts have left in it.
        rank: The number of this process.
        size: How many processes there are.
        wait: How long to wait for the others.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("mukron/name", own)
        answers = [store.get(f"mukron/{own}/{other}").decode() for other in range(1, size)]
        store.set(f"mukron/{own}/answers", " ".join(answers))
        return PrefixStore(f"mukron/{own}", store)
    end = time.monotonic() + wait.total_seconds()
    while time.monotonic() < end:
        name = store.get("mukron/name").decode()
        store.set(f"mukron/{name}/{rank}", own)
        listed = f"mukron/{name}/answers"
        if store.check([listed]) and own in store.get(listed).decode().split():
            return PrefixStore(f"mukron/{name}", store)
        time.sleep(ASKED_AGAIN)
    raise RuntimeError(f"rank {rank} of {size} timed out: rank 0 did not come to train with it")
