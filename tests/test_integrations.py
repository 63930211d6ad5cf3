"""What frameworks are given, without those frameworks; tests/clients trains in them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import mukron
from mukron.integrations import build_optimizer, for_lightning, for_timm, for_trainer, logits_of
from networks import INPUTS, Net

METHODS = [mukron.KFAC, mukron.FOOF, mukron.GaussNewton, mukron.Shampoo, mukron.SOAP, mukron.Muon]


@pytest.fixture
def plan():
    model = Net(32)
    return mukron.parametrize(model, mukron.base_shapes(Net, width=8)), model


@pytest.mark.parametrize("kind", METHODS)
def test_the_trainer_builds_mukrons_optimizers(plan, kind):
    p, model = plan
    factory, options = for_trainer(kind, p, lr=0.1)
    assert not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer))  # or it gets parameters
    optimizer = factory()(model, **options)
    assert type(optimizer) is kind
    assert optimizer.parametrization.parameters == p.parameters
    finds = logits_of if kind.spec.captures else None
    assert optimizer.capture_options.output is finds


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
def test_torchs_optimizers_get_the_groups_of_the_plan(plan, kind):
    p, model = plan
    options = {} if kind is torch.optim.Adam else {"weight_decay": 0.01}
    optimizer = build_optimizer(kind, model, p, 0.1, **options)
    expected = p.param_groups(kind.__name__.lower(), lr=0.1, **options)
    for group, other in zip(optimizer.param_groups, expected, strict=True):
        rest = {key: value for key, value in other.items() if key != "lr"}
        assert {key: group[key] for key in rest} == rest
        assert group["lr"] == 0.1
        assert group["lr"] * group["lr_multiplier"] == pytest.approx(other["lr"])


def test_schedulers_that_set_learning_rates_keep_the_plans_ratios_with_torchs_optimizers(plan):
    p, model = plan
    optimizer = build_optimizer(torch.optim.AdamW, model, p, 0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    expected = [group["lr"] for group in p.param_groups("adamw", lr=0.1)]
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert [0.1 * group["lr_multiplier"] for group in optimizer.param_groups] == pytest.approx(expected)


def test_a_class_whose_law_is_not_known_needs_its_method(plan):
    p, model = plan
    with pytest.raises(mukron.ParametrizationError, match="method="):
        build_optimizer(torch.optim.NAdam, model, p, 0.1)
    assert isinstance(build_optimizer(torch.optim.NAdam, model, p, 0.1, method="adamw"), torch.optim.NAdam)


def test_the_weight_decay_and_eps_of_a_class_are_those_of_its_groups(plan):
    p, model = plan
    usual = build_optimizer(torch.optim.AdamW, model, p, 0.1)
    decays = [group["lr"] * group["lr_multiplier"] * group["weight_decay"] for group in usual.param_groups]
    assert decays == pytest.approx([0.1 * 0.01] * len(decays))
    given = build_optimizer(torch.optim.AdamW, model, p, 0.1, weight_decay=0.5, eps=1e-3)
    expected = p.param_groups("adamw", lr=0.1, weight_decay=0.5, eps=1e-3)
    assert [group["eps"] for group in given.param_groups] == [group["eps"] for group in expected]
    assert [group["weight_decay"] for group in given.param_groups] == [group["weight_decay"] for group in expected]


def test_without_a_plan_a_class_is_as_usual():
    model = Net(8)
    model.first.requires_grad_(False)
    (group,) = build_optimizer(torch.optim.AdamW, model, lr=0.1, weight_decay=0.2).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.2)
    assert len(group["params"]) == len([p for p in model.parameters() if p.requires_grad])


def test_what_cannot_be_built_says_what_to_do(plan):
    p, model = plan
    with pytest.raises(TypeError, match="give lr="):
        build_optimizer(torch.optim.AdamW, model, p)
    with pytest.raises(TypeError, match=r"expected a class of optimizers, as mukron\.KFAC"):
        build_optimizer("kfac", model, p)
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ValueError, match="use mukron's own"):
            build_optimizer(torch.optim.Muon, model, p, 0.1)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_timm_gets_groups_of_the_model_that_it_trains(plan, lr):
    """With what timm's schedulers read, whether or not there is one."""
    p, model = plan
    groups = for_timm(p, "adamw", lr=lr, weight_decay=0.2)(model)
    assert {id(q) for group in groups for q in group["params"]} == {id(q) for q in model.parameters()}
    of_timm = [(group.pop("initial_lr"), group.pop("lr_scale")) for group in groups]
    assert groups == p.param_groups("adamw", lr=lr, weight_decay=0.2)
    assert len({scale for _, scale in of_timm}) > 1
    for (base, scale), group in zip(of_timm, groups, strict=True):
        assert base == lr
        assert base * scale == pytest.approx(group["lr"])


@pytest.mark.parametrize("kind", [mukron.KFAC, mukron.FOOF])
def test_the_trainer_is_refused_what_it_cannot_clip(kind):
    with pytest.raises(ValueError, match=r"fused=True of \w+ does not work in the Trainer.* Leave out fused=True"):
        for_trainer(kind, lr=0.1, fused=True)
    for_trainer(kind, lr=0.1, fused=False)
    for_trainer(torch.optim.AdamW, lr=0.1, fused=True)  # torch's own is another matter


def test_lightning_gets_an_optimizer_and_its_schedule(plan):
    p, model = plan

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    built = for_lightning(model, mukron.Muon, p, lr=0.1, schedule=schedule, interval="epoch")
    assert built["lr_scheduler"]["interval"] == "epoch"
    assert built["lr_scheduler"]["scheduler"].optimizer is built["optimizer"]
    assert set(for_lightning(model, mukron.Muon, p)) == {"optimizer"}
    assert "monitor" not in built["lr_scheduler"]
    built = for_lightning(model, mukron.Muon, p, schedule=schedule, monitor="loss")
    assert (built["lr_scheduler"]["monitor"], built["lr_scheduler"]["interval"]) == ("loss", "step")

    class Module(nn.Module):
        def configure_optimizers(self):
            return for_lightning(self, mukron.KFAC)

    with pytest.raises(TypeError, match=r"self\.network"):
        Module().configure_optimizers()


LOGITS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "returned", [LOGITS, {"loss": torch.ones(()), "logits": LOGITS}, (torch.ones(()), LOGITS, ()), (LOGITS,)]
)
def test_logits_are_found(returned):
    assert logits_of(returned) is LOGITS


@pytest.mark.parametrize("returned", [{"start": LOGITS}, (torch.ones(()),), None, {"logits": None}])
def test_where_there_are_none_it_is_said(returned):
    with pytest.raises(TypeError, match="and no logits; say where its output is"):
        logits_of(returned)


def test_kfac_finds_logits_by_itself_and_where_it_is_told():
    class Returns(Net):
        def forward(self, x):
            return {"logits": super().forward(x), "other": super().forward(2 * x)}

    for options, name in (({}, "logits"), ({"output": lambda returned: returned["other"]}, "other")):
        model = Returns(8)
        optimizer = build_optimizer(mukron.KFAC, model, lr=0.1, **options)
        nn.functional.cross_entropy(model(torch.randn(4, INPUTS))[name], torch.arange(4)).backward()
        optimizer.step()
        assert optimizer.steps == 1


def held(value):
    """What an optimizer's state holds, inside of dictionaries and lists."""
    if isinstance(value, (dict, list, tuple)):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from held(inside)
    else:
        yield value


@pytest.mark.parametrize("options", [{}, {"trust": None}])
@pytest.mark.parametrize("kind", METHODS)
def test_all_that_a_state_holds_can_be_moved(kind, options):
    """Lightning takes the state apart, and moves what has a method ``to``; it refuses other frozen dataclasses."""
    if options and kind in (mukron.SOAP, mukron.Muon):
        pytest.skip("has no plain step")
    model = Net(8)
    optimizer = kind(model, lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, INPUTS)), torch.arange(4)).backward()
        optimizer.step()
    others = [x for state in optimizer.state.values() for x in held(state) if not isinstance(x, (int, float, str))]
    assert {type(x) for x in others if x is not None} > {torch.Tensor} or kind is mukron.Muon
    for one in others:
        if one is None:
            continue
        moved = one.to(torch.device("cpu"))
        assert type(moved) is type(one)
        for name, value in vars(one).items():
            expected = torch.equal(getattr(moved, name), value) if isinstance(value, torch.Tensor) else True
            assert expected, name


def test_importing_mukron_imports_no_integration_and_that_no_framework():
    code = """
import sys, mukron, torch
mukron.KFAC(torch.nn.Linear(3, 3))
assert not any(name.startswith("mukron.integrations") for name in sys.modules)
import mukron.integrations
assert not {"transformers", "accelerate", "lightning", "timm", "peft"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
