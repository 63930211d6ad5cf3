"""Optimizers of others that take a plan's multipliers at the step, under every scheduler of torch."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, NAdam, lr_scheduler

from mukron.params import ParametrizationError, base_shapes, parametrize
from networks import INPUTS, Net
from schedules import LR, TORCH, keeping, moved, plan_of, rates, spread_of_steps, table, take

NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA).double(), torch.randint(5, (10,), generator=DATA)
PAGE = Path(__file__).parents[2] / "docs/parametrization.md"
MUON = getattr(torch.optim, "Muon", None)

KINDS = {  # class, method for the groups, options of groups, options of the class
    "SGD": (SGD, "sgd", {}, {}),
    "SGD, momentum": (SGD, "sgd", {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}),
    "SGD, foreach": (SGD, "sgd", {"weight_decay": 0.1}, {"momentum": 0.9, "foreach": True}),
    "SGD, fused": (SGD, "sgd", {"weight_decay": 0.1}, {"momentum": 0.9, "fused": True}),
    "Adam": (Adam, "adam", {"eps": 1e-3}, {"amsgrad": True}),
    "AdamW": (AdamW, "adamw", {"weight_decay": 0.1, "eps": 1e-4}, {"betas": (0.8, 0.9)}),
    "AdamW, foreach": (AdamW, "adamw", {"weight_decay": 0.1}, {"foreach": True}),
    "AdamW, fused": (AdamW, "adamw", {"weight_decay": 0.1}, {"fused": True}),
    "AdamW, maximize": (AdamW, "adamw", {}, {"maximize": True}),
    "NAdam": (NAdam, "adamw", {"eps": 1e-4}, {}),
    **({} if MUON is None else {"Muon": (MUON, "muon", {"weight_decay": 0.1}, {"momentum": 0.9})}),
}


def train(model, optimizer, steps=4, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        if scheduler is not None:
            take(scheduler)


def same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_plain_groups(name):
    """Bit for bit."""
    kind, method, of_groups, options = KINDS[name]
    (model, plan), (other, plan_of_other) = plan_of(), plan_of()
    optimizer = plan.optimizer(kind, LR, method=None if kind in (SGD, Adam, AdamW, MUON) else method,
                               **of_groups, **options)  # fmt: skip
    plain = kind(plan_of_other.param_groups(method, LR, **of_groups), **options)
    assert isinstance(optimizer, kind)
    assert len(optimizer.param_groups) == len(plain.param_groups)
    train(model, optimizer)
    train(other, plain)
    same(model, other)
    assert not torch.equal(model.hidden.weight, plan_of()[0].hidden.weight)
    assert rates(optimizer) == [LR] * len(plain.param_groups)
    assert optimizer.defaults["lr"] == LR
    for group, scaled in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert group["lr"] * group["lr_multiplier"] == scaled["lr"]
        assert {key: group[key] for key in scaled if key not in ("lr", "params")} == {
            key: scaled[key] for key in scaled if key not in ("lr", "params")
        }


@pytest.mark.skipif(MUON is None, reason="torch has Muon from 2.9 on")
def test_a_muon_scales_as_its_own_option_says():
    """torch reads the option in the groups, where that of the constructor would be lost."""
    (_model, plan), (_other, plain) = plan_of(), plan_of()  # plans do not keep models alive
    for name in ("original", "match_rms_adamw"):
        muon = plan.optimizer(MUON, 0.02, adjust_lr_fn=name)
        assert {group["adjust_lr_fn"] for group in muon.param_groups} == {name}
        rates = [group["lr"] for group in plain.param_groups("muon", 0.02, scaling=name)]
        assert [group["lr"] * group["lr_multiplier"] for group in muon.param_groups] == rates
    with pytest.raises(ValueError, match="Muon with adjust_lr_fn='match_rms_adamw' scales by 'match_rms_adamw'"):
        plan.optimizer(MUON, 0.02, adjust_lr_fn="match_rms_adamw", scaling="original")
    for scaling in ("none", "spectral_norm"):
        with pytest.raises(ValueError, match="Leave scaling out: it is read from adjust_lr_fn"):
            plan.optimizer(MUON, 0.02, scaling=scaling)


class Adjusting(torch.optim.SGD):
    """A Muon by its options alone: pytorch_optimizer's, and dion's below."""

    def __init__(self, params, lr, use_adjusted_lr=False):
        super().__init__(params, lr)


class Norming(torch.optim.SGD):
    def __init__(self, params, lr, adjust_lr="spectral_norm"):
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("kind", "options", "scaling"),
    [
        (Adjusting, {}, "original"),
        (Adjusting, {"use_adjusted_lr": True}, "match_rms_adamw"),
        (Norming, {}, "spectral_norm"),
        (Norming, {"adjust_lr": "rms_norm"}, "rms_norm"),
        (Norming, {"adjust_lr": None}, "none"),
    ],
)
def test_scalings_of_other_muons_are_read_from_their_options(kind, options, scaling):
    (_model, plan), (_other, plain) = plan_of(), plan_of()  # plans do not keep models alive
    muon = plan.optimizer(kind, 0.02, method="muon", **options)
    rates = [group["lr"] for group in plain.param_groups("muon", 0.02, scaling=scaling)]
    assert [group["lr"] * group["lr_multiplier"] for group in muon.param_groups] == rates
    assert plan.optimizer(kind, 0.02, method="muon", scaling=scaling, **options).param_groups
    other = "none" if scaling == "original" else "original"
    with pytest.raises(ValueError, match=f"scales by '{scaling}'"):
        plan.optimizer(kind, 0.02, method="muon", scaling=other, **options)


@pytest.mark.skipif(MUON is None, reason="torch has Muon from 2.9 on")
def test_two_optimizers_share_a_model():
    (model, plan), (other, plain) = plan_of(), plan_of()
    muon = plan.optimizer(MUON, 0.02, scaling="match_rms_adamw", eps=1e-5)
    rest = plan.optimizer(AdamW, 0.01, beside="muon", weight_decay=0.1)
    theirs = (
        MUON(plain.param_groups("muon", 0.02, scaling="match_rms_adamw", eps=1e-5)),
        AdamW(plain.param_groups("adamw", 0.01, beside="muon", weight_decay=0.1)),
    )
    for net, pair in ((model, (muon, rest)), (other, theirs)):
        for _ in range(3):
            net.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            for one in pair:
                one.step()
    same(model, other)


def test_every_scheduler_of_torch_is_here():
    known = {re.split(r"[ (]", name)[0] for name in TORCH}
    assert known == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


@pytest.mark.parametrize("name", TORCH)
def test_ratios_stay_the_plans(name):
    """At every step, measured by what moves."""
    spread, different = spread_of_steps(lambda _, plan: plan.optimizer(SGD, LR, momentum=0.9), TORCH[name])
    assert spread < 1e-6
    assert different > 3


def test_the_docs_say_which_schedulers_keep_plain_groups():
    kept = keeping(TORCH)
    assert set(kept.values()) == {True, False}
    assert table(kept, "torch's schedulers") in PAGE.read_text()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("kind", ["SGD, momentum", "AdamW", "AdamW, fused"])
def test_resumed_training_goes_on_bit_for_bit(kind, name):
    kind, _, of_groups, options = KINDS[kind]

    def made():
        model, plan = plan_of()
        optimizer = plan.optimizer(kind, LR, **of_groups, **options)
        return model, optimizer, TORCH[name](optimizer)

    model, optimizer, scheduler = made()
    train(model, optimizer, 3, scheduler)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    of_scheduler = copy.deepcopy(scheduler.state_dict())
    file.seek(0)
    train(model, optimizer, 3, scheduler)
    again, other, its_scheduler = made()
    states = torch.load(file, weights_only=True)
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])
    its_scheduler.load_state_dict(of_scheduler)
    train(again, other, 3, its_scheduler)
    same(again, model)
    assert rates(other) == rates(optimizer)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("kind", ["SGD, momentum", "AdamW"])
def test_copies(kind, copied):
    kind, _, of_groups, options = KINDS[kind]
    model, plan = plan_of()
    optimizer = plan.optimizer(kind, LR, **of_groups, **options)
    train(model, optimizer, 2)
    other, its = copied((model, optimizer))
    assert type(its) is type(optimizer)
    assert its.param_groups[0]["params"][0] is next(iter(other.parameters()))
    train(model, optimizer, 3)
    train(other, its, 3)
    same(model, other)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler(fused):
    (model, plan), (other, plain) = plan_of(), plan_of()
    optimizer = plan.optimizer(AdamW, LR, weight_decay=0.1, fused=fused)
    theirs = AdamW(plain.param_groups("adamw", LR, weight_decay=0.1), fused=fused)
    for net, one in ((model, optimizer), (other, theirs)):
        net.float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            one.zero_grad()
            scaler.scale(F.cross_entropy(net(X.float()), Y)).backward()
            if step == 1:
                net.head.bias.grad[0] = math.inf
            if step == 2:
                scaler.unscale_(one)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(one)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
    same(model, other)
    assert rates(optimizer) == [LR] * len(optimizer.param_groups)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_learning_rate_that_is_a_tensor(kind, options):
    """Schedulers fill it in place: each group has one of its own, and all are those at the base width."""
    (model, plan), (other, plan_of_other) = plan_of(), plan_of()
    options = {"foreach": False, **options} if not options.get("fused") else options
    given = torch.tensor(LR, dtype=torch.float64)
    optimizer, plain = plan.optimizer(kind, given, **options), plan_of_other.optimizer(kind, LR, **options)
    schedulers = [lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)]
    first = [group["lr"] for group in optimizer.param_groups]
    train(model, optimizer, 3, schedulers[0])
    train(other, plain, 3, schedulers[1])
    assert [id(group["lr"]) for group in optimizer.param_groups] == [id(lr) for lr in first]
    assert rates(optimizer) == pytest.approx([LR / 8] * len(first))
    assert float(given) == LR
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    with pytest.raises(ParametrizationError, match=r"lr must be one number, got a tensor of shape \[2\]"):
        plan.optimizer(kind, torch.ones(2))


def test_hooks_run_once_and_see_the_base_rate():
    AdamW([torch.zeros(1, requires_grad=True)])  # from now on torch's own class calls hooks, too
    model, plan = plan_of()
    optimizer, seen = plan.optimizer(AdamW, LR), []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(rates(one)))
    optimizer.register_step_post_hook(lambda one, *_: seen.append(rates(one)))
    train(model, optimizer, 1)
    assert seen == [[LR] * len(optimizer.param_groups)] * 2


def test_a_step_that_fails_leaves_the_rates():
    model, plan = plan_of()
    optimizer = plan.optimizer(AdamW, LR)

    def fail():
        raise KeyError("loss")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert rates(optimizer) == [LR] * len(optimizer.param_groups)
    assert optimizer.step(lambda: F.cross_entropy(model(X), Y)).item() > 0


def test_groups_that_are_added():
    model, plan = plan_of()
    optimizer = plan.optimizer(SGD, LR)
    temperature = nn.Parameter(torch.zeros((), dtype=torch.float64))
    twice = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer.add_param_group({"params": [temperature]})
    optimizer.add_param_group({"params": [twice], "lr_multiplier": 2.0})
    lr_scheduler.CyclicLR(optimizer, 3 * LR, 4 * LR, cycle_momentum=False)
    temperature.grad, twice.grad = torch.ones_like(temperature), torch.ones_like(twice)
    moves = moved(model, optimizer)
    assert (temperature.item(), twice.item()) == pytest.approx((-3 * LR, -6 * LR))
    assert moves["norm.bias"] == pytest.approx(4 * 3 * LR)


def test_states_that_would_change_the_rates_are_refused():
    """Nothing is changed: neither those of plain groups nor those of another width fit."""
    _model, plan = plan_of()
    optimizer, (_wide, wider) = plan.optimizer(AdamW, LR), plan_of(64)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"group 0 of the saved state has no lr_multiplier: .* as AdamW\(p.param_groups"
    ):
        optimizer.load_state_dict(AdamW(plan.param_groups("adamw", LR)).state_dict())
    message = r"group 2 of the saved state has the lr_multiplier 0.125, and 0.25 here: it was saved at another width"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wider.optimizer(AdamW, LR).state_dict())
    assert optimizer.state_dict() == before


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((NAdam, 0.1), ValueError, "NAdam: which law it follows is not known. Pass method="),
        ((nn.Linear, 0.1), TypeError, "expected a class of optimizers, such as torch.optim.AdamW, got <class"),
        (("adamw", 0.1), TypeError, "expected a class of optimizers"),
        ((AdamW, "0.1"), TypeError, "lr must be a number, got '0.1'"),
        ((AdamW, -1.0), ValueError, "lr must be finite and must not be negative"),
    ],
)
def test_refused(given, error, message):
    _model, plan = plan_of()
    with pytest.raises(error, match=re.escape(message)):
        plan.optimizer(*given)


def test_refused_options():
    from mukron import KFAC

    _model, plan = plan_of()
    with pytest.raises(ParametrizationError, match=r"KFAC takes the plan itself: mukron.KFAC\(model, p, lr=...\)"):
        plan.optimizer(KFAC, 0.1)
    with pytest.raises(ParametrizationError, match="Adam mixes weight decay"):
        plan.optimizer(Adam, 0.1, weight_decay=0.1)
    with pytest.raises(TypeError, match="beta"):
        plan.optimizer(SGD, 0.1, betas=(0.9, 0.9))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_follows_schedulers(fused):
    """Multipliers are applied by the graph itself, to the learning rates that the schedulers fill."""
    (model, plan), (other, plan_of_other) = plan_of(), plan_of()
    model, other = model.float().cuda(), other.float().cuda()
    optimizer = plan.optimizer(AdamW, torch.tensor(LR, device="cuda"), capturable=True, fused=fused)
    plain = plan_of_other.optimizer(AdamW, LR)
    schedulers = [lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)]
    for net in (model, other):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(4):
        for scheduler in schedulers:
            scheduler.step()
        graph.replay()
        plain.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, start[name])


def sharded_training(rank, folder) -> None:
    """Two ranks: the steps of the model that is whole, and a state that goes through torch's own checkpoints."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def made(spread=True):
        torch.manual_seed(0)
        model = Net(30).double()
        if spread:
            fully_shard(model.hidden)
            fully_shard(model)
        plan = parametrize(model, base_shapes(Net, width=5))
        optimizer = plan.optimizer(AdamW, 0.01, weight_decay=0.1)
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)

    whole, *its = made(spread=False)
    train(whole, its[0], 6, its[1])
    model, optimizer, scheduler = made()
    train(model, optimizer, 3, scheduler)
    state, weights = get_optimizer_state_dict(model, optimizer), copy.deepcopy(model.state_dict())
    again, other, _ = made()
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, other, state)
    scheduler.optimizer = other
    assert rates(other) == rates(optimizer)
    train(again, other, 3, scheduler)
    for p, q in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-7, atol=1e-9)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
def test_sharded_training(tmp_path):
    in_ranks("params.test_planned:sharded_training", 2, tmp_path)
