"""Stacks of runs: each is what ``train`` makes of it, whatever the others do."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import product

import pytest
import torch

from mukron.data import load
from mukron.linalg import inverses
from mukron.train import RunConfig, RunError, stack_size, stackable, train, train_stack
from mukron.train.stacked import choice, loop

DIGITS = load("digits")
SMALL = RunConfig(width=32, base_width=16, samples=96, test_samples=40, epochs=3, dtype="float64")
RATES = {"sgd": (0.05, 0.3), "kfac": (0.002, 0.01), "foof": (0.01, 0.1)}  # that learn


def columns(run):
    return [list(row) for row in run.epochs]


def numbers(run):
    return [value for row in run.epochs for name, value in row.items() if name != "seconds"]


def same(ours, theirs, rel):
    assert [run.config for run in ours] == [run.config for run in theirs]
    for run, alone in zip(ours, theirs, strict=True):
        assert (run.status, run.reason) == (alone.status, alone.reason), run.config
        assert columns(run) == columns(alone)
        assert numbers(run) == pytest.approx(numbers(alone), rel=rel), run.config


def both(configs):
    return train_stack(configs, dataset=DIGITS), [train(config, dataset=DIGITS) for config in configs]


@pytest.fixture
def left_alone(monkeypatch):
    """The configs of runs that left their stack."""
    found = []

    def watched(config, **options):
        found.append(config)
        return train(config, **options)

    monkeypatch.setattr(loop, "train", watched)
    return found


@pytest.mark.parametrize("method", RATES)
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize(("batch", "activation"), [(None, "tanh"), (24, "relu")])
def test_a_stack_is_its_runs_one_by_one(method, loss, batch, activation, left_alone):
    """Learning rates at which runs diverge are among them, and dampings of several kinds."""
    config = SMALL.replace(method=method, loss=loss, batch=batch, model_options={"activation": activation})
    rules = {"sgd": (None,), "foof": (None, "fixed:1,0.1"), "kfac": (None, "rescaled:0.3", "heuristic", "constant")}
    configs = [
        config.replace(lr=lr, seed=seed, scheme=scheme, damping=rule)
        for lr, (seed, scheme), rule in product(
            (*RATES[method], 1e6), ((0, "mup"), (1, "sp"), (2, "mup")), rules[method]
        )
    ]
    ours, theirs = both(configs)
    same(ours, theirs, rel=1e-9)
    assert {run.status for run in ours} == {"finished", "diverged"}
    assert not left_alone


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "sgd", "weight_decay": 0.1, "method_options": {"nesterov": True}, "lr": 0.1},
        {"weight_decay": 0.1, "method_options": {"nesterov": True}, "schedule": "cosine", "warmup": 1.0},
        {"momentum": 0.0, "label_smoothing": 0.1, "evaluate_every": 2, "method_options": {"fisher": "empirical"}},
        {"momentum": 0.0, "loss": "mse", "model_options": {"depth": 4, "activation": "gelu", "sigma": 1.0}},
        {"width": 128, "batch": 16, "output_exponent": "1/2", "schedule": "step:1,2"},  # few rows: sample space
        {"width": 128, "batch": 16, "momentum": 0.0, "loss": "mse", "method_options": {"memory": "batch"}},
        {"batch": 8, "epochs": 5, "lr": 0.2},  # inverses that are stale, with moves that grow
        {"batch": 8, "epochs": 2, "method_options": {"fisher": "mc"}},
        {"batch": 8, "epochs": 2, "method_options": {"fisher": "signs", "trust": "none"}},
    ],
    ids=" ".join,
)
def test_every_option_of_a_stack_is_that_of_its_runs(fields, left_alone):
    config = SMALL.replace(**{"batch": 32, "lr": 0.003, **fields})
    ours, theirs = both([config.replace(lr=config.lr * times, seed=seed) for times in (0.5, 1) for seed in (3, 4)])
    same(ours, theirs, rel=1e-9)
    assert {run.status for run in ours} == {"finished"}
    assert not left_alone


def test_in_float32_it_is_the_same_to_its_rounding():
    configs = [
        SMALL.replace(dtype="float32", batch=32, loss="mse", lr=lr, seed=seed) for lr in (0.004, 1e6) for seed in (0, 1)
    ]
    ours, theirs = both(configs)
    assert [run.status for run in ours] == [run.status for run in theirs] == ["finished"] * 2 + ["diverged"] * 2
    same(ours[:2], theirs[:2], rel=1e-3)


def test_a_stack_of_one_and_one_of_none():
    ours, theirs = both([SMALL.replace(batch=32, lr=0.003)])
    same(ours, theirs, rel=1e-9)
    assert train_stack([]) == []


def test_when_all_but_one_have_diverged_that_one_goes_on():
    configs = [SMALL.replace(method="sgd", batch=32, lr=lr) for lr in (1e9, 0.1, 1e8)]
    same(*both(configs), rel=1e-9)


def test_a_run_that_is_not_finite_from_the_start_says_so():
    data = DIGITS.subset(96, 40)
    bad = data.train.inputs.double()
    bad[3] = float("nan")
    data = replace(data, train=replace(data.train, inputs=bad))
    configs = [SMALL.replace(lr=lr) for lr in (0.01, 0.1)]
    ours = train_stack(configs, dataset=data)
    same(ours, [train(config, dataset=data) for config in configs], rel=1e-9)
    assert "before anything is learned" in ours[0].reason


def test_a_factorization_that_needs_more_than_the_first_rung_is_left_to_train(monkeypatch, left_alone):
    """The second run's, at its second step: it comes to the same end as if nobody had stacked it."""
    plain, calls = inverses.attempt, []

    def sometimes(damped):
        inverses, numbers = plain(damped)
        if len(damped[0][1]) == 1:  # of train
            return inverses, numbers
        calls.append(len(damped[0][1]))
        if len(calls) > 3 and calls[-1] == 3:
            numbers = [number.where(torch.arange(3) != 1, torch.nan) for number in numbers]
        return inverses, numbers

    monkeypatch.setattr(inverses, "attempt", sometimes)
    plainly = {"trust": "none"}
    configs = [SMALL.replace(width=128, batch=16, lr=0.003, seed=seed, method_options=plainly) for seed in range(3)]
    ours, theirs = both(configs)
    assert left_alone == [configs[1]]
    assert set(calls) == {3, 2}
    same(ours, theirs, rel=1e-9)
    assert numbers(ours[1]) == numbers(theirs[1])


def test_steps_that_train_skips_are_left_to_it(left_alone):
    """Inputs so large that their squares overflow, though the loss does not."""
    data = DIGITS.subset(96, 40)
    parts = {
        name: replace(part, inputs=part.inputs.float()) for name, part in (("train", data.train), ("test", data.test))
    }
    parts["train"].inputs[3] = 1e25
    data = replace(data, **parts, mean=None, std=None)
    config = SMALL.replace(dtype="float32", loss="cross-entropy", model_options={"activation": "tanh"}, epochs=12)
    configs = [config.replace(lr=lr) for lr in (1e-4, 1e-3)]
    ours = train_stack(configs, dataset=data)
    assert left_alone == configs
    same(ours, [train(config, dataset=data) for config in configs], rel=1e-5)
    assert "10 steps in a row were skipped" in ours[0].reason


def test_ctrl_c_ends_what_is_under_way_after_its_step():
    configs = [SMALL.replace(method="sgd", batch=32, lr=lr) for lr in (0.1, 1e9)]
    at = []

    def stop(progress):
        at.append((progress.epoch, progress.step, progress.running))
        if progress.step == 4:
            signal.raise_signal(signal.SIGINT)

    one, other = train_stack(configs, dataset=DIGITS, progress=stop)
    assert (one.status, one.reason, len(one.epochs)) == ("interrupted", "interrupted at step 4", 1)
    assert (other.status, len(other.epochs)) == ("diverged", 0)
    assert at == [(1, 1, 2), (1, 2, 2), (1, 3, 2), (2, 4, 1)]


def test_global_random_streams_are_left_as_they_were():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_stack([SMALL.replace(lr=0.01)], dataset=DIGITS)
    assert torch.equal(before, torch.get_rng_state())


def test_runs_share_the_time_of_their_stack():
    first, second = train_stack([SMALL.replace(lr=lr) for lr in (0.001, 0.002)], dataset=DIGITS)
    assert first.seconds == second.seconds >= first.final["seconds"] > 0


def test_configs_that_do_not_fit_one_stack_are_refused():
    with pytest.raises(RunError, match=r"share all but lr, damping, .* these differ in width, epochs"):
        train_stack([SMALL, SMALL.replace(width=64, epochs=9)], dataset=DIGITS)
    with pytest.raises(RunError, match=r"model='cnn': a stack is of MLPs\. Train such runs one by one"):
        train_stack([SMALL.replace(model="cnn")], dataset=DIGITS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"method_options": {"fisher": "empirical", "memory": "batch", "nesterov": True}}, ""),
        ({"method": "sgd", "dtype": "tf32"}, ""),
        ({"method": "shampoo"}, "knows sgd, kfac and foof"),
        ({"method_options": {"fisher": "exact"}}, "fisher='exact'"),
        ({"method_options": {"memory": "ema:0.9"}}, "memory='ema:0.9'"),
        ({"method_options": {"exclude": ["fc1"]}}, "exclude"),
        ({"damping": "max-eigenvalue"}, "eigenvalues"),
        ({"record": ["features"]}, "record="),
        ({"augment": ["crop"]}, "augment="),
        ({"clip_norm": 1.0}, "clip_norm=1.0"),
        ({"method_options": {"trust": "kl:1"}}, "trust='kl:1'"),
        ({"compile": True}, "compile=True"),
        ({"dtype": "bfloat16"}, "float32 or float64"),
    ],
)
def test_it_is_said_why_a_run_cannot_be_stacked(fields, reason):
    said = stackable(SMALL.replace(**fields))
    assert reason in said if reason else not said


def test_stacks_are_made_where_they_gain():
    config = SMALL.replace(dtype="float32", samples=None, batch=128)
    assert stack_size(config, DIGITS) == choice.LARGEST_STACK["cpu"]
    assert stack_size(config.replace(width=2048), DIGITS) == 1
    assert stack_size(config.replace(model="cnn"), DIGITS) == 1
    wide = config.replace(width=400)
    assert 1 < stack_size(wide, DIGITS, workers=16) < stack_size(wide, DIGITS)  # they share the memory
