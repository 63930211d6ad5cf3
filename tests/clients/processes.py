"""Examples in one process and in several, each with an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = Path(__file__).parent / "launch.py"


def run(script: Path, processes: int = 1) -> str:
    """What the example prints."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [sys.executable, *(ranks if processes > 1 else [])]
    folders = [str(LAUNCH.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(
        [*start, LAUNCH, script], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def losses(printed: str) -> list[float]:
    """The numbers behind the word loss, whatever is around them."""
    return [float(number) for number in re.findall(r"loss\W+([\d.]+)", re.sub(r"'train_loss.*", "", printed))]
