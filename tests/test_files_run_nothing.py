"""A file runs nothing: functions that it names are imported only if the command or the code names them too."""

from __future__ import annotations

import ast
import json
import pickle
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mukron
from mukron.cli import app
from mukron.imports import FileFunction, UntrustedError
from mukron.study import Design, Point, Result, StudyRecord, TransferStudy
from mukron.study.planning import plan_for
from mukron.study.script import script
from mukron.study.work import Job
from mukron.train import Run, RunConfig, dataset_of, train

SOURCE = Path(mukron.__file__).parent
SENT = '''"""What somebody else has put there."""
from pathlib import Path
Path("it-ran").write_text("")
import torch
from torch import nn
from torch.nn import functional as F

def make(width=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

def data():
    inputs, labels = torch.randn(40, 4), torch.arange(40) % 2
    return (inputs[:32], labels[:32]), (inputs[32:], labels[32:])

def loss(output, targets):
    return F.cross_entropy(output, targets)
'''
FIELDS = {"model": "sent:make", "data": "sent:data", "loss": "sent:loss"}
SMALL = {"base_width": 8, "width": 16, "method": "sgd", "lr": 0.1, "epochs": 1}
QUICK = ("--out", "out", "--lr", "0.1:0.2", "--epochs", "1", "--no-report")
COMMANDS = {
    "train": ("train", "--config", "run.json", "--out", "out"),
    "transfer": ("transfer", "--config", "run.json", "--widths", "8,16", "--seeds", "1", *QUICK),
    "tune": ("tune", "--config", "run.json", "--width", "8", "--trials", "1", *QUICK),
    "plan --config": ("plan", "--config", "run.json", "--width", "32", "--no-measure"),
    "plan --from": ("plan", "--from", "sent", "--width", "32", "--no-measure"),
}


@pytest.fixture(autouse=True)
def sent(tmp_path, monkeypatch):
    """A folder with a config and a study that name functions, and their module, which leaves a file when imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sent", raising=False)
    (tmp_path / "sent.py").write_text(SENT)
    config = RunConfig(**SMALL, **FIELDS)
    config.save("run.json")
    result = Result(Point("mup", 16, 0.1, None, 0), "finished", ({"epoch": 1, "train_loss": 0.5},))
    record = StudyRecord("sent", config, ("lr",), "train_loss", (result,))
    (tmp_path / "sent").mkdir()
    record.save("sent/study.json")
    yield
    monkeypatch.delitem(sys.modules, "sent", raising=False)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_runs_no_function_that_a_file_alone_names(command):
    result = invoke(*command)
    assert result.exit_code == 2, result.output
    assert not Path("it-ran").exists()
    said = " ".join(result.stderr.split())
    assert '.json: "model": "sent:make", "data": "sent:data", "loss": "sent:loss" is code to run' in said
    assert "(--factory sent:make --data sent:data --loss sent:loss), or with --trust" in said
    assert not Path("out").exists()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    "allowed", [("--trust",), ("--factory", "sent:make", "--data", "sent:data", "--loss", "sent:loss")]
)
def test_a_command_runs_them_if_it_names_or_trusts_them(command, allowed):
    result = invoke(*command, *allowed)
    assert result.exit_code in (0, 1, 4), result.output
    assert Path("it-ran").exists()


def test_naming_some_of_them_is_not_naming_all():
    result = invoke(*COMMANDS["plan --from"], "--factory", "sent:make", "--loss", "sent:loss")
    assert result.exit_code == 2
    assert 'study.json: "data": "sent:data" is code to run' in result.stderr
    result = invoke(*COMMANDS["plan --config"], "--factory", "other:make")
    assert result.exit_code == 2
    assert "--factory other:make: the file has model='sent:make'" in result.stderr
    assert not Path("it-ran").exists()


def test_python_runs_no_function_that_a_file_alone_names():
    config, record = RunConfig.load("run.json"), StudyRecord.load("sent/study.json")
    plain = json.loads(Path("run.json").read_text())
    runs = {
        "train": lambda: train(config),
        "a changed config": lambda: train(config.replace(lr=0.2)),
        "a pickled one": lambda: train(pickle.loads(pickle.dumps(config))),
        "a dictionary": lambda: train(RunConfig.from_dict(plain)),
        "a stored run": lambda: train(Run.from_dict(Run(RunConfig(**SMALL, **FIELDS), "finished").to_dict()).config),
        "data": lambda: dataset_of(config),
        "a study's best run": lambda: train(record.best()),
        "plan": lambda: mukron.plan(32, record, steps=0),
        "plan of a folder": lambda: mukron.plan(32, "sent", steps=0),
        "plan_for": lambda: plan_for(config, 32, steps=0),
        "tune": lambda: mukron.tune(16, config=config, trials=1),
        "transfer": lambda: mukron.transfer(config=config, widths=(8, 16)),
        "TransferStudy": lambda: TransferStudy(Design(config, widths=(8, 16), lr=0.1, schemes="mup"), folder="s"),
        "the script": lambda: script(config, {}),
    }
    for name, run in runs.items():
        with pytest.raises(UntrustedError, match="is code to run"):
            run()
        assert not Path("it-ran").exists(), name
    assert not Path("s").exists()
    assert config.trusted() == config
    assert not isinstance(config.trusted().model, FileFunction)
    assert mukron.plan(32, "sent", steps=0, trust=True).config.width == 32
    assert Path("it-ran").exists()


def test_results_are_read_without_their_functions():
    record = StudyRecord.load("sent/study.json")
    assert record.best().model == "sent:make"
    assert record.ranking().rows
    assert str(record)
    assert not Path("it-ran").exists()


def test_what_code_names_stays_named():
    """In the worker that its own foreman starts, in a run that goes on, and in a pickled config."""
    config = RunConfig(**SMALL, **FIELDS)
    study = TransferStudy(Design(config, widths=(8, 16), lr=0.1, schemes="mup", seeds=1), folder="own")
    job = Job.from_dict(json.loads(json.dumps(study.job().to_dict())))
    assert job.design.config.trusted(False) == config
    train(config, "run")
    again = train(config, "run")
    assert again.stored
    assert again.config.trusted(False) == config
    assert pickle.loads(pickle.dumps(config)).trusted(False) == config


def test_two_workers_of_a_study_of_own_functions():
    config = RunConfig(**SMALL, **FIELDS)
    record = TransferStudy(Design(config, widths=(8, 16), lr=0.1, schemes="mup", seeds=1), folder="two").run(2)
    assert [result.status for result in record.results] == ["finished"] * 2
    assert invoke(*COMMANDS["plan --from"][:1], "--from", "two", "--width", "32", "--no-measure").exit_code == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "sent:make as f; import os #"},
        {"data": "sent\nimport os:data"},
        {"loss": "sent:loss()"},
        {"loss": "import:loss"},
        {"model_options": {"depth=__import__('os').system('touch it-ran'), x": 1}},
        {"data_options": {"class": 1}},
    ],
)
def test_no_text_of_a_file_becomes_code_of_a_script(fields):
    with pytest.raises(ValueError, match=r"expected MODULE:FUNCTION|is no name of an argument"):
        RunConfig.from_dict({**SMALL, **fields})


def test_texts_in_a_script_are_texts():
    sly = '"); import os  # \\" \n'
    config = RunConfig(data=sly, roles={sly: "input"}, output=sly, width=16, base_width=16, method="sgd")
    tree = ast.parse(script(config, {"inputs": 64, "classes": 10}))
    assert "os" not in {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert sly in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


CODE_FROM_DATA = {  # what could run something that was read, and the only places that may call it
    "eval": (),
    "exec": (),
    "compile": (),
    "__import__": (),
    "import_module": (
        *("__init__.py", "imports.py", "data/errors.py", "train/trackers.py"),
        *("bench/peers.py", "bench/gpt/references.py"),  # modules that the code names
    ),
    "import_function": (
        *("train/factories.py", "train/build.py", "train/losses.py", "train/trackers.py"),
        *("study/functions.py", "study/script.py", "study/ranks.py", "cli/train.py", "cli/check.py", "cli/explain.py"),
    ),
    "loads": ("curvature/ranks.py",),  # of pickle: between the processes of one run
    "Unpickler": (),
    "Popen": ("workers/foreman.py", "bench/communication/ranks.py"),
    "system": (),
    "run_module": (),
}


def _calls():
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield file.relative_to(SOURCE).as_posix(), node


def _name(node):
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_the_places_that_could_run_what_is_read_are_known():
    """A new one is to be judged: what does it run, and who has named it?"""
    found = {name: set() for name in CODE_FROM_DATA}
    for file, node in _calls():
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if _name(node) in found and (_name(node), owner) not in {("loads", "json"), ("compile", "re"), ("eval", "")}:
            if _name(node) in ("eval", "compile") and owner:  # a network's; torch's
                continue
            found[_name(node)].add(file)
    assert found == {name: {*files} for name, files in CODE_FROM_DATA.items()}


def test_nothing_is_unpickled_from_a_file():
    for file, node in _calls():
        owner = getattr(getattr(node.func, "value", None), "id", "")
        options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if (owner, _name(node)) == ("torch", "load"):
            assert options.get("weights_only") is True, file
        if (owner, _name(node)) == ("np", "load"):
            assert options.get("allow_pickle") is False, file
        if (owner, _name(node)) == ("pickle", "load"):
            assert file == "study/cost.py"  # from the process that measures a step to its child, through a pipe
