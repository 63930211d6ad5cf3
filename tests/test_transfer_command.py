"""``mukron transfer`` and ``mukron tune`` as a user runs them: what they print, leave behind and refuse."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.cli.numbers import read_numbers
from mukron.study import Certificate, StudyRecord

SMALL = ("--samples", "64", "--epochs", "2", "--batch", "32", "--base-width", "8", "--widths", "8,16", "--seeds", "2")
RATES = ("--lr", "0.01:0.04")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: object):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def refuse(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def only_study() -> Path:
    [folder] = Path("studies").iterdir()
    return folder


def test_a_study_ends_with_its_certificate_its_page_and_an_exit_code():
    result = invoke("transfer", *SMALL, *RATES, "--json", "certificate.json")
    assert "Does the best learning rate transfer?" in result.stdout
    assert "SP, heuristic" in result.stdout
    assert "muP, rescaled" in result.stdout
    assert "24/24 runs  0 running, 0 diverged" in result.stderr
    certificate = Certificate.from_dict(json.loads(Path("certificate.json").read_text()))
    assert result.exit_code == certificate.exit_code
    folder = only_study()
    assert certificate.judgements[1].verdict in (folder / "report.html").read_text()
    record = StudyRecord.load(folder / "study.json")
    assert record.certificate == certificate
    assert record.widths == (8, 16)
    assert record.config.base_width == 8
    assert str(folder / "report.html") in " ".join(result.stderr.split())


def test_the_same_command_again_runs_nothing_and_more_of_it_runs_the_rest():
    invoke("transfer", *SMALL, *RATES, "--no-report")
    first = StudyRecord.load(only_study() / "study.json")
    invoke("transfer", *SMALL, *RATES, "--no-report")
    assert StudyRecord.load(only_study() / "study.json").results == first.results
    invoke("transfer", *SMALL, "--lr", "0.01:0.08", "--no-report")  # the same folder: the same question
    assert len(StudyRecord.load(only_study() / "study.json").results) == 32
    assert not (only_study() / "report.html").exists()
    invoke("transfer", *SMALL, *RATES, "--widths", 32, "--no-report")  # one width is enough beside those there
    assert StudyRecord.load(only_study() / "study.json").widths == (8, 16, 32)


@pytest.mark.parametrize(
    ("method", "schemes"),
    [
        ("sgd", {"sp", "mup"}),
        ("shampoo", {"sp/max-eigenvalue:1e-06", "mup/max-eigenvalue:1e-06"}),
        ("adamw", {"sp", "mup"}),
        ("foof", {"sp/rescaled:1", "mup/rescaled:1"}),
        ("gauss-newton", {"sp/rescaled:1", "mup/rescaled:1"}),
    ],
)
def test_another_method_is_one_option(method, schemes):
    result = invoke("transfer", *SMALL, "--lr", "0.01,0.02", "--seeds", 1, "--method", method, "--no-report")
    assert result.exit_code in (0, 1, 4)
    record = StudyRecord.load(only_study() / "study.json")
    assert set(record.schemes) == schemes
    assert record.config.method == method


def test_damping_is_tuned_the_same_way():
    result = invoke("transfer", *SMALL, "--over", "damping", "--lr", "0.02", "--damping", "0.25:4:4")
    assert "Does the best damping transfer?" in result.stdout
    record = StudyRecord.load(only_study() / "study.json")
    assert record.over == ("damping",)
    found = {(each.point.scheme, each.point.damping) for each in record.results}
    mup, sp = {("mup/rescaled:1", rho) for rho in (0.25, 1, 4)}, {0.00025, 0.001, 0.004}
    assert {pair for pair in found if pair[0].startswith("mup")} == mup
    assert sorted(rho for scheme, rho in found if scheme.startswith("sp")) == pytest.approx(sorted(sp))
    assert (only_study() / "transfer-damping.svg").exists()


def test_both_are_tuned_on_a_grid_of_both():
    grid = ("--over", "lr,damping", "--damping", "0.5,1,2", "--scheme", "mup", "--seeds", 1)
    result = invoke("transfer", *SMALL, *RATES, *grid)
    assert result.exit_code in (0, 1, 4)
    certificate = StudyRecord.load(only_study() / "study.json").certificate
    assert [judgement.axis for judgement in certificate.judgements] == ["lr", "damping"]


def test_settings_can_be_searched_for():
    invoke("transfer", *SMALL, "--lr", "0.001:0.1:100", "--search", 3, "--seeds", 1, "--no-report")
    record = StudyRecord.load(only_study() / "study.json")
    assert len(record.results) == 2 * 2 * 3


def test_a_network_and_data_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make(width=8):\n"
        "    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),\n"
        "                         nn.Linear(width, 3))\n\n"
        "def data(count=90):\n"
        "    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))\n"
        "    return x, x[:, :3].argmax(1)\n"
    )
    own = ("--factory", "mine:make", "--data", "mine:data", "--set", "data_options.count=60")
    result = invoke("transfer", *own, "--widths", "8:32", *RATES, "--seeds", 1, "--epochs", 2, "--workers", 2)
    assert result.exit_code in (0, 1, 4), result.output
    record = StudyRecord.load(only_study() / "study.json")
    assert (record.config.model, record.config.data, record.config.base_width) == ("mine:make", "mine:data", 8)
    assert record.widths == (8, 16, 32)
    assert len(record.results) == 3 * 3 * 2


def test_a_config_file_says_method_scheme_and_damping():
    fields = {"method": "foof", "damping": "rescaled:0.5", "samples": 64, "epochs": 2, "batch": 32, "base_width": 8}
    Path("run.json").write_text(json.dumps(fields))
    invoke("transfer", "--config", "run.json", "--widths", "8,16", "--seeds", 1, *RATES, "--no-report", "--out", "a")
    record = StudyRecord.load("a/study.json")
    assert record.config.method == "foof"
    assert record.schemes == ("mup/rescaled:0.5",)
    invoke("tune", "--config", "run.json", "--width", 8, "--trials", 2, "--no-report", "--out", "b")
    assert StudyRecord.load("b/study.json").schemes == ("mup/rescaled:0.5",)


def test_a_search_goes_to_both_ends_of_its_range():
    """A grid that doubles from 0.001 would end at 0.064."""
    small = (*SMALL[:6], "--no-report", "--sampler", "random", "--pruner", "none", "--damping", "1")
    invoke("tune", "--width", 8, "--trials", 40, *small, "--epochs", 1, "--samples", 32, "--lr", "0.001:0.1")
    rates = [result.point.lr for result in StudyRecord.load("tuned/study.json").results]
    assert max(rates) > 0.064
    assert min(rates) < 0.002


def test_passwords_are_not_written_down(monkeypatch):
    from mukron.study.database import without_password

    told = "postgresql://me:s3cret@host:5432/db"
    assert without_password(told) == "postgresql://me:***@host:5432/db"
    assert without_password(f"--storage={told}") == "--storage=postgresql://me:***@host:5432/db"
    assert without_password("postgresql://host/db") == "postgresql://host/db"
    assert (
        without_password("postgresql://host/db?user=u&password=PW&x=1")
        == "postgresql://host/db?user=u&password=***&x=1"
    )
    assert "PW" not in without_password("could not parse 'postgres://me:P@PW@host/db?sslpassword=PW'")
    assert without_password("postgresql://me:my secret@host/db") == "postgresql://me:***@host/db"
    assert without_password("postgresql://host/db?password=my secret&x=1") == "postgresql://host/db?password=***&x=1"


def test_folders_with_brackets_are_said_as_they_are():
    result = invoke("transfer", *SMALL, "--lr", "0.01", "--scheme", "mup", "--seeds", 1, "--no-report", "--out", "a[x]")
    assert "study: a[x]" in result.stderr


def test_tune_then_plan():
    tuned = invoke("tune", "--width", 8, "--trials", 6, *SMALL[:6], "--lr", "0.001:0.1")
    assert tuned.exit_code == 0, tuned.output
    assert "learning rate" in tuned.stdout
    assert "mukron plan --width 512" in tuned.stderr
    record = StudyRecord.load("tuned/study.json")
    best = record.best()
    assert len(record.results) == 6
    assert len({result.point.damping for result in record.results}) == 6  # damping is searched for too
    assert Path("tuned/report.html").exists()
    plan = invoke("plan", "--width", 64, "--no-measure")
    assert plan.exit_code == 0, plan.output
    assert f"lr={best.lr!r}" in plan.stdout
    more = invoke("tune", "--width", 8, "--trials", 8, *SMALL[:6], "--lr", "0.001:0.1", "--no-report")
    assert more.exit_code == 0
    assert len(StudyRecord.load("tuned/study.json").results) == 8


def test_tune_says_when_the_best_is_at_the_end_of_its_range():
    small = (*SMALL[:6], "--no-report", "--damping", "1")
    low = invoke("tune", "--width", 8, "--trials", 25, *small, "--lr", "1e-4,1e-3", "--out", "low")
    assert "the best lr is at the high end of its range: give a wider --lr" in " ".join(low.stderr.split())
    wide = invoke("tune", "--width", 8, "--trials", 3, *small, "--lr", "1e-5,1", "--out", "wide")
    assert "the best lr" not in wide.stderr


def test_tune_of_a_method_without_damping():
    tuned = invoke("tune", "--width", 8, "--trials", 3, *SMALL[:6], "--method", "sgd", "--no-report")
    assert tuned.exit_code == 0, tuned.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lr", "2^-9:2^-x"), "--lr '2^-9:2^-x': expected numbers, as in 0.01,0.03 or 2^-9:2^-2"),
        (("--lr", "1:0.1"), "from 1 to 0.1"),
        (("--widths", "sixty"), "--widths 'sixty'"),
        (("--lr", "0.01:0.05"), "the last number is 0.04, not 0.05"),
        (("--storage", "sqlite://"), "expected sqlite:///FILE"),
        (("--over", "momentum"), "--over 'momentum': expected lr, damping or lr,damping"),
        (("--damping", "0.5,2"), "--damping: several, but the study is --over lr"),
        (("--scheme", "mop"), "scheme 'mop'"),
        (("--model", "mlp", "--factory", "a:b"), "give --model or --factory, not both"),
        (("--set", "seed=3"), "a study has its own"),
        (("--set", "lerning=3"), "lerning"),
        (("--metric", "bleu"), "metric 'bleu'"),
        (("--widths", "4,8"), "shrinks"),
        (("--storage", "mysql://here"), "expected sqlite:///FILE or postgresql://"),
        (("--method", "sgd", "--over", "damping", "--lr", "0.1"), "sgd has none"),
        (("--widths", "8"), "give at least two"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, said):
    assert said in refuse("transfer", *SMALL, *RATES, "--no-report", *arguments)


def test_another_question_in_the_same_folder_is_refused_and_nothing_is_lost():
    small = (*SMALL, "--lr", "0.01", "--scheme", "mup", "--seeds", 1)
    invoke("transfer", *small, "--out", "here", "--no-report")
    before = Path("here/study.json").read_bytes()
    said = refuse("transfer", *small, "--epochs", 3, "--out", "here", "--no-report")
    assert "trains something else: epochs 2 there and 3 here" in said
    assert Path("here/study.json").read_bytes() == before


def stored_entries(folder: str) -> list:
    """Trials that another process has written so far."""
    path = Path(folder) / "study.db"
    if not path.exists():
        return []
    with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as database:
        states = database.execute("SELECT state FROM trials").fetchall()
        return [SimpleNamespace(state=state.lower()) for (state,) in states]
    return []


def test_ctrl_c_is_said_and_the_same_command_goes_on():
    slow = ("--epochs", "10", "--samples", "512", "--base-width", "8", "--widths", "8,16", "--seeds", "1")
    slow = (*slow, "--lr", "0.01,0.02", "--scheme", "mup")
    command = [sys.executable, "-m", "mukron.cli", "transfer", *slow, "--no-report", "--out", "here"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not any(entry.state == "running" for entry in stored_entries("here")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command goes on" in " ".join(said.split())
    assert invoke("transfer", *slow, "--no-report", "--out", "here").exit_code in (0, 1, 4)
    assert len(StudyRecord.load("here/study.json").results) == 4


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.5", [0.5]),
        ("0.01,0.03", [0.01, 0.03]),
        ("2^-3:1", [0.125, 0.25, 0.5, 1.0]),
        ("64:1024", [64, 128, 256, 512, 1024]),
        ("1:1000:10", [1, 10, 100, 1000]),
        ("8,16:64", [8, 16, 32, 64]),
        ("1e-3:1e-2:10", [1e-3, 1e-2]),
    ],
)
def test_numbers_as_people_type_them(text, numbers):
    assert read_numbers(text, "--lr") == pytest.approx(numbers)


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "2:1", "1:2:1", "1:2:0", "0:1", "1:1e300:1.0001", "2^", "^2", "1,,2", "-2^0.5", "0^-1"]
)
def test_what_are_no_numbers(text):
    with pytest.raises(ValueError, match="--lr"):
        read_numbers(text, "--lr")
