"""A plan for a wide network: numbers as the optimizer itself has them, code that trains as a run does, honest costs."""

from __future__ import annotations

import json

import pytest
import torch

from mukron.optim import SecondOrder
from mukron.study import StudyError, planning
from mukron.study import cost as costs
from mukron.study.planning import plan_for
from mukron.train import RunConfig, build, dataset_of, train

CNN = {"model": "cnn", "width": 8, "base_width": 8}
FEW = {"samples": 24, "test_samples": 8, "epochs": 3}
OWN = {"model": "own_network:make", "base_width": 16, "width": 16, "momentum": 0.5}
TIED = {"model": "gpt", "base_width": 16, "width": 16, "batch": 24, "model_options": {"depth": 1, "tied": True}}
WORDS = {"model": "words_of_pixels:make", "base_width": 16, "width": 16}


def tuned(**fields) -> RunConfig:
    return RunConfig(**{"width": 32, "base_width": 32, "lr": 0.02, **FEW, **fields})


RUNS = {
    "kfac": {"loss": "mse", "damping": "rescaled:0.5", "seed": 3},
    "kfac, scheduled and clipped": {"schedule": "cosine", "warmup": 1.0, "clip_norm": 0.1, "label_smoothing": 0.1},
    "kfac, warming up to the end": {"warmup": 3.0, "damping": "fixed:1,0.1", "method_options": {"trust": "kl:0.01"}},
    "kfac, own network": {
        **OWN,
        "method_options": {"memory": "ema:0.9", "inverse_every": 2, "fallback_lr": 0.1, "exclude": ["blocks.1.up"]},
        "schedule": "linear",
    },
    "foof": {"method": "foof", "schedule": "step:1,2", "method_options": {"memory": "window:2"}, **CNN},
    "shampoo": {"method": "shampoo:1/4", "weight_decay": 0.1, "dtype": "float64", "scheme": "ntk", "decay": "1/width"},
    "shampoo, own network": {
        **OWN,
        "method": "shampoo",
        "output_exponent": "zero",
        "method_options": {"trust": "graft:adam"},
    },
    "gauss-newton": {"method": "gauss-newton", "samples": 8, "model_options": {"activation": "tanh"}},
    "sgd": {"method": "sgd", "weight_decay": 0.01, "method_options": {"nesterov": True}, "loss": "mse"},
    "sgd, own network": {**OWN, "method": "sgd", "lr": 0.1, "scheme": "uniform:1/4"},
    "adamw": {"method": "adamw", "lr": 0.002, "weight_decay": 0.1, "method_options": {"beta2": 0.99, "eps": 1e-7}},
    "kfac, embedding": WORDS,
    "kfac, embedding and no trust": {**WORDS, "method_options": {"trust": "none"}},
    "shampoo, embedding that is not excluded": {**WORDS, "method": "shampoo", "method_options": {"exclude": []}},
    "kfac, tied gpt": TIED,
    "kfac, tied gpt and no trust": {**TIED, "method_options": {"trust": "none"}},
    "shampoo, tied gpt": {**TIED, "method": "shampoo"},
    "bfloat16": {"method": "kfac", "dtype": "bfloat16", "label_smoothing": 0.1, "loss": "mse"},
}


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_numbers_are_those_of_the_optimizer(fields):
    config = tuned(**fields)
    plan = plan_for(config, 2 * config.width, steps=0)
    built = build(plan.config, dataset_of(plan.config))
    optimizer, parameters = built.optimizer, dict(built.model.named_parameters())
    assert [each.name for each in plan.settings] == list(parameters)
    if isinstance(optimizer, SecondOrder):
        rates = {name: optimizer.rate(name) for name in parameters}
        preconditioned = {name for name, entry in optimizer.entries.items() if entry.preconditioned}
    else:
        owners = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        rates, preconditioned = {name: owners[id(p)]["lr"] for name, p in parameters.items()}, set()
    for each in plan.settings:
        parameter, planned = parameters[each.name], built.plan.parameters[each.name]
        assert each.lr == pytest.approx(rates[each.name], rel=1e-12)
        assert (each.shape, each.role, each.std) == (tuple(parameter.shape), planned.role.value, planned.std)
        assert dict(each.damping) == (
            built.plan.scales(plan.config.method)[each.name].damping if each.name in preconditioned else {}
        )


def test_the_table_of_layers():
    plan = plan_for(tuned(lr=0.02, damping=2.0), 128, steps=0)
    table = plan.layers(whole=True)
    assert table.title == "K-FAC, mup, width 128, settings of base width 32"
    assert table.columns == ("parameter", "role", "shape", "initial std", "learning rate", "rho_A x", "rho_B x")
    names, roles, shapes, stds, rates, rho_A, rho_B = zip(*table.rows, strict=True)
    assert names == ("fc1.weight", "fc2.weight", "fc3.weight")
    assert (roles, shapes[1], rates) == (("input", "hidden", "output"), "128 x 128", ("0.02",) * 3)
    assert (rho_A, rho_B) == (("1", "4", "4"), ("0.25", "0.25", "1"))
    narrow = plan_for(tuned(), 32, steps=0)
    ratios = [each.std / base.std for each, base in zip(plan.settings, narrow.settings, strict=True)]
    assert ratios == pytest.approx([1, 4**-0.5, 1 / 4])
    assert [f"{each.std:.4g}" for each in plan.settings] == list(stds)
    assert any("damping rescaled:2 at every width" in note for note in table.notes)
    assert any("trust spectral:1" in note and "those of K-FAC itself" in note for note in table.notes)
    grafted = plan_for(tuned(method_options={"trust": "graft:adam"}), 128, steps=0).layers()
    assert any("trust graft:adam" in note and "those of Adam" in note for note in grafted.notes)
    assert not any("trust" in note for note in plan_for(tuned(method="sgd"), 128, steps=0).layers().notes)
    shampoo = plan_for(tuned(method="shampoo"), 128, steps=0).layers()
    assert [row[4:] for row in shampoo.rows] == [("0.04", "0.25", "0.25"), ("0.02", "1", "1"), ("0.01", "4", "4")]
    sgd = plan_for(tuned(method="sgd"), 128, steps=0).layers()
    assert [row[4] for row in sgd.rows] == ["0.08", "0.02", "0.005"]


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_the_code_trains_as_the_run_does(fields):
    config = tuned(**fields)
    plan = plan_for(config, 2 * config.width, steps=0)
    config, ends = plan.config, []
    run = train(config, observe=[lambda moment: ends.append(moment.built) or {}])
    assert run.status == "finished"
    built = ends[-1]
    names = executed(plan.code())
    trained, theirs = names["model"].state_dict(), built.model.state_dict()
    assert list(trained) == list(theirs)
    for name, values in theirs.items():
        assert torch.equal(trained[name], values), name
    if isinstance(built.optimizer, SecondOrder):
        assert names["optimizer"].options == built.optimizer.options
    ours = [{**group, "params": None} for group in names["optimizer"].param_groups]
    for group, other in zip(ours, built.optimizer.param_groups, strict=True):
        different = {"params", "lr", "initial_lr"}  # rates stand at their next step
        assert all(group[name] == value for name, value in other.items() if name not in different)


def executed(code: str) -> dict:
    """The names of a script after it ran."""
    names = {}
    exec(compile(code, "script.py", "exec"), names)
    return names


def test_the_code_is_what_a_user_would_write():
    plan = plan_for(tuned(damping="rescaled:0.5", batch=12), 8192, steps=0)
    assert (
        plan.code()
        == '''"""K-FAC at width 8192, settings of base width 32."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mukron
from mukron.data import load
from mukron.models import MLP


def network(width):
    return MLP(width, inputs=64, classes=10)


data = load("digits", samples=24, test_samples=8)
inputs, targets = data.prepare(data.train.inputs), data.train.targets
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True, drop_last=True)

torch.manual_seed(0)
shapes = mukron.base_shapes(network, width=32)
model = network(8192)
p = mukron.parametrize(model, shapes)
optimizer = mukron.KFAC(model, p, lr=0.02, damping=mukron.Rescaled(0.5))

for epoch in range(3):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total / len(loader):.4g}")
'''
    )


def test_a_network_with_options_of_its_own_and_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "deep.py").write_text(
        "from torch import nn\n"
        "def net(units, sizes=(3, 5), bias=False):\n"
        "    assert sizes == (1, 2)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, units, bias), nn.ReLU(), nn.Linear(units, 10, bias))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tuned(model="deep:net", model_options={"sizes": [1, 2], "bias": True}, method="adamw")
    plan = plan_for(config, 64, steps=0)
    assert "    return net(width, sizes=(1, 2), bias=True)\n" in plan.code()
    names = executed(plan.code())
    assert names["model"][1].weight.shape == (64, 64)
    gpu = planning.script(plan.config.replace(device="cuda", compile=True), plan.network_options)
    compile(gpu, "gpu.py", "exec")
    assert 'model.to("cuda")\n' in gpu
    assert 'x, y = x.to("cuda"), y.to("cuda")\n' in gpu
    assert "output = compiled(x)\n" in gpu


def test_a_width_beyond_all_memory_is_planned_and_not_measured():
    plan = plan_for(tuned(), 2**20, steps=3)
    assert plan.memory.parameters == 2**20 * (64 + 2**20 + 10)
    assert plan.steps == ()
    assert plan.by_layer is None
    assert "TiB, and " in plan.not_measured
    assert "are free here; plan it on a larger machine" in plan.cost().text(width=None)
    assert plan.settings[1].damping == {"A": 2**15, "B": 2**-15}


def test_memory_that_is_not_there(monkeypatch):
    config = tuned()
    total = plan_for(config, 64, steps=0).memory.total
    monkeypatch.setattr(planning, "available_memory", lambda device: total - 1)
    monkeypatch.setattr(planning, "measured", None)  # not called
    plan = plan_for(config, 64)
    assert plan.not_measured.startswith("it takes about")
    assert plan.cost().title == "Memory of a step, width 64, batch 24, cpu"
    assert [row[0] for row in plan.cost().rows] == ["weights", "gradients", "moments", "factors", "work", "total"]


PLAIN = {"trust": "none"}
FORMS = {
    "averages": {"method": "kfac"},
    "rows": {"method": "kfac", "method_options": PLAIN},
    "matrices": {"method": "kfac", "samples": 200, "method_options": PLAIN, **CNN},
    "a running average": {"method": "kfac", "method_options": {"memory": "ema:0.9"}},
    "foof": {"method": "foof", "method_options": {"memory": "window:3"}},
    "every output": {"method": "kfac", "method_options": {"fisher": "exact", **PLAIN}},
    "shampoo": {"method": "shampoo"},
    "an embedding that is left to the fallback rule": {"method": "kfac", **WORDS},
    "a head tied to an embedding": {"method": "kfac", **TIED, "method_options": PLAIN},
    "shampoo with a large side": {"method": "shampoo", "method_options": {"max_size": 100, "memory": "batch"}, **CNN},
    "shampoo with one side": {"method": "shampoo:1/2,input", "method_options": {"memory": "batch"}},
}


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
def test_factors_are_counted_as_the_optimizer_holds_them(fields):
    config = tuned(**{"samples": 24, **fields})
    plan = plan_for(config, 4 * config.width, steps=0)
    data = dataset_of(plan.config)
    _, optimizer = costs.make_steps(plan.config, data, 3)
    states = [state["operators"] for state in optimizer.state.values() if "operators" in state]
    held = sum(operator.memory for operators in states for operator in operators["weight"].values())
    remembers = "ema" in str(fields) or "method_options" not in fields
    assert plan.memory.factors == pytest.approx((1 + remembers) * held, rel=0.01)


def test_a_step_is_measured():
    plan = plan_for(tuned(samples=64), 512, steps=2)
    assert plan.not_measured == ""
    own, sgd = plan.steps
    assert (own.method, sgd.method) == ("K-FAC", "SGD")
    assert min(own.seconds, sgd.seconds) > 0
    held = plan.memory.weights + plan.memory.gradients
    assert sgd.memory > held / 2
    assert own.memory > held / 2
    assert [row[:2] for row in plan.by_layer.rows] == [
        *(("fc1", "512 x 64"), ("fc2", "512 x 512"), ("fc3", "10 x 512")),
    ]
    assert "matrix 512" in plan.by_layer.rows[1][2]
    table = plan.cost()
    assert table.columns == ("method", "time", "x SGD", "peak memory", "x SGD")
    assert table.rows[1][2::2] == ("1.00", "1.00")
    content = json.loads(json.dumps(plan.to_dict()))
    assert content["steps"][0]["memory"] == own.memory
    assert content["steps"][0]["layers"]["rows"][1][1] == "512 x 512"


INTERVALS = {
    "the defaults": ({}, ["refresh", "refresh", "measure", "measure", "measure"], 12.0),
    "no bound": ({"trust": "none"}, ["refresh", "refresh", "refresh", "refresh"], 30.0),
    "factors with inverses": ({"factor_every": 10}, ["refresh", "refresh", "apply", "apply", "apply"], 3.9),
    "two intervals": (
        {"factor_every": 5, "inverse_every": 10},
        ["refresh", "refresh", "apply", "apply", "apply", "measure"],
        (30 + 10 + 8 * 1) / 10,
    ),
}


@pytest.mark.parametrize(("options", "work", "mean"), INTERVALS.values(), ids=INTERVALS)
def test_a_step_between_two_refreshes_is_timed_as_one(options, work, mean):
    """With refreshes at each of the first ten steps, all that was timed refreshed, and a step seemed as costly."""
    config = costs.timed_config(tuned(method_options=options))
    timed, optimizer = costs.make_steps(config, dataset_of(config), 3)
    assert [step.work for step in timed][: len(work)] == work
    assert len(timed) <= costs.MOST_STEPS
    assert len(timed) == costs.MOST_STEPS or sum(step.seconds for step in timed) > costs.LEAST_SECONDS
    price = {"refresh": 30.0, "measure": 10.0, "apply": 1.0}
    priced = [costs.TimedStep(price[kind] + 1000 * (number == 0), kind) for number, kind in enumerate(work)]
    assert costs.mean_step(priced, optimizer.options) == pytest.approx(mean)
    assert costs.mean_step(priced[:2], optimizer.options) == pytest.approx(30)  # too slow for more


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("raise SystemExit('no luck today')", "a step of SGD at width 64 failed: no luck today"),
        ("import os; os.kill(os.getpid(), 9)", "was killed, most likely as memory ran out"),
        ("import time; time.sleep(60)", "was not done after 0.5 seconds; plan it on a faster machine"),
    ],
)
def test_what_cannot_be_measured_is_said(monkeypatch, work, said):
    monkeypatch.setattr(costs, "MEASURE", work)
    monkeypatch.setattr(costs, "TIME_LIMIT", 0.5 if "sleep" in work else 60)
    plan = plan_for(tuned(), 64)
    assert said in plan.not_measured
    assert said in plan.cost().text(width=None)


def test_sp_is_refused():
    with pytest.raises(StudyError, match=r"tuned under SP.*do not transfer.*Tune with scheme 'mup'"):
        plan_for(tuned(scheme="sp"), 64, steps=0)


def test_a_rule_that_breaks_mup_is_told():
    notes = "\n".join(plan_for(tuned(damping="heuristic"), 64, steps=0).layers().notes)
    assert "WARNING: with this rule the best settings move with the width, muP or not" in notes
    assert "--damping rescaled" in notes
    assert "WARNING" not in str(plan_for(tuned(), 64, steps=0).layers())


def test_learning_rates_count_from_the_base_width_that_the_run_had():
    """A run at width 128 whose base is the network's usual 64 was not trained as one whose base is 128."""
    plan = plan_for(RunConfig(width=128, method="sgd", lr=1.0, **FEW), 256, steps=0)
    assert plan.config.base_width == 64
    assert [each.lr for each in plan.settings] == [4, 1, 1 / 4]
    assert plan_for(tuned(base_width=16, method="sgd", lr=1.0), 64, steps=0).settings[0].lr == 4


def test_a_method_of_its_own_damping_says_it():
    plan = plan_for(tuned(method="shampoo"), 64, steps=0)
    assert plan.config.damping.text() == "max-eigenvalue:1e-06"
    assert "damping=mukron.MaxEigenvalue(1e-06)" in plan.code()


def test_a_module_of_the_current_folder_does_not_run_where_a_step_is_measured(tmp_path, monkeypatch):
    (tmp_path / "statistics.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    config = RunConfig(method="sgd", width=16, base_width=16, samples=64)
    assert plan_for(config, 32, steps=1).not_measured == ""
