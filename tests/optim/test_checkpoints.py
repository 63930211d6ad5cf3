"""Checkpoints of ``state_dict`` and of ``torch.distributed.checkpoint``: training goes on bit for bit, in any form."""

from __future__ import annotations

import copy
import io

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from checkpoints import AFTER, BEFORE, OPTIMIZERS, load, save, start, train
from ranks import in_ranks
from states import contents
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import mukron
from mukron.optim.saving import Bundle, opened

NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU
FORMS = {
    "nested": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}
NESTED, FLAT = FORMS["nested"], FORMS["flat"]


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


@pytest.fixture
def resumes(name):
    """Interrupt a run: the function gets its model and optimizer, and fresh ones to carry their state over to."""

    def check(carry):
        model, optimizer = start(name)
        train(model, optimizer, 0, BEFORE)
        other_model, other = start(name, seed=1)
        other_model.load_state_dict(model.state_dict())
        carry((model, optimizer), (other_model, other))
        assert other.steps == BEFORE
        assert Bundle(contents(other)) == Bundle(contents(optimizer))
        train(model, optimizer, BEFORE, AFTER)
        train(other_model, other, BEFORE, AFTER)
        assert all(map(torch.equal, model.parameters(), other_model.parameters()))
        assert Bundle(contents(other)) == Bundle(contents(optimizer))

    return check


def test_a_plain_state_goes_through_a_file(resumes):
    def carry(source, target):
        file = io.BytesIO()
        torch.save(source[1].state_dict(), file)
        file.seek(0)
        target[1].load_state_dict(state_dict=torch.load(file, weights_only=True))

    resumes(carry)


def test_a_plain_state_is_loaded_as_it_is(resumes):
    resumes(lambda source, target: target[1].load_state_dict(state_dict=source[1].state_dict()))


@pytest.mark.parametrize("form", FORMS)
def test_a_distributed_checkpoint(resumes, form, tmp_path):
    def carry(source, target):
        save(*source, tmp_path, FORMS[form])
        load(*target, tmp_path, FORMS[form])

    resumes(carry)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_in_memory_and_through_a_file(resumes, form):
    """What torch gets from one optimizer it sets in another, also after ``torch.save``."""

    def carry(source, target):
        state = get_optimizer_state_dict(*source, options=FORMS[form])
        set_optimizer_state_dict(*target, state, options=FORMS[form])
        file = io.BytesIO()
        torch.save(get_optimizer_state_dict(*source, options=FORMS[form]), file)
        file.seek(0)
        set_optimizer_state_dict(*target, torch.load(file, weights_only=True), options=FORMS[form])

    resumes(carry)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_an_optimizer_goes_back_to_an_earlier_checkpoint(name, form, tmp_path):
    model, optimizer = start(name)
    train(model, optimizer, 0, 1)
    save(model, optimizer, tmp_path, FORMS[form])
    train(model, optimizer, 1, AFTER)
    weights, state = copy.deepcopy(model.state_dict()), Bundle(contents(optimizer))
    load(model, optimizer, tmp_path, FORMS[form])
    assert optimizer.steps == 1
    train(model, optimizer, 1, AFTER)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert Bundle(contents(optimizer)) == state


@pytest.mark.parametrize("options", [NESTED, FLAT])
def test_the_state_is_tensors_and_numbers(name, options):
    """Flattened or not, before the first step and after it, under the same keys."""
    model, optimizer = start(name)
    states = [get_optimizer_state_dict(model, optimizer, options=options)]
    train(model, optimizer, 0, BEFORE)
    states.append(get_optimizer_state_dict(model, optimizer, options=options))
    for state in states:
        of_parameters = state.get("state") or {"all": {key: state[key] for key in state if key.startswith("state.")}}
        values = [value for of_parameter in of_parameters.values() for value in of_parameter.values()]
        assert len(values) == 3 * len(list(model.parameters()))
        assert all(isinstance(value, torch.Tensor | int | float) for value in values)
    assert states[0].keys() == states[1].keys()


def initialize(optimizer) -> None:
    """The step by which torch makes a state where there is none."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step(closure=None)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("how", ["a state is asked for", "a step is taken"])
def test_initialization_changes_nothing(name, how):
    (model, optimizer), (twin, other) = start(name), start(name)
    before = Bundle(contents(optimizer))
    if how == "a step is taken":
        initialize(optimizer)
        initialize(optimizer)
    else:
        get_optimizer_state_dict(model, optimizer)
        get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert optimizer.steps == optimizer.skipped == 0
    assert Bundle(contents(optimizer)) == before
    train(model, optimizer, 0, BEFORE)
    train(twin, other, 0, BEFORE)
    assert optimizer.steps == BEFORE
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert Bundle(contents(optimizer)) == Bundle(contents(other))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_initialization_needs_no_closure(lr):
    model, _ = start("kfac")
    optimizer = mukron.KFAC(model, lr=lr, damping=mukron.Adaptive(1.0))
    initialize(optimizer)
    assert optimizer.steps == 0


@pytest.mark.parametrize("change", ["gradient", "lr", "pass"])
def test_a_first_step_that_could_change_something_counts(change):
    model, optimizer = start("kfac" if change == "pass" else "shampoo")
    if change == "pass":
        model(torch.zeros(3, 6)).sum().mul(0.0).backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(change == "gradient"))
    if change != "lr":
        optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.steps + optimizer.skipped == 1


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(form, tmp_path):
    save(*_trained("shampoo"), tmp_path / "shampoo", FORMS[form])
    save(*_trained("kfac, ema"), tmp_path / "ema", FORMS[form])
    model, optimizer = start("kfac")
    before = Bundle(contents(optimizer))
    with pytest.raises(ValueError, match="this state was saved by Shampoo, not by KFAC"):
        load(model, optimizer, tmp_path / "shampoo", FORMS[form])
    with pytest.raises(ValueError, match="this state was saved with trust=none, and this optimizer has trust=spectral"):
        load(model, optimizer, tmp_path / "ema", FORMS[form])
    assert Bundle(contents(optimizer)) == before


def _trained(name):
    model, optimizer = start(name)
    train(model, optimizer, 0, 2)
    return model, optimizer


def test_another_damping_rule_is_carried_over(tmp_path):
    """Rules have different numbers of numbers, and one may be put into a group at any time."""
    model, optimizer = start("kfac")
    optimizer.param_groups[0]["damping"] = mukron.Fixed(a=0.5, b=0.25)
    train(model, optimizer, 0, 2)
    for form, options in (("nested", NESTED), ("flat", FLAT)):
        other_model, other = start("kfac", seed=1)
        save(model, optimizer, tmp_path / form, options)
        load(other_model, other, tmp_path / form, options)
        assert mukron.damping.Rule.of_group(other.param_groups[0]) == mukron.Fixed(a=0.5, b=0.25)
        twin, twins = copy.deepcopy((model, optimizer))
        train(twin, twins, 2, 3)
        train(other_model, other, 2, 3)
        assert all(map(torch.equal, twin.parameters(), other_model.parameters()))


def test_frozen_parameters_and_several_groups(tmp_path):
    def built(seed=0):
        model, _ = start("kfac", seed=seed)
        model[0].weight.requires_grad_(False)
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.01}]
        return model, mukron.KFAC(model, lr=0.05, params=groups, momentum=0.5)

    for form, options in FORMS.items():
        (model, optimizer), (other_model, other) = built(), built(1)
        train(model, optimizer, 0, BEFORE)
        save(model, optimizer, tmp_path / form, options)
        load(other_model, other, tmp_path / form, options)
        train(model, optimizer, BEFORE, AFTER)
        train(other_model, other, BEFORE, AFTER)
        assert all(map(torch.equal, model.parameters(), other_model.parameters()))


def test_a_saved_buffer_does_not_change_while_it_is_written():
    """torch writes files in the background, while training goes on."""
    model, optimizer = start("gauss-newton")
    train(model, optimizer, 0, 2)
    state = optimizer.state_dict()["state"]
    before = copy.deepcopy(state)
    train(model, optimizer, 2, 1)
    assert all(state[index]["kept"] == before[index]["kept"] for index in state)


def test_a_bundle_of_a_view_holds_no_more_than_the_view():
    file, rows = io.BytesIO(), torch.zeros(1000, 1000)
    torch.save(Bundle({"row": rows[3]}), file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    assert Bundle(opened(torch.load(file, weights_only=True))) == Bundle({"row": rows[3]})


def test_bundles_differ_if_a_bit_does():
    first = Bundle({"a": [torch.tensor([1.0, 2.0]), 3], "b": "text"})
    assert first == copy.deepcopy(first)
    assert isinstance(copy.deepcopy(first), Bundle)
    assert first != Bundle({"a": [torch.tensor([1.0, 2.0000002]), 3], "b": "text"})
    assert first != Bundle({"a": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3], "b": "text"})
    assert first != Bundle({"a": [torch.tensor([1.0, 2.0]), 3]})
    assert first != 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "sharded_on"),
    [
        pytest.param(4, (4, 2, 1), (3,), marks=pytest.mark.matrix),
        (2, (2, 1), (2,)),
        pytest.param(1, (3,), (2,), marks=pytest.mark.matrix),
    ],
)
def test_checkpoints_of_some_ranks_go_on_with_others(saved_on, loaded_on, sharded_on, tmp_path):
    """What is loaded is what was saved, bit for bit; on the same number of ranks so is what follows."""
    (tmp_path / "exact").write_text(f"read, {saved_on}")
    readers = [("read", size) for size in loaded_on]
    readers += [("read_on_spread", size) for size in sharded_on if NEW_ENOUGH]
    for function, ranks in (("write", saved_on), *readers):
        folder = tmp_path / f"{function}, {ranks}"
        folder.mkdir()
        in_ranks(f"checkpoints:{function}", ranks, folder)


@pytest.mark.slow
def test_one_rank_sends_its_state_to_the_others(tmp_path):
    in_ranks("checkpoints:broadcast", 2, tmp_path)


@pytest.mark.slow
def test_checkpoints_of_sharded_models_go_on_with_others(tmp_path):
    """On fewer ranks, replicated, and in one process."""
    for function, ranks in (("write_spread", 3), ("read_spread", 2), ("read_spread", 1)):
        folder = tmp_path / f"{function}, {ranks}"
        folder.mkdir()
        in_ranks(f"checkpoints:{function}", ranks, folder)
