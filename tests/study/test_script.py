"""The script of a plan runs as it is: on built-in data, on texts, on a user's network, data and loss."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from mukron.data import Dataset, Split
from mukron.study.planning import plan_for
from mukron.study.script import kind_of_targets, script
from mukron.train import RunConfig

OWN = """
import torch
from torch import nn

def network(units, bias=True):
    return nn.Sequential(nn.Linear(5, units, bias), nn.Tanh(), nn.Linear(units, 2, bias))

def data(rows=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x.numpy(), torch.stack([x[:, 0], x[:, 1] - x[:, 2]], 1).numpy()

def labelled():
    x, y = data()
    return x, (y[:, 0] > 0)

def pictures():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (24, 3, 8, 8), generator=generator, dtype=torch.uint8), torch.arange(24) % 3

def loss(output, targets):
    return (output - targets.to(output)).abs().sum(-1).mean()

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first, self.head = nn.Linear(5, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.scale * torch.tanh(self.first(x)))

class Parts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.network = network(width)

    def forward(self, x):
        return {"logits": self.network(x), "other": None}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the current folder."""
    (tmp_path / "own_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_task", None)


def losses(code: str, capsys) -> list[float]:
    """What the script printed, epoch by epoch."""
    exec(compile(code, "script.py", "exec"), {})
    printed = re.findall(r"^epoch \d+: loss (\S+)$", capsys.readouterr().out, re.MULTILINE)
    return [float(loss) for loss in printed]


FEW = {"width": 32, "base_width": 16, "samples": 64, "test_samples": 8, "batch": 16, "epochs": 4}
RUNS = {
    "kfac": {"method": "kfac", "lr": 0.1},
    "shampoo": {"method": "shampoo", "lr": 0.05, "loss": "mse"},
    "adamw": {"method": "adamw", "lr": 0.005, "schedule": "cosine", "warmup": 0.5},
    "cnn": {"model": "cnn", "method": "kfac", "lr": 0.1, "base_width": 8},
    "more in a batch than there are samples": {"method": "kfac", "lr": 0.1, "batch": 1000},
}


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_built_in_data(fields, capsys):
    config = RunConfig(**{**FEW, **fields})
    plan = plan_for(config, 2 * config.width, steps=0)
    found = losses(plan.code(), capsys)
    assert len(found) == config.epochs
    assert found[-1] < 0.95 * found[0]


@pytest.mark.parametrize("method", ["kfac", "shampoo", "adamw"])
def test_a_gpt_on_a_text(method, capsys):
    config = RunConfig(
        **{**FEW, "model": "gpt", "data": "coriolanus", "samples": 48, "data_options": {"length": 32}},
        **{"method": method, "lr": {"kfac": 0.1, "shampoo": 0.05, "adamw": 0.01}[method]},
        model_options={"depth": 1, "tied": True},
    )
    code = plan_for(config, 32, steps=0).code()
    assert ("class_dim=-1" in code) == (method == "kfac")
    found = losses(code, capsys)
    assert found[-1] < 0.95 * found[0]


def test_windows_of_a_text_come_in_the_runs_batches():
    config = RunConfig(**{**FEW, "model": "gpt", "samples": 48, "batch": None}, model_options={"depth": 1})
    assert "batch_size=32, shuffle=True" in plan_for(config, 32, steps=0).code()


def test_classes_in_another_dimension():
    config = RunConfig(**{**FEW, "model": "gpt", "data": "coriolanus"}, method_options={"class_dim": 1})
    code = script(config, {"vocabulary": 256}, "positions")
    assert "class_dim=1)" in code
    assert "F.cross_entropy(output.movedim(1, -1).flatten(0, -2), y.flatten())" in code


def own_config(**fields) -> RunConfig:
    """A run of the user's network; all samples unless another number is given."""
    return RunConfig(**{**FEW, "model": "own_task:network", "samples": None, "test_samples": None, **fields})


def test_a_network_data_and_a_loss_of_the_users_own(own, capsys):
    """Also if their names are those that the script itself has."""
    config = own_config(data="own_task:data", loss="own_task:loss", lr=0.05, data_options={"rows": 100})
    code = plan_for(config.replace(model_options={"bias": False}), 64, steps=0).code()
    assert "from own_task import network as own_network\n" in code
    assert "from own_task import loss as own_loss\n" in code
    assert 'likelihood="gaussian"' in code
    assert "import functional" not in code
    found = losses(code, capsys)
    assert found[-1] < 0.95 * found[0]


def test_regression(own, capsys):
    fields = {"data": "own_task:data", "loss": "mse", "samples": 40, "method": "foof", "lr": 0.5, "batch": None}
    code = plan_for(own_config(**fields, model_options={"bias": True}), 64, steps=0).code()
    assert "loader = [(inputs, targets)]" in code
    assert ".subset(samples=40)\n" in code
    found = losses(code, capsys)
    assert found[-1] < 0.95 * found[0]


def test_labels_of_the_users_own(own, capsys):
    config = RunConfig(
        **{
            **FEW,
            "model": "own_task:Net",
            "data": "own_task:labelled",
            "test_samples": None,
            "samples": 40,
            "roles": {"scale": "vector"},
        }
    )
    code = plan_for(config, 64, steps=0).code()
    assert 'roles={"scale": "vector"}' in code
    found = losses(code, capsys)
    assert found[-1] < found[0]


def test_an_output_among_several(own, capsys):
    config = own_config(data="own_task:labelled", model="own_task:Parts", lr=0.1, output="logits")
    code = plan_for(config, 64, steps=0).code()
    assert "output=output_of" in code
    assert losses(code, capsys)[-1] < 1


def test_augmented_pictures_in_double_precision(own, capsys):
    config = RunConfig(
        **{**FEW, "model": "cnn", "data": "own_task:pictures", "samples": None, "test_samples": None, "batch": 8},
        **{"augment": ("crop", "flip"), "dtype": "float64", "method": "adamw", "lr": 0.01},
    )
    plan = plan_for(config, 32, steps=0)
    assert "x = data.prepare(x, torch.float64, augment=augment)" in plan.code()
    assert len(losses(plan.code(), capsys)) == 4


def test_the_folder_of_the_data(tmp_path):
    plan = plan_for(RunConfig(**FEW), 64, steps=0, data_dir=tmp_path)
    assert re.search(rf'data = load\(\s*"digits",\s*"{tmp_path}",\s*samples=64', plan.code())


def test_products_on_a_gpu():
    code = script(RunConfig(**FEW, dtype="tf32", device="cuda"), {"inputs": 64, "classes": 10})
    assert 'torch.set_float32_matmul_precision("high")\n' in code
    compile(code, "script.py", "exec")


def test_kinds_of_targets():
    def dataset(targets):
        return Dataset("x", Split(torch.zeros(4, 2), targets), Split(torch.zeros(0, 2), targets[:0]), 2)

    assert kind_of_targets(dataset(torch.zeros(4, dtype=torch.int64))) == "classes"
    assert kind_of_targets(dataset(torch.zeros(4, 2, dtype=torch.int64))) == "positions"
    assert kind_of_targets(dataset(torch.zeros(4, 2))) == "numbers"


@pytest.mark.slow
def test_the_file_runs_in_a_process_of_its_own(own):
    config = RunConfig(
        **{
            **FEW,
            "model": "own_task:Net",
            "data": "own_task:labelled",
            "test_samples": None,
            "samples": 40,
            "roles": {"scale": "vector"},
        }
    )
    (own / "wide.py").write_text(plan_for(config, 64, steps=0).code())
    done = subprocess.run([sys.executable, "wide.py"], cwd=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 4: loss " in done.stdout
