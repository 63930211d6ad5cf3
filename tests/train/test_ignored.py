"""Targets that are ignored, and inputs that are token numbers of the user's own."""

import pytest
import torch

from mukron.data import DataError, as_dataset
from mukron.models import GPT
from mukron.train import RunConfig, RunError, build, dataset_of, evaluation, loss_of, train
from users_task import half_without_targets


def task(**fields):
    """A run on tokens with a class for every position."""
    return RunConfig(
        **{"model": "users_task:Tokens", "base_width": 16, "width": 16, "data": "users_task:tokens", **fields},
        **{"epochs": 3, "lr": 0.02},
    )


@pytest.mark.parametrize("method", ["adamw", "sgd", "shampoo", "foof", "kfac"])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_run_is_that_of_the_targets_that_count(loss, method):
    exact = {"method_options": {"fisher": "exact"}} if method == "kfac" else {}  # draws nothing
    config = task(method=method, loss=loss, data_options={"ignored": 0.5}, **exact)
    masked, flat = train(config), train(config.replace(data="users_task:flat"))
    for column in ("train_loss", "test_loss", "test_accuracy"):
        assert masked.final[column] == pytest.approx(flat.final[column], rel=1e-3)


def test_squares_of_ignored_positions_do_not_count():
    config = task(loss="mse", label_smoothing=0.1, data_options={"positions": 3})
    output, targets = torch.randn(1, 3, 20), torch.tensor([[4, -100, 7]])
    wanted = 0.9 * (torch.eye(20)[[4, 7]] - 1 / 20)
    expected = (output[0, [0, 2]] - wanted).square().sum(-1).mean() / 2
    assert loss_of(config, dataset_of(config))(output, targets).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("method", ["adamw", "kfac"])
def test_batches_and_parts_without_targets_are_skipped(method, monkeypatch):
    monkeypatch.setattr(evaluation, "EVALUATED", 16)  # two samples a part
    config = task(method=method, data="users_task:half_without_targets", batch=2)
    run = train(config)
    assert run.status == "finished"
    assert run.final["step"] == 3 * 32
    assert run.final["test_loss"] < run.epochs[0]["test_loss"] < 3


def test_a_step_without_targets_changes_nothing():
    config = task(method="adamw", data="users_task:half_without_targets", batch=1, evaluate_every=100).replace(epochs=1)
    steps = []

    def observe(moment):
        state = moment.built.optimizer.state.values()
        steps.append({int(entry["step"]) for entry in state})
        return {}

    train(config, observe=[observe])
    assert steps == [{32}]  # half of the 64 samples


def test_data_without_any_target_are_refused():
    with pytest.raises(DataError, match="all targets of the 64 samples to train on are -100, which is ignored"):
        train(task(data="users_task:without_targets"))
    (x, y), _ = half_without_targets()
    with pytest.raises(DataError, match="all targets of the 20 samples to test on are -100"):
        as_dataset("mine", ((x, y), (x[:20], y[:20])))


def test_an_evaluation_takes_as_many_samples_as_have_few_targets(monkeypatch):
    config = task(method="adamw")
    data = dataset_of(config)
    built, sizes = build(config, data), []
    outputs = type(built).outputs
    monkeypatch.setattr(type(built), "outputs", lambda self, x: sizes.append(len(x)) or outputs(self, x))
    monkeypatch.setattr(evaluation, "EVALUATED", 40)
    evaluation.evaluate(built, data)
    assert sizes == [5, 5, 5, 1]


# Token numbers of the user's own.


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
def test_token_numbers_of_any_type(dtype):
    config = task(model="gpt", model_options={"depth": 1}, method="adamw", data="users_task:integers")
    config = config.replace(data_options={"dtype": dtype})
    assert dataset_of(config).train.inputs.dtype == torch.int64
    assert train(config).status == "finished"


def test_the_vocabulary_is_that_of_inputs_and_targets():
    config = task(model="gpt", model_options={"depth": 1}, method="adamw", data="users_task:few_classes")
    data = dataset_of(config)
    model = build(config, data).model
    assert isinstance(model, GPT)
    assert (data.classes, model.tokens.num_embeddings) == (20, 50)
    assert train(config).status == "finished"
    own = config.replace(model="users_task:Tokens", model_options={"inputs": 50, "classes": 20})
    assert train(own).status == "finished"  # outputs are the targets' classes alone


def test_a_built_in_network_that_does_not_fit_the_data_is_refused_in_one_line():
    config = RunConfig(model="gpt", width=16, base_width=16, model_options={"depth": 1, "vocabulary": 100})
    with pytest.raises(RunError, match=r"model='gpt' could not take samples \[64, 64\] of coriolanus: index out of"):
        train(config)
