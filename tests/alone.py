"""Run code in a process of its own, which ends without tearing anything down.

torch's process groups can wait for ever in their destructors when a test lets go of them; a process that ends cannot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

START = """
import os, torch
from torch import nn
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""


def run_with_a_process_group(code: str) -> None:
    whole = START + textwrap.dedent(code) + "\nprint('reached the end', flush=True)\nos._exit(0)\n"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert result.stdout.endswith("reached the end\n"), result.stderr
