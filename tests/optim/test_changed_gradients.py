"""Gradients that are changed before the step where it cannot follow: noticed, and nothing else is taken for it."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from mukron import FOOF, KFAC, Muon, Shampoo, base_shapes, parametrize
from mukron.models import MLP

INPUTS, WIDE, ROWS = 20, 64, 8
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(ROWS, INPUTS, generator=DATA).double(), torch.randint(4, (ROWS,), generator=DATA)
FUSED = {"KFAC": KFAC, "FOOF": FOOF, "Shampoo": Shampoo}


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(INPUTS, WIDE, bias),
        nn.ReLU(),
        nn.Linear(WIDE, WIDE, bias),
        nn.ReLU(),
        nn.Linear(WIDE, 4, bias),
    ]
    return nn.Sequential(*layers).double()


def loss(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X), Y)


def scaled(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else 0.5 * p.grad


CHANGES = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_, foreach": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "clip_grad_norm_ that does nothing": lambda model: clip_grad_norm_(model.parameters(), 1e9),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1e-3),
    "a factor": scaled,
    "others in their place": replaced,
}


@pytest.mark.filterwarnings("ignore:.*unscaled")
@pytest.mark.parametrize("method", FUSED)
def test_a_grad_scaler_is_noticed_in_the_first_step(method):
    model, scaler = mlp().float(), torch.amp.GradScaler("cpu")
    optimizer = FUSED[method](model, lr=0.01, fused=True)
    scaler.scale(F.cross_entropy(model(X.float()), Y)).backward()
    with pytest.raises(RuntimeError, match="all gradients were changed"):
        scaler.step(optimizer)
    assert optimizer.steps == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("method", FUSED)
def test_a_change_that_passes_weights_by_is_refused(method, steps, change):
    """In any step; the weights stay as they are, and training goes on without the change."""
    model = mlp()
    optimizer = FUSED[method](model, lr=0.01, fused=True)

    def step(changed: bool) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        if changed:
            CHANGES[change](model)
        optimizer.step()

    for _ in range(steps):
        step(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"all gradients were changed .*\(fused=True\) does not form .* of \"0\""):
        step(True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(False)
    assert optimizer.steps == steps + 1


def test_without_biases_the_first_step_tells():
    """It forms gradients of weights, once, to see where they come from."""
    model = mlp(bias=False)
    optimizer = KFAC(model, fused=True)
    loss(model).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="all gradients were changed"):
        optimizer.step()


def test_clipping_by_a_plan_and_in_a_closure():
    torch.manual_seed(0)
    model = MLP(WIDE, INPUTS, 4).double()
    plan = parametrize(model, base_shapes(lambda width: MLP(width, INPUTS, 4), width=16))
    optimizer = KFAC(model, plan, fused=True)

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        plan.clip_grad_norm_(1.0)
        return value

    with pytest.raises(RuntimeError, match="all gradients were changed"):
        optimizer.step(closure)


def test_a_change_of_some_gradients_warns_once():
    model = mlp()
    optimizer = KFAC(model, lr=0.01, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        loss(model).backward()
        model[4].bias.grad.mul_(0.5)
        if step == 1:
            with pytest.warns(UserWarning, match="1 of 3 gradients were changed"):
                optimizer.step()
        elif step == 0:  # this one forms all gradients
            with pytest.warns(UserWarning, match="1 of 6 gradients were changed"):
                optimizer.step()
            optimizer._changes.told = False
        else:
            optimizer.step()


def micro_batches(model, optimizer):
    for part in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(model(X[part]), Y[part]) / 2).backward()


def a_penalty_of_its_own(model, optimizer):
    loss(model).backward()
    sum(p.square().sum() for p in model.parameters()).mul(1e-3).backward()


def a_penalty_first(model, optimizer):
    sum(p.square().sum() for p in model.parameters()).mul(1e-3).backward()
    loss(model).backward()


def a_pass_that_is_not_measured(model, optimizer):
    loss(model).backward()
    with optimizer.paused():
        loss(model).backward()


def a_pass_in_evaluation_mode(model, optimizer):
    loss(model).backward()
    loss(model.eval()).backward()
    model.train()


def twice(model, optimizer):
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()


def zeros(model, optimizer):
    """After a pass that was thrown away."""
    loss(model).backward()
    model.zero_grad(set_to_none=False)
    loss(model).backward()


def zeros_of_the_optimizer(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    loss(model).backward()


def frozen(model, optimizer):
    loss(model).backward()
    model[0].bias.grad = None
    model[2].bias.grad.zero_()


def unfrozen(model, optimizer):
    model[0].requires_grad_(False)
    loss(model).backward()
    model[0].requires_grad_(True)
    model.zero_grad()
    loss(model).backward()


def a_backward_pass_that_failed(model, optimizer):
    value = loss(model)

    def fail(_):
        raise ArithmeticError

    handle = model[0].bias.register_hook(fail)
    with pytest.raises(ArithmeticError):
        value.backward()
    handle.remove()
    optimizer.zero_grad()
    loss(model).backward()


def hooks_on_gradients(model, optimizer):
    handle = model[0].bias.register_hook(lambda gradient: 0.5 * gradient)
    loss(model).backward()
    handle.remove()


def an_own_graph(model, optimizer):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        loss(model).backward(create_graph=True)


LEGITIMATE = [
    *(micro_batches, a_penalty_of_its_own, a_penalty_first, a_pass_that_is_not_measured, a_pass_in_evaluation_mode),
    *(twice, zeros, zeros_of_the_optimizer, frozen, unfrozen, a_backward_pass_that_failed, hooks_on_gradients),
]


@pytest.mark.filterwarnings("ignore:the gradient of layer")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", LEGITIMATE)
@pytest.mark.parametrize("method", FUSED)
def test_what_is_no_such_change(method, how):
    model = mlp()
    optimizer = FUSED[method](model, lr=0.01, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        how(model, optimizer)
        optimizer.step()
    assert not optimizer._changes.told
    assert optimizer.skipped == 0


def test_where_all_gradients_are_formed_they_may_be_clipped():
    """A layer with more rows than numbers is not fused; nor is anything without the option."""
    model, steps = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 2
    for options in ({"fused": True}, {}):
        optimizer = KFAC(model, lr=0.01, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(512, 3)), torch.randint(2, (512,))).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert optimizer.steps == steps


def test_gradients_that_are_kept_for_another_step():
    model = mlp()
    optimizer = KFAC(model, lr=0.01, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    clip_grad_norm_(model.parameters(), 0.1)  # of gradients that were used already
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def test_hooks_end_with_the_optimizer_and_are_not_copied():
    model = mlp()
    optimizer = KFAC(model, fused=True)
    changes = weakref.ref(optimizer._changes)
    loss(model).backward()
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        loss(copied.model).backward()
        clip_grad_norm_(copied.model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="all gradients were changed"):
            copied.step()
    assert not copy.deepcopy(model)[0].bias._post_accumulate_grad_hooks
    assert len(model[0].bias._post_accumulate_grad_hooks) == 1
    optimizer.close()
    gc.collect()
    assert changes() is None
    assert not model[0].bias._post_accumulate_grad_hooks


# Several processes.


def averaged_gradients(rank, folder) -> None:
    """Two ranks: a warning once, wherever a rank clips; no error of one alone."""
    group = {"process_group": torch.distributed.group.WORLD}
    for make in (
        lambda model: KFAC(model, lr=0.01, **group),
        lambda model: Muon(model, **group),
        lambda model: KFAC(model, lr=0.01, fused=True, **group),
    ):
        for who in (0, 1, 2):  # the last: both
            model = mlp()
            optimizer, told = make(model), []
            for _ in range(3):
                optimizer.zero_grad()
                for part in (slice(0, 4), slice(4, 8)):
                    (F.cross_entropy(model(X[part] + rank), Y[part]) / 2).backward()
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    if who in (rank, 2):
                        clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                told += [str(one.message) for one in seen if "gradients were changed" in str(one.message)]
            assert len(told) == (who in (rank, 2)), told
            assert optimizer.steps == 3
        model = mlp()
        optimizer = make(model)
        for how in LEGITIMATE:
            optimizer.zero_grad()
            if how in (micro_batches, twice, a_penalty_of_its_own, zeros, hooks_on_gradients):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "the gradient of layer")
                    warnings.filterwarnings("error", ".*gradients were changed")
                    how(model, optimizer)
                    optimizer.step()


def wrapped_in_one_process(rank, folder) -> None:
    """DistributedDataParallel writes averages to gradients as a backward pass ends."""
    for view in (False, True):
        model = mlp()
        called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view, find_unused_parameters=True)
        optimizer = KFAC(called, lr=0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(called(X), Y).backward()
            optimizer.step()
        assert optimizer.steps == 3
        assert not optimizer._changes.told


def test_averaged_gradients(tmp_path):
    in_ranks("test_changed_gradients:averaged_gradients", 2, tmp_path)


def test_wrapped_in_one_process(tmp_path):
    in_ranks("test_changed_gradients:wrapped_in_one_process", 1, tmp_path)
