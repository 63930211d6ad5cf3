"""The script of a plan computes what the run does, whatever the targets, the loss and the output are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

import users_task
from mukron.data import as_dataset
from mukron.study.planning import plan_for
from mukron.study.script import kind_of_targets
from mukron.train import RunConfig, train

TOKENS = {"model": "users_task:Tokens", "data": "users_task:tokens"}
NUMBERS = {"model": "users_task:Numbers", "data": "users_task:sums"}
IGNORED = {"data_options": {"ignored": 0.5}}
OWN = {**TOKENS, "loss": "users_task:entropy", "model_options": {"classes_at": 1}}
RUNS = {
    "one number": {**NUMBERS, "loss": "mse"},
    "one number, a loss of one's own": {
        **{**NUMBERS, "loss": "users_task:squares", "model_options": {"squeeze": True}},
        "method": "kfac",
    },
    "ignored": {**TOKENS, **IGNORED, "schedule": "cosine"},
    "squares of ignored": {**TOKENS, **IGNORED, "loss": "mse", "label_smoothing": 0.1},
    "squares with kfac": {**TOKENS, "loss": "mse", "method": "kfac"},
    "half without targets": {**TOKENS, "data": "users_task:half_without_targets"},
    "classes found in dimension one": {**OWN, "method": "kfac"},
    "classes said to be in dimension one": {**TOKENS, "model_options": {"classes_at": 1}, "class_dim": 1},
    "half precision": {**TOKENS, "loss": "users_task:entropy_of_last", "dtype": "bfloat16"},
    "the key of a dictionary": {**TOKENS, "model": "users_task:AsDict", "output": "values"},
    "a number as a key": {**TOKENS, "model": "users_task:AsDict", "output": "0"},
    "a tuple": {**TOKENS, "model": "users_task:AsTuple", "output": "0"},
}


def losses(code: str, capsys) -> list[float]:
    """What the script printed, epoch by epoch."""
    exec(compile(code, "script.py", "exec"), {})
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss (\S+)$", capsys.readouterr().out, re.MULTILINE)]


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_a_script_trains_like_its_run(fields, capsys):
    config = RunConfig(**{"method": "adamw", "lr": 0.02, "epochs": 3, "width": 16, "base_width": 16, **fields})
    plan = plan_for(config, 32, steps=0)
    run = train(plan.config)
    assert losses(plan.code(), capsys) == pytest.approx([row["train_loss"] for row in run.epochs], rel=2e-3)


def test_batches_without_targets(capsys):
    config = RunConfig(**RUNS["half without targets"], method="adamw", width=16, base_width=16, epochs=2, batch=1)
    found = losses(plan_for(config, 16, steps=0).code(), capsys)
    assert found[1] < found[0] < 4


def test_kinds_of_targets():
    kinds = {"tokens": "positions", "half_without_targets": "masked", "sums": "number", "signs": "classes"}
    for name, kind in kinds.items():
        assert kind_of_targets(as_dataset(name, getattr(users_task, name)())) == kind


@pytest.mark.slow
def test_a_script_in_another_folder_finds_the_users_modules(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from users_task import Numbers, sums\n")
    shutil.copy(users_task.__file__, tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    config = RunConfig(model="mine:Numbers", data="mine:sums", loss="mse", base_width=16, epochs=1, method="sgd")
    (tmp_path / "sub" / "wide.py").write_text(plan_for(config, 32, steps=0).code())
    done = subprocess.run([sys.executable, "sub/wide.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss " in done.stdout
