"""Every example runs, and says what it promises."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import digits
import pytest

from mukron.data import DataError

EXAMPLES = Path(__file__).parent.parent / "examples"
LONG = {"digits.py", "feature_learning.py"}  # run smaller, below and in tests/diagnose/test_first_order_exponents.py
IN_RANKS = {"ddp.py", "fsdp.py", "resume.py"}  # in test_examples_in_ranks.py
IN_FRAMEWORKS = {"hf_trainer.py", "with_accelerate.py", "with_lightning.py", "with_timm.py"}  # in tests/clients


def run(path: Path) -> str:
    """What a process of its own prints; a warning is an error."""
    result = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


OTHERS = sorted(
    path for path in EXAMPLES.glob("*.py") if path.name not in {*LONG, *IN_RANKS, *IN_FRAMEWORKS, "quickstart.py"}
)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
@pytest.mark.slow
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    """In this process: importing torch would take longer than most of them. The quickstart has a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_quickstart_runs_and_learns_and_is_short():
    path = EXAMPLES / "quickstart.py"
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 30
    losses = [float(line.split()[-1]) for line in run(path).splitlines() if line.startswith("step")]
    assert losses[-1] < 0.3 * losses[0]


def test_the_quickstart_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"scikit-learn, which is not installed: pip install 'mukron\[studies\]'"):
        runpy.run_path(str(EXAMPLES / "quickstart.py"))


@pytest.mark.slow
def test_second_order_reaches_a_lower_loss_in_the_same_steps():
    """The table of docs/optimizers.md at an eighth of its steps and one seed."""
    results = digits.compare(steps=25, seeds=range(1))
    losses = {name: max(found[best]) for name, (best, found) in results.items()}
    first_order = min(loss for name, loss in losses.items() if name.startswith(("SGD", "AdamW")))
    assert all(loss < first_order for name, loss in losses.items() if name.startswith(("K-FAC", "Shampoo"))), losses
