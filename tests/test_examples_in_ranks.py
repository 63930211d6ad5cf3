"""Examples of several processes, started as a user starts them: the number of processes changes no result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]


def run(name: str, ranks: int, *arguments: str) -> tuple[float, str]:
    """The loss that an example prints, and all of what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, EXAMPLES / name, *arguments],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = re.search(r"loss ([\d.]+)", result.stdout)
    assert found is not None, result.stdout
    return float(found[1]), result.stdout


def test_replicated_and_sharded_models_end_alike():
    loss, text = run("ddp.py", 2)
    assert "of data-parallel SGD" in text
    assert loss < 1.0
    if NEW_ENOUGH:
        sharded, text = run("fsdp.py", 3)
        assert sharded == pytest.approx(loss, abs=2e-3)
        held, everything = map(int, re.search(r"holds (\d+) of (\d+) weights", text).groups())
        assert held < 0.4 * everything


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    first, _ = run("resume.py", 2, str(tmp_path / "a"))
    then, text = run("resume.py", 1, str(tmp_path / "a"))
    assert then < first
    assert "after 16 steps" in text
