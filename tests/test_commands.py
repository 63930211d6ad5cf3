"""``mukron.tune``, ``mukron.transfer`` and ``mukron.plan`` do what the commands do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import typer
from torch import nn
from typer.testing import CliRunner

import mukron
from mukron import figures
from mukron.cli import app
from mukron.models import MLP
from mukron.optim.shapes import known_shapes
from mukron.study import StudyError, StudyRecord, TransferStudy
from mukron.train import RunConfig

SMALL = {"epochs": 1, "batch": 32, "samples": 64}
OPTIONS = ("--epochs", "1", "--batch", "32", "--samples", "64")


def values(record: StudyRecord) -> list:
    runs = [(result.point, result.rows[-1]["train_loss"]) for result in record.results]
    return sorted(runs, key=lambda run: (run[0].width, run[0].lr, run[0].damping, run[1]))


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code in (0, 1, 4), result.output


def test_tune_and_plan_do_what_the_commands_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = mukron.tune(8, trials=3, lr=(0.001, 0.1), folder="ours", report=False, **SMALL)
    command("tune", "--width", 8, "--trials", 3, "--lr", "0.001:0.1", "--out", "theirs", "--no-report", *OPTIONS)
    theirs = StudyRecord.load("theirs/study.json")
    assert len(record.results) == 3
    assert (record.config, values(record)) == (theirs.config, values(theirs))
    for tuned in ("ours", record, record.best()):
        plan = mukron.plan(32, tuned, steps=0)
        assert (plan.config.width, plan.tuned) == (32, record.best())


@pytest.mark.parametrize("over", ["lr", "damping"])
def test_transfer_does_what_the_command_does(over, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"lr": (0.01, 0.02)} if over == "lr" else {"damping": (0.5, 1.0)}
    options = ("--lr", "0.01,0.02") if over == "lr" else ("--damping", "0.5,1")
    record = mukron.transfer(
        widths=(8, 16), over=over, schemes="mup", seeds=1, folder="ours", base_width=8, report=False, **given, **SMALL
    )
    small = ("--widths", "8,16", "--over", over, "--scheme", "mup", "--seeds", 1, "--base-width", 8)
    command("transfer", *small, *options, *OPTIONS, "--out", "theirs", "--no-report")
    theirs = StudyRecord.load("theirs/study.json")
    assert len(record.results) == 4
    assert (record.config, values(record)) == (theirs.config, values(theirs))
    assert record.certificate == theirs.certificate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"over": "momentum"}, "over='momentum': expected lr, damping or lr,damping"),
        ({"damping": (0.5, 2)}, "damping: several, but over='lr'; give over='lr,damping' for both"),
        ({"seed": 3}, "seed: a study has its own"),
        ({"widths": (8,)}, r"give at least two, as in widths=\(64, 512\)"),
        ({"lerning": 3}, "mukron.transfer has no argument 'lerning'.*its arguments: widths,.*fields of a run: model"),
        ({"worker": 2}, r"no argument 'worker' \(did you mean 'workers'\?\)"),
        ({"metod": "sgd"}, r"no argument 'metod' \(did you mean 'method'\?\)"),
        ({"config": "run.json"}, r"config='run.json': expected a RunConfig; RunConfig.load\(path\) reads a file"),
        ({"model": "mlp", "factory": "a:b"}, "give model= or factory=, not both"),
        ({"search": 3, "sampler": "cma"}, "unknown sampler 'cma'; known: "),
    ],
)
def test_wrong_requests(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        mukron.transfer(**{"widths": (8, 16), "base_width": 8, **SMALL, **arguments})


@pytest.mark.parametrize("width", ["16", 0, -8, (8, 16)])
def test_a_width_that_is_none_is_called_by_its_name(width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyError, match=re.escape(f"width={width!r}: expected a number above 0")):
        mukron.tune(width, trials=1, **SMALL)


def test_plans_of_nothing(tmp_path):
    with pytest.raises(StudyError, match=r"there is no study.*run mukron.tune"):
        mukron.plan(64, tmp_path)
    with pytest.raises(StudyError, match="tuned= is a run already"):
        mukron.plan(64, RunConfig(), scheme="mup")


def test_the_names_are_functions_and_cost_nothing_until_used():
    code = (
        "import sys, mukron; assert 'torch' not in sys.modules\n"
        "import mukron.study, mukron.study.transfer\n"
        "assert all(callable(f) and f.__module__ == 'mukron.commands' for f in "
        "(mukron.tune, mukron.transfer, mukron.plan))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The commands' options and the functions' arguments.

OTHERWISE = {  # options that functions have in another form
    "tune": {
        **dict.fromkeys(("role", "settings"), "fields of a run, by their names: roles=, ..."),
        "out": "folder",
        "trust": "config=RunConfig.load(path).trusted()",
    },
    "transfer": {
        **dict.fromkeys(("role", "settings"), "fields of a run, by their names: roles=, ..."),
        "out": "folder",
        "trust": "config=RunConfig.load(path).trusted()",
        "scheme": "schemes, one or several",
        "json_file": "the record's certificate.to_dict()",
    },
    "plan": {
        "folder": "tuned",
        "config": "tuned",
        **dict.fromkeys(("data", "loss"), "tuned, with these fields replaced"),
        "measure": "steps",
        "settings": "model_options and method_options",
        **dict.fromkeys(("json_file", "code", "whole"), "the plan's to_dict(), code() and layers(whole=True)"),
    },
}
ONLY_IN_PYTHON = {
    "tune": {"folder", "progress"},  # --out; a bar
    "transfer": {"folder", "schemes", "progress"},  # --out, --scheme
    "plan": {"tuned", "steps", "model_options", "method_options", "dataset"},  # --from, --config, --measure, --set
}
OTHER_DEFAULTS = {  # of those that differ in form alone
    "tune": {"tracker"},  # none: None of an option that may be repeated, () of several
    "transfer": {"tracker"},
    "plan": {"width"},
}


@pytest.mark.parametrize("name", ["tune", "transfer", "plan"])
def test_functions_take_what_their_commands_take(name):
    options = {option.name: option.default for option in typer.main.get_command(app).commands[name].params}
    parameters = inspect.signature(getattr(mukron, name)).parameters
    known = {parameter for parameter in parameters if parameter != "fields"}
    fields = {field.name for field in dataclasses.fields(RunConfig)} if "fields" in parameters else set()
    assert len(options) > 20
    assert set(options) - set(OTHERWISE[name]) - known - fields == set()
    assert known - set(options) == ONLY_IN_PYTHON[name]
    assert set(OTHERWISE[name]) <= set(options) - known  # no exception that is not needed
    shared = known & set(options) - OTHER_DEFAULTS[name]
    defaults = {option: parameters[option].default for option in shared}
    required = {option for option in shared if defaults[option] is inspect.Parameter.empty}
    assert required == ({"width"} if name == "tune" else set())
    assert {option: defaults[option] for option in shared - required} == {
        option: options[option] for option in shared - required
    }


class CapturedError(Exception):
    pass


def captured(function, **arguments) -> TransferStudy:
    """The study that a function would run."""
    studies = []

    def run(study, *_):
        studies.append((study, _))
        raise CapturedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransferStudy, "run", run)
        with pytest.raises(CapturedError):
            function(**arguments)
    ((study, given),) = studies
    study.run_with = given
    return study


@pytest.mark.parametrize(
    ("function", "own"),
    [(mukron.tune, {"width": 8, "trials": 2}), (mukron.transfer, {"widths": (8, 16), "search": 3, "one_by_one": True})],
)
def test_studies_get_what_functions_are_given(function, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    places = {"folder": "there", "storage": url, "name": "mine", "data_dir": "sets"}
    given = {"workers": 3, "keep_runs": True, "tracker": ("mlflow", "wandb"), "sampler": "random", "progress": False}
    study = captured(function, **own, **places, **given, base_width=8, device="cpu", **SMALL)
    assert (study.url, study.name, study.data_dir) == (url, "mine", "sets")
    assert (study.runs, study.tracker) == (str((tmp_path / "there" / "runs").resolve()), ("mlflow", "wandb"))
    assert study.design.search.sampler == "random"
    assert study.one_by_one == own.get("one_by_one", False)
    assert study.run_with == (3, False)
    assert optuna.get_all_study_names(url) == (["mine"] if function is mukron.transfer else [])  # that looks for widths


TRACKER = """
import os
from pathlib import Path
from torch import nn

class Names:
    def __init__(self, run):
        self.run = run
    def start(self, config):
        with Path(os.environ["NAMES"]).open("a") as file:
            file.write(f"{self.run.group} {self.run.name}\\n")
    def log(self, step, metrics):
        pass
    def finish(self, summary):
        pass

def network(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_of_study.py").write_text(TRACKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("NAMES", str(tmp_path / "names"))
    import own_of_study

    return own_of_study


def test_functions_and_classes_of_a_module_reach_every_process(own_module):
    """They are stored by their names: workers import them, and another call by name continues the study."""
    given = {"widths": (8, 16), "lr": (0.1, 0.2), "schemes": "mup", "seeds": 1, "method": "sgd", "folder": "own"}
    record = mukron.transfer(
        **given, factory=own_module.network, tracker=own_module.Names, workers=2, keep_runs=True, **SMALL
    )
    assert record.config.model == "own_of_study:network"
    assert record.config.base_width == 8
    assert len(record.results) == 4
    assert len(set(Path("names").read_text().splitlines())) == 4
    assert len([*Path("own/runs").rglob("result.json")]) == 4
    assert "report.html" in os.listdir("own")
    again = mukron.transfer(
        **given, model="own_of_study:network", tracker="own_of_study:Names", report=False, **SMALL
    )  # trains nothing again
    assert values(again) == values(record)
    assert len(Path("names").read_text().splitlines()) == 4


def nested():
    def network(width):
        return MLP(width)

    return network


def of_a_script(width):
    return MLP(width)


of_a_script.__module__ = "__main__"


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (lambda width: MLP(width, depth=2), "it is not what module '[a-z_.]*' has as '<lambda>'"),
        (nested(), "it is not what module"),
        (of_a_script, "it is defined in a script or a notebook"),
        (nn.Linear(2, 2), "it is no function or class with a name"),
    ],
)
def test_functions_that_other_processes_cannot_import_are_refused(own, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    way_out = 'Define it in a module and give it from there, or as "MODULE:FUNCTION"'
    for given in ({"factory": own}, {"model": own}, {"data": own}, {"loss": own}, {"tracker": own}):
        (name,) = given
        with pytest.raises(ValueError, match=f"^{name}=.*{why}.*{way_out}$"):
            mukron.tune(8, **given)
    assert os.listdir() == []


def test_another_question_in_the_same_folder_is_refused_by_the_folders_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"trials": 1, "method": "sgd", "folder": "mine", "report": False, **SMALL}
    mukron.tune(8, **small)
    with pytest.raises(StudyError) as error:
        mukron.tune(8, **{**small, "epochs": 2})
    assert str(error.value) == (
        f"the study in {tmp_path.resolve() / 'mine'} trains something else: epochs 1 there and 2 here. "
        "Choose another folder (folder=, --out)"
    )
    shared = {"storage": f"sqlite:///{tmp_path / 'shared.db'}", "name": "ours"}
    mukron.tune(8, **{**small, "folder": "other"}, **shared)
    with pytest.raises(StudyError, match=r"^study 'ours' trains something else: epochs 1 there and 2 here\. "):
        mukron.tune(8, **{**small, "folder": "other", "epochs": 2}, **shared)


def test_a_report_is_written_where_figures_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"trials": 1, "method": "sgd", **SMALL}
    mukron.tune(8, folder="with", **small)
    assert "report.html" in os.listdir("with")
    monkeypatch.setattr(figures, "available", lambda: False)
    with pytest.warns(UserWarning, match=r"need matplotlib \(pip install 'mukron\[studies\]'\); report=False"):
        mukron.tune(8, folder="without", **small)
    assert "report.html" not in os.listdir("without")


# Plans for many ranks.


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (
            {
                **{"ranks": 64, "shapes": "llama-7b", "batch": 512, "positions": 2048, "sharding": "fsdp"},
                **{"bandwidth": 1e10, "method_options": {"exclude": ["head"], "factor_every": 10}},
            },
            "--ranks 64 --shapes llama-7b --batch 512 --positions 2048 --sharding fsdp --bandwidth 1e10 "
            "--set method_options.exclude=head --set method_options.factor_every=10",
        ),
        (
            {"width": 64, "ranks": 4, "model": "gpt", "batch": 64, "positions": 32, "model_options": {"depth": 3}},
            "--width 64 --ranks 4 --model gpt --batch 64 --positions 32 --set depth=3",
        ),
        (
            {"width": 2, "ranks": 2, "model": "resnet18", "batch": 8, "sample": (3, 32, 32), "method": "foof"},
            "--width 2 --ranks 2 --model resnet18 --batch 8 --sample 3,32,32 --method foof",
        ),
        (
            {"width": 64, "ranks": 2, "factory": MLP, "batch": 8, "communication": "rows", "speed": 1e12},
            "--width 64 --ranks 2 --factory mukron.models:MLP --batch 8 --communication rows --speed 1e12",
        ),
    ],
)
def test_plans_for_ranks_are_those_of_the_command(arguments, options, tmp_path):
    command("plan", *options.split(), "--json", tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    prediction = mukron.plan(**arguments)
    ours = json.loads(json.dumps(prediction.to_dict()))
    assert ours == {name: stored[name] for name in ours}
    assert prediction.layers().rows[-1][0] == "all"
    assert prediction.cost().columns[0] == "of a rank"


def test_shapes_may_be_ones_own():
    shapes = known_shapes("llama-7b")
    run = {"ranks": 8, "batch": 64, "positions": 2048}
    assert mukron.plan(shapes=shapes, **run) == mukron.plan(shapes="llama-7b", **run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shapes": "llama-7b", "batch": 8}, "^shapes, batch: needs ranks=, the number of processes"),
        ({"width": 64, "method": "foof"}, "^method: needs ranks="),
        ({"ranks": 4, "shapes": "llama-7b", "batch": 8, "tuned": "x", "steps": 0}, "^tuned, steps: .*leave out ranks="),
        ({}, "^width= is missing"),
        ({"ranks": 4, "shapes": "llama-7b"}, "^ranks= needs batch="),
        ({"ranks": 4, "batch": 8}, "^ranks= needs one of model="),
        ({"ranks": 4, "batch": 8, "model": "mlp"}, "need width="),
        ({"ranks": 4, "batch": 8, "model": "mlp", "width": -1}, "^width=-1: expected a positive number"),
        ({"ranks": 4, "batch": 8, "model": "mlp", "width": 2.5}, "width=2.5: the widths of this network are whole"),
        ({"ranks": 4, "batch": 8, "model": "mlp", "width": 8, "model_options": {"dept": 3}}, "^model_options={'dept'"),
        ({"ranks": 4, "batch": 8, "factory": 3, "width": 8}, "^factory=3: expected a function of the width"),
        ({"ranks": 4, "batch": 8, "shapes": "llama-7b", "width": 8}, "^shapes= is a network of fixed sizes"),
        ({"ranks": 4, "batch": 8, "model": "mlp", "width": 8, "sample": 64}, r"^sample=\(64\): expected the sizes"),
        ({"ranks": 4, "batch": 8, "model": "cnn", "width": 8, "sample": (3, 7.5)}, r"^sample=\(3,7.5\): expected"),
        ({"ranks": 4, "batch": 8, "shapes": "llama-7b", "bandwidth": -1}, "^bandwidth=-1: expected a positive number"),
        (
            {"ranks": 4, "batch": 8, "shapes": "llama-7b", "method_options": {"beta": 1}},
            "^method_options: beta=1: kfac has no such option; it has ",
        ),
        (
            {"ranks": 4, "batch": 8, "shapes": "llama-7b", "communication": "auto:1e9"},
            r"^communication='auto:1e9': give the bandwidth as bandwidth=1e\+09",
        ),
    ],
)
def test_wrong_plans_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        mukron.plan(**arguments)
