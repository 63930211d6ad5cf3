"""A new method is one class with one record: Signum, whose step is the sign of the averaged gradient.

Its entries have size 1 whatever the width, as Adam's have, so that its exponents are Adam's.
"""

from __future__ import annotations

import inspect
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import mukron
from mukron import readers as read
from mukron.cli import app
from mukron.models import MLP
from mukron.optim import SPECS, GradientMomentum, MethodSpec, SecondOrder, StepOptions, register, spec_of
from mukron.optim.direction import dense
from mukron.optim.run_options import EVERY_LAYER, Option, without
from mukron.optim.spec import unregister
from mukron.study.script import script
from mukron.theory import METHODS, Method, Role, get_method, solve
from mukron.train import RunConfig, RunError, build, dataset_of, train

SMALL = {"width": 64, "samples": 64, "test_samples": 64, "epochs": 10, "batch": 32}


def averaging(run, options):
    """The run's momentum is the decay of the average."""
    return {"beta": run.momentum, **options}


def define() -> type[SecondOrder]:
    """All that a file with a new method holds, beside its imports."""

    @register(
        MethodSpec(
            name="signum",
            method=Method("signum", "Signum", METHODS["lion"].factors),
            lr=0.001,
            lr_range=(-13, -4),
            options=(
                *without(EVERY_LAYER, "nesterov"),
                Option("deadband", read.number(), "averages below this move nothing"),
            ),
            arguments=averaging,
        )
    )
    class Signum(SecondOrder):
        """W <- W - lr sign(M) where M, the average of gradients, is at least ``deadband``."""

        def __init__(
            self,
            model,
            parametrization=None,
            lr=0.001,
            *,
            beta=0.9,
            deadband=0.0,
            trust=None,
            fallback="sgd",
            exclude=(),
            **options,
        ):
            self.deadband = deadband
            shared = StepOptions(trust=trust, fallback=fallback, exclude=exclude)
            super().__init__(model, parametrization, lr, momentum=GradientMomentum(beta), options=shared, **options)

        def measure(self, layer, statistics, step):
            return {}  # no factors

        def precondition(self, layer, block, G, step):
            M = dense(G)
            return M.sign() * (M.abs() >= self.deadband)

    return Signum


@pytest.fixture(autouse=True)
def Signum():
    yield define()
    if "signum" in SPECS:
        unregister("signum")


def test_a_method_takes_one_short_file():
    assert len(inspect.getsource(define).splitlines()) + len(inspect.getsource(averaging).splitlines()) < 80


def test_the_class_knows_its_record(Signum):
    assert spec_of("signum") is spec_of("Signum ") is Signum.spec is SPECS["signum"]
    assert (Signum.spec.optimizer, Signum.spec.title, Signum.method) == (Signum, "Signum", get_method("signum"))
    assert Signum.spec.layerwise


def test_theory_knows_its_exponents():
    assert solve("signum") == solve("lion")
    assert solve("signum")[Role.HIDDEN].c.total == Fraction(1)


def test_steps_are_signs_scaled_with_the_width(Signum):
    model = MLP(256)
    plan = mukron.parametrize(model, mukron.base_shapes(MLP, width=64))
    optimizer = Signum(model, plan, lr=0.01, beta=0.5)
    before = {name: value.clone() for name, value in model.named_parameters()}
    scales = plan.scales("signum")
    x, y = torch.randn(8, 784), torch.randint(10, (8,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(before[name] - value, 0.01 * scales[name].lr * value.grad.sign(), rtol=0, atol=1e-6)
    assert scales["fc2.weight"].lr == 1 / 4


def test_the_gradient_is_averaged_before_its_sign_is_taken(Signum):
    model = nn.Linear(1, 1, bias=False)
    optimizer = Signum(model, lr=1.0, beta=0.5)
    start = model.weight.item()
    for gradient, expected in ((4.0, 1.0), (-1.0, 2.0), (-8.0, 1.0)):  # averages 2, 0.5, -3.75
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        assert start - model.weight.item() == pytest.approx(expected)


def test_a_method_without_damping_refuses_it(Signum):
    assert Signum(nn.Linear(2, 2)).param_groups[0]["damping"] is None
    with pytest.raises(ValueError, match=r"Signum has no damping, got damping=1\.0"):
        Signum(nn.Linear(2, 2), damping=1.0)
    with pytest.raises(TypeError, match=r"Signum has no argument 'dampin'; did you mean 'damping'\?"):
        Signum(nn.Linear(2, 2), dampin=1.0)


def test_it_is_saved_and_continued(Signum):
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Signum(model, lr=0.1) for model in models]

    def step(place):
        optimizers[place].zero_grad()
        F.cross_entropy(models[place](x), y).backward()
        optimizers[place].step()

    step(0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for place in (0, 1):
        step(place)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_run_trains_by_its_name(Signum, tmp_path):
    config = RunConfig(method="signum", lr=0.003, method_options={"deadband": 1e-6, "fallback": "adamw"}, **SMALL)
    optimizer = build(config, dataset_of(config)).optimizer
    assert isinstance(optimizer, Signum)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert (optimizer.deadband, optimizer.options.fallback.name) == (1e-6, "adamw")
    run = train(config, tmp_path / "run")
    assert run.status == "finished"
    assert run.final["train_loss"] < 0.8 * run.epochs[0]["train_loss"]
    assert RunConfig.load(tmp_path / "run" / "config.json") == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method_options": {"deadbnd": 1}}, r"signum has no 'deadbnd' \(did you mean 'deadband'\?\)"),
        ({"method_options": {"deadband": -1}}, "deadband=-1: expected a number not below 0"),
        ({"damping": 1.0}, "damping: signum has none"),
    ],
)
def test_a_run_refuses_what_its_record_does_not_have(fields, message):
    with pytest.raises(RunError, match=message):
        RunConfig(method="signum", **fields)


def test_a_plan_writes_its_import(Signum):
    code = script(
        RunConfig(method="signum", width=256, base_width=64, momentum=0.5, method_options={"deadband": 1}),
        {"classes": 10},
    )
    assert f"\nfrom {Signum.__module__} import Signum\n" in code
    assert "\noptimizer = Signum(model, p, lr=0.01, beta=0.5, deadband=1.0)\n" in code


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_line_knows_it(tmp_path):
    (hidden,) = re.findall(r"^hidden +(\S+) +(\S+)", command("explain", "--method", "signum"), re.MULTILINE)
    assert hidden == ("1/2", "1")
    assert "Signum" in command("explain", "--method", "all")
    assert "Signum, mup" in command("explain", "--method", "signum", "--model", "mlp")
    assert re.search(r"--method .*\bsignum\b", command("train", "--help"))
    small = [f"--{name.replace('_', '-')}={SMALL[name]}" for name in ("width", "samples", "epochs", "batch")]
    assert "finished" in command("train", "--method", "signum", "--lr", "0.003", *small, "--out", str(tmp_path / "run"))


def test_names_are_given_once(Signum):
    class Other(SecondOrder):
        pass

    with pytest.raises(ValueError, match="method 'signum' is registered already, by Signum"):
        register(Signum.spec)(Other)


def test_it_can_be_forgotten():
    unregister("signum")
    for look in (get_method, spec_of):
        with pytest.raises(ValueError, match="unknown method 'signum'; known: 'sgd', 'adam', 'lion', 'kfac'"):
            look("signum")
    with pytest.raises(RunError, match="method='signum': no such optimizer; known: sgd, adamw, kfac"):
        RunConfig(method="signum")


def test_the_docs_show_this_method():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = inspect.getsource(define)
    start, end = source.index("    @register"), source.index("\n    return Signum")
    for shown in (inspect.getsource(averaging), inspect.cleandoc(source[start:end].rstrip())):
        assert shown in page
