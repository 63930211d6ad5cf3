"""``mukron train``, as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mukron.damping import Heuristic
from mukron.train import Run, RunConfig

command = import_module("mukron.cli.train")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("train")(command.train)
app.callback()(lambda: None)
SMALL = ("--width", "64", "--base-width", "16", "--samples", "256", "--batch", "64", "--epochs", "2", "--lr", "0.002")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(*arguments: str, code: int = 0, **environment: str):
    result = CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False, env=environment)
    assert result.exit_code == code, result.output
    return result


def refuse(*arguments: str) -> str:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_a_run_from_end_to_end(tmp_path):
    result = run(*SMALL)
    (folder,) = (tmp_path / "runs").iterdir()
    stored = Run.load(folder)
    config = RunConfig(width=64, base_width=16, samples=256, batch=64, epochs=2, lr=0.002)
    assert stored.config == config
    assert folder.name == f"mlp-w64-kfac-mup-{config.key(without=['epochs'])}"
    assert f"Files: runs/{folder.name}" in result.stdout
    assert f"test_accuracy   {stored.final['test_accuracy']:.4g}" in result.stdout
    lines = result.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert all("train_loss" in line and line.endswith("left") for line in lines)
    again = run(*SMALL)
    assert "had ended before" in again.stdout
    assert again.stderr == ""
    assert "had ended before" not in run(*SMALL, "--restart").stdout


def test_more_epochs_go_on_in_the_same_folder(tmp_path):
    run(*SMALL)
    longer = run(*SMALL, "--epochs", "3")
    assert [line.split()[1] for line in longer.stderr.splitlines()] == ["3/3"]
    assert len(list((tmp_path / "runs").iterdir())) == 1
    for epochs in ("2", "3"):  # one that knows its end is another run
        run(*SMALL, "--schedule", "cosine", "--epochs", epochs)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_terminal_gets_a_bar(tmp_path):
    result = run(*SMALL, FORCE_COLOR="1", COLUMNS="100")
    assert "epoch 2/2" in result.stderr
    assert "accuracy 0." in result.stderr
    assert "\x1b[" in result.stderr


def test_options_settings_and_files_make_one_config(tmp_path):
    start = {"lr": 0.5, "epochs": 7, "clip_norm": 2.0, "method_options": {"fisher": "mc"}}
    (tmp_path / "start.json").write_text(json.dumps(start))
    found = command.run_config_from_options(
        tmp_path / "start.json",
        {"lr": 0.25, "damping": "heuristic:1e-3"},
        ["method_options.memory=ema:0.9", "clip_norm=1", "schedule=step:1,2", "augment=[]", "batch=null"],
    )
    assert found == RunConfig(
        lr=0.25,
        epochs=7,
        clip_norm=1.0,
        damping=Heuristic(1e-3),
        schedule="step:1,2",
        method_options={"fisher": "mc", "memory": "ema:0.9"},
    )


def test_names_with_commas_are_lists():
    settings = ["augment=crop,flip", "record=features", "method_options.exclude=fc1,fc2", 'data_options.a=["x"]']
    found = command.run_config_from_options(None, {}, settings)
    assert (found.augment, found.record) == (("crop", "flip"), ("features",))
    assert found.method_options == {"exclude": ("fc1", "fc2")}
    assert command.run_config_from_options(None, {}, ['record=["features", "distance"]']).record == (
        "features",
        "distance",
    )


def test_help_says_the_defaults_of_a_run(monkeypatch):
    defaults = RunConfig()
    assert {name: getattr(defaults, name) for name in command.DEFAULTS} == command.DEFAULTS
    said = re.sub(r"[\s│]+", " ", run("--help", COLUMNS="200").stdout)
    assert "[default: (256)]" in said
    assert "Needs --base-width, unless the function's width has a default" in said
    assert all(f"[default: ({value})]" in said for value in command.DEFAULTS.values())


def test_every_option_reaches_its_field(monkeypatch):
    options = {
        **{"model": "cnn", "width": 32, "base_width": 16, "data": "mnist", "samples": 64, "loss": "mse"},
        **{"method": "foof", "scheme": "ntk", "lr": 0.001, "schedule": "cosine", "momentum": 0.5},
        **{"weight_decay": 0.01, "epochs": 1, "batch": 16, "seed": 3, "dtype": "float64", "device": "cuda"},
    }
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    arguments += ["--compile", "--damping", "constant:1", "--record", "distance", "--record", "features"]
    asked = []

    def note(config, folder, **rest):
        asked.append((config, folder, rest))
        return Run(config, "finished")

    monkeypatch.setattr("mukron.train.train", note)
    run(*arguments, "--out", "here", "--data-dir", "there", "--tracker", "wandb", "--tracker", "a:B", "--restart")
    ((config, folder, rest),) = asked
    assert config == RunConfig(**options, damping="constant:1", compile=True, record=["distance", "features"])
    assert folder == Path("here")
    rest.pop("progress")
    assert rest == {"data_dir": Path("there"), "resume": False, "tracker": ["wandb", "a:B"]}


@pytest.mark.parametrize(
    ("arguments", "lr"),
    [
        ((), 0.1),
        (("--method", "foof"), 1.0),
        (("--method", "sgd"), 0.1),
        (("--method", "adamw"), 0.001),
        (("--set", "method_options.trust=none"), 0.01),
        (("--lr", "0.3"), 0.3),
        (("--lr", "2^-3"), 0.125),
        (("--set", "lr=0.2"), 0.2),
        (("--set", "lr=2^-4"), 0.0625),
        (("--config", "run.json"), 0.01),  # as stored; a run's file is complete
        (("--config", "run.json", "--method", "sgd"), 0.01),
    ],
    ids=str,
)
def test_the_learning_rate_is_that_of_the_methods_record(arguments, lr, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mukron.train.train", lambda config, folder, **rest: (asked.append(config), Run(config, "finished"))[1]
    )
    RunConfig().save("run.json")
    run(*arguments)
    (config,) = asked
    assert config.lr == lr
    if not {"--lr", "--set", "--config"} & set(arguments):
        assert lr == config.spec.usual_lr({})


def test_a_users_own_network(tmp_path):
    (tmp_path / "own_net_to_train.py").write_text(
        "from torch import nn\n"
        "def make(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))\n"
    )
    run(*SMALL, "--factory", "own_net_to_train:make", "--out", "mine")
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["model"] == "own_net_to_train:make"
    assert "not both" in refuse(*SMALL, "--factory", "a:b", "--model", "mlp")
    without = [part for part in SMALL if part not in ("--base-width", "16")]
    assert "needs base_width" in refuse(*without, "--factory", "own_net_to_train:make")
    with (tmp_path / "own_net_to_train.py").open("a") as file:
        file.write("def usual(depth=2, width=32):\n    return make(width)\n")
    sys.modules.pop("own_net_to_train")
    run(*without, "--factory", "own_net_to_train:usual", "--out", "usual")
    assert json.loads((tmp_path / "usual" / "config.json").read_text())["base_width"] == 32
    run(*SMALL, "--factory", "own_net_to_train:usual", "--out", "told")
    assert json.loads((tmp_path / "told" / "config.json").read_text())["base_width"] == 16
    assert "No module named 'nowhere'" in refuse(*SMALL, "--factory", "nowhere:make")


def test_a_sample_is_printed_whatever_stdout_can_encode(monkeypatch):
    text = "caf\u00e9 \ufffd\x1b[31m\r\tone\ntwo"
    stored = Run(RunConfig(), "finished", [{"epoch": 1, "test_loss": 0.5}], sample=text)
    monkeypatch.setattr(command, "_run", lambda *arguments: stored)
    result = CliRunner(charset="ascii").invoke(app, ["train"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "caf? ?\\x1b[31m\\r\tone\ntwo" in result.stdout
    assert "caf\u00e9 \ufffd\\x1b" in run().stdout


def test_pythons_spelling_of_values(monkeypatch):
    seen = []
    ended = Run(RunConfig(), "finished", [{"epoch": 1}])
    monkeypatch.setattr(command, "_run", lambda config, *rest: seen.append(config) or ended)
    run("--model", "gpt", "--set", "model_options.tied=False", "--set", "clip_norm=None", "--set", "compile=True")
    assert (seen[0].model_options["tied"], seen[0].clip_norm, seen[0].compile) == (False, None, True)


def test_a_diverged_run(tmp_path):
    result = run(*SMALL, "--lr", "1e6", code=1)
    assert "diverged after" in result.stdout
    assert "lower the learning rate" in result.stdout


def test_an_interrupted_run_is_continued_by_the_same_command(tmp_path, monkeypatch):
    @contextmanager
    def pressing():
        yield lambda at: signal.raise_signal(signal.SIGINT) if at.step == 5 and at.row is None else None

    with monkeypatch.context() as patch:
        patch.setattr(command, "run_progress", pressing)
        stopped = run(*SMALL, "--out", "one", code=130)
    assert "interrupted at step 5; the same command continues it" in stopped.stderr
    assert Run.load("one").status == "interrupted"
    run(*SMALL, "--out", "one")
    run(*SMALL, "--out", "two")
    assert Run.load("one").final["test_loss"] == Run.load("two").final["test_loss"]


def test_ctrl_c_before_the_first_step(monkeypatch):
    def load(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mukron.train.build"], "load", load)
    run(*SMALL, code=130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lr", "-1"), "error: lr=-1.0: expected a number above 0"),
        (("--method", "kfca"), "no such optimizer (did you mean 'kfac'?); known: sgd, adamw, kfac, foof"),
        (("--model", "mpl"), "unknown model 'mpl' (did you mean 'mlp'?); known: mlp"),
        (("--data", "digit"), "unknown data set 'digit' (did you mean 'digits'?); known: digits"),
        (("--damping", "rescald"), "unknown damping rule 'rescald'"),
        (("--set", "epoch=3"), "a run has no field 'epoch' (did you mean 'epochs'?)"),
        (("--set", "epoch=3"), "its fields: model, width, base_width"),
        (("--set", "foo.bar=3"), "a run has no field 'foo'"),
        (("--set", "epochs"), "--set 'epochs': expected FIELD=VALUE"),
        (("--config", "."), ".: is a folder; expected a run's JSON file"),
        (("--width", "64.5"), "width=64.5: the widths of mlp are whole numbers"),
        (("--device", "meta"), "device='meta': holds no numbers"),
        (("--set", "lr.a=1"), "--set lr.a=1: 'lr' holds no options by name"),
        (("--config", "nothing.json"), "nothing.json: there is no such file"),
        (("--model", "own:net"), "a network of your own needs base_width"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message):
    assert message in refuse(*arguments)


@pytest.mark.parametrize("text", ["0^-1", "2^99999"])
def test_powers_that_are_no_numbers_are_told_in_one_line(text):
    assert f"{text} is too large" in refuse("--set", f"lr={text}")


@pytest.mark.filterwarnings("default")
def test_a_batch_that_is_larger_than_the_data_is_told_in_one_line_and_the_run_goes_on():
    larger = ("--samples", "32", "--batch", "1000", "--width", "64", "--lr", "0.002", "--out", "larger")
    told = "batch=1000: digits has 32 samples to train on, so each step takes these 32, and an epoch is one step"
    for epochs in (1, 2):
        result = run(*larger, "--epochs", str(epochs))
        assert result.stderr.splitlines().count(f"warning: {told}") == 1
    assert [row["step"] for row in Run.load("larger").epochs] == [1, 2]
    assert "warning" not in run(*larger[:2], "--batch", "32", "--epochs", "1", *larger[4:8]).stderr


def test_help_lists_all_that_can_be_recorded_and_every_precision():
    from mukron.train.fields import DTYPES, RECORDS

    shown = run("--help", COLUMNS="300").stdout
    for option, names in (("--record", RECORDS), ("--dtype", DTYPES)):
        (line,) = [line for line in shown.splitlines() if option in line]
        assert [name for name in names if name not in line] == []
