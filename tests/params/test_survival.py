"""A plan outlives what happens to models: copies, checkpoints, wrappers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from alone import run_with_a_process_group
from mukron.params import ParametrizationError, base_shapes, parametrize
from networks import INPUTS, Net

SHAPES = base_shapes(Net, width=8)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net(32)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [values.detach().clone() for values in model.parameters()]


def check_serves(plan, model: nn.Module) -> None:
    """The plan gives that model's own tensors their learning rates, and parametrizing it again changes nothing."""
    before = weights(model)
    groups = plan.param_groups("sgd", 0.1, model=model)
    rates = {id(values): group["lr"] for group in groups for values in group["params"]}
    own = {id(values) for values in model.parameters()}
    assert set(rates) == own
    named = {
        name.removeprefix("module.").removeprefix("_orig_mod."): values for name, values in model.named_parameters()
    }
    assert rates[id(named["hidden.weight"])] == pytest.approx(0.1)
    assert rates[id(named["first.weight"])] == pytest.approx(0.4)
    assert rates[id(named["head.weight"])] == pytest.approx(0.025)
    assert parametrize(model, SHAPES) == plan
    assert all(map(torch.equal, before, weights(model)))
    with pytest.raises(ParametrizationError, match="already parametrized"):
        parametrize(model, SHAPES, "sp")


def test_deepcopy_of_the_model(model):
    plan = parametrize(model, SHAPES)
    check_serves(plan, copy.deepcopy(model))


def test_copies_of_the_plan(model):
    plan = parametrize(model, SHAPES)
    assert copy.deepcopy(plan) == plan
    restored = pickle.loads(pickle.dumps(plan))
    assert restored == plan
    check_serves(restored, model)


def test_pickled_model(model):
    plan = parametrize(model, SHAPES)
    check_serves(plan, pickle.loads(pickle.dumps(model)))


def test_state_dict(model):
    plan = parametrize(model, SHAPES)
    state = model.state_dict()
    assert set(state) == set(Net(32).state_dict())  # nothing of ours in it
    resumed = Net(32)
    again = parametrize(resumed, SHAPES)
    resumed.load_state_dict(state)
    assert again == plan
    assert all(map(torch.equal, weights(resumed), weights(model)))
    check_serves(plan, resumed)


def test_compile(model):
    compiled = torch.compile(model, backend="eager")
    plan = parametrize(compiled, SHAPES)
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    check_serves(plan, compiled)
    check_serves(plan, model)
    optimizer = torch.optim.SGD(plan.param_groups("sgd", 0.1))
    before = weights(model)
    compiled(torch.randn(4, INPUTS)).square().sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, weights(model)))


def test_compiled_part(model):
    plan = parametrize(model, SHAPES)
    model.hidden = torch.compile(model.hidden, backend="eager")
    assert plan.bind(model) == plan


def test_averaged_model(model):
    plan = parametrize(model, SHAPES)
    averaged = AveragedModel(model)
    check_serves(plan, averaged)
    averaged.update_parameters(model)
    assert all(map(torch.equal, weights(averaged), weights(model)))


def test_data_parallel(model):
    plan = parametrize(nn.DataParallel(model), SHAPES)
    assert "hidden.weight" in plan.parameters
    check_serves(plan, model)


def test_distributed_data_parallel():
    run_with_a_process_group(
        """
        from networks import Net
        from params.test_survival import SHAPES, check_serves, parametrize

        model = Net(32)
        wrapped = nn.parallel.DistributedDataParallel(model)
        plan = parametrize(wrapped, SHAPES)
        assert set(plan.parameters) == {name.removeprefix("module.") for name, _ in wrapped.named_parameters()}
        check_serves(plan, wrapped)
        check_serves(plan, model)
        """
    )


def test_checkpoint_wrapper(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plan = parametrize(model, SHAPES)
    model.hidden = checkpoint_wrapper(model.hidden)
    assert plan.bind(model) == plan
    assert parametrize(checkpoint_wrapper(model), SHAPES) == plan  # the mark is seen through it


def test_a_users_own_submodule_called_module():
    class Holder(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.module = Net(width)

    plan = parametrize(Holder(16), base_shapes(Holder, width=8))
    assert "module.hidden.weight" in plan.parameters


def test_a_plan_without_its_model(model):
    plan = parametrize(Net(32), SHAPES)  # the model is gone at once
    with pytest.raises(ParametrizationError, match="pass model="):
        plan.param_groups("sgd", 0.1)
    with pytest.raises(
        ParametrizationError, match=r'"first.weight": \[16, 12\] in this network, \[32, 12\] in the plan'
    ):
        plan.param_groups("sgd", 0.1, model=Net(16))
