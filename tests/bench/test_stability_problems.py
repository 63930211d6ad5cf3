"""The networks and texts of the stability matrix, and the check on fitted data."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from mukron.bench.networks import CharGPT, ZeroGateBlock, ZeroGateResNet
from mukron.bench.stability import matrix
from mukron.bench.stability.fitted import FITTED_PROBLEMS, FittedOutcome, FittedRun, train_fitted
from mukron.bench.stability.matrix import FittedOptions, run_fitted
from mukron.bench.stability.problems import loss_of
from mukron.bench.stability.result import StabilityResult, new_stability_result
from mukron.bench.stability.text import ALPHABET, WORDS, markov_text, text_dataset
from mukron.cli import app


def test_the_gpt_sees_no_later_character():
    torch.manual_seed(0)
    model = CharGPT(16, len(ALPHABET)).double()
    tokens = torch.randint(len(ALPHABET), (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % len(ALPHABET)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 0


def test_the_gpt_knows_positions():
    torch.manual_seed(0)
    logits = CharGPT(16, len(ALPHABET))(torch.zeros(1, 32, dtype=torch.long))
    assert (logits[0, 1:] - logits[0, :1]).abs().amax(-1).min() > 0


def test_gates_start_at_zero():
    """What lies behind a gate has no gradient at first, and every block starts as its shortcut."""
    torch.manual_seed(0)
    model = ZeroGateResNet(8)
    loss_of(model, torch.randn(16, 1, 8, 8), torch.arange(16) % 10).backward()
    blocks = [module for module in model.modules() if isinstance(module, ZeroGateBlock)]
    assert len(blocks) == 3
    for block in blocks:
        assert float(block.conv2.weight.grad.abs().max()) == 0
        assert float(block.norm2.weight.grad.abs().max()) > 0


def test_a_loss_is_the_mean_over_samples_and_positions():
    logits, targets = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    torch.testing.assert_close(loss_of(torch.nn.Identity(), logits, targets), expected)


def test_a_text_is_made_from_its_seed():
    text = markov_text(5000)
    assert text == markov_text(5000)
    assert text != markov_text(5000, seed=1)
    words = set(text.replace(".", "").split())
    assert 20 < len(words) <= WORDS + 1  # the last word may be cut


def test_targets_are_the_next_characters():
    train = text_dataset(1000, context=32).train
    torch.testing.assert_close(train.inputs[:, 1:], train.targets[:, :-1])
    text = "".join(ALPHABET[number] for number in train.inputs[0])
    assert markov_text(1000).startswith(text)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 0.04, 0.4, 0.6, 0.01], FittedOutcome(10, 20, 0.01)),
        ([1.0, 0.06, 0.6], FittedOutcome(None, None, 0.6)),
        ([0.9, 0.04, 0.5], FittedOutcome(10, None, 0.5)),
        ([0.04, nan], FittedOutcome(5, 10, inf)),
    ],
)
def test_when_a_run_leaves_its_fit(losses, expected):
    outcome = FittedOutcome.of({5 * (number + 1): loss for number, loss in enumerate(losses)})
    assert outcome == expected
    assert FittedOutcome.from_dict(outcome.to_dict()) == outcome


def test_a_network_fits_the_toy():
    outcome = train_fitted(FittedRun("toy", "kfac", "kl:0.001", seed=0, steps=150), "cpu")
    assert outcome.fitted is not None
    assert outcome.left is None


@pytest.mark.parametrize("name", FITTED_PROBLEMS)
def test_fitted_problems_have_learnable_data(name):
    """Each class has samples, and the network has as many outputs."""
    problem = FITTED_PROBLEMS[name]
    data = problem.data(0)
    classes = problem.network()(data.inputs[:2]).shape[1]
    assert torch.bincount(data.targets, minlength=classes).min() >= 50
    assert len(torch.bincount(data.targets)) == classes


def test_fitted_runs_are_continued(tmp_path, monkeypatch):
    trained = []

    def train(run, device):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(run)
        return FittedOutcome(5, 10 if run.seed == 1 else None, 0.01)

    monkeypatch.setattr(matrix, "train_fitted", train)
    options = FittedOptions(("toy",), ("kfac", "foof"), steps=10, seeds=2)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_fitted(options, new_stability_result("", "cpu", smoke=True), tmp_path, lines.append)
    result = StabilityResult.load(tmp_path / "stability-smoke-cpu.json")
    assert [*result.fitted] == trained
    assert lines == ["toy, K-FAC, defaults: 2 of 2 seeds fitted, 1 left the fit"]
    last = replace(trained[-1], seed=1)
    monkeypatch.setattr(matrix, "train_fitted", lambda run, device: FittedOutcome(None, None, {last: 0.7}[run]))
    run_fitted(options, result, tmp_path, lines.append)
    rows = {row[1]: row[4:] for row in result.fitted_table().rows}
    assert rows == {"K-FAC": ("2", "2", "1", "0", "0.01"), "FOOF": ("2", "1", "0", "1", "0.35")}


def test_the_command_checks_fitted_data(tmp_path):
    arguments = ["bench", "stability", "--fitted", "--smoke", "--methods", "foof,gauss-newton", "--problems", "toy"]
    outcome = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    result = StabilityResult.load(tmp_path / "stability-smoke-cpu.json")
    assert [(run.method, run.seed) for run in result.fitted] == [
        (method, seed) for method in ("foof", "gauss-newton") for seed in (0, 1)
    ]
    assert "end above 0.5" in outcome.output
