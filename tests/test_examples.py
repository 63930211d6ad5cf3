"""Every example runs, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import digits
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LONG = {"digits.py", "feature_learning.py"}  # run smaller, below and in tests/params/test_features.py


@pytest.mark.parametrize("path", sorted(p for p in EXAMPLES.glob("*.py") if p.name not in LONG), ids=lambda p: p.name)
def test_examples_run(path):
    result = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_quickstart_learns_and_is_short():
    code = (EXAMPLES / "quickstart.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, check=True
    ).stdout
    losses = [float(line.split()[-1]) for line in shown.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.3 * losses[0]


def test_second_order_reaches_a_lower_loss_in_the_same_steps():
    """The table of docs/optimizers.md at a quarter of its steps and one seed."""
    results = digits.compare(steps=50, seeds=range(1))
    losses = {name: max(found[best]) for name, (best, found) in results.items()}
    first_order = min(loss for name, loss in losses.items() if name.startswith(("SGD", "AdamW")))
    assert all(loss < first_order for name, loss in losses.items() if name.startswith(("K-FAC", "Shampoo"))), losses
