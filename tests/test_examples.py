"""Every example runs, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import digits
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LONG = {"digits.py", "feature_learning.py"}  # run smaller, below and in tests/params/test_features.py


def run(path: Path) -> str:
    """What it prints; a warning is an error."""
    result = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


OTHERS = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in {*LONG, "quickstart.py"})


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_examples_run(path):
    assert run(path).strip()


def test_the_quickstart_runs_and_learns_and_is_short():
    path = EXAMPLES / "quickstart.py"
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 30
    losses = [float(line.split()[-1]) for line in run(path).splitlines() if line.startswith("step")]
    assert losses[-1] < 0.3 * losses[0]


def test_second_order_reaches_a_lower_loss_in_the_same_steps():
    """The table of docs/optimizers.md at a quarter of its steps and one seed."""
    results = digits.compare(steps=50, seeds=range(1))
    losses = {name: max(found[best]) for name, (best, found) in results.items()}
    first_order = min(loss for name, loss in losses.items() if name.startswith(("SGD", "AdamW")))
    assert all(loss < first_order for name, loss in losses.items() if name.startswith(("K-FAC", "Shampoo"))), losses
