"""A loss of the user's own: the targets it gets, where its classes are, and what is recorded beside it."""

import pytest
import torch

from mukron.train import RunConfig, RunError, build, dataset_of, loss_of, train


def task(**fields):
    """A run on tokens with a class for every position."""
    return RunConfig(
        **{"model": "users_task:Tokens", "base_width": 16, "width": 16, "data": "users_task:tokens", **fields},
        **{"epochs": 3, "lr": 0.02},
    )


def losses(config):
    return [row["train_loss"] for row in train(config).epochs]


# One real number a sample.


def test_it_gets_targets_as_the_user_returned_them():
    numbers = {"model": "users_task:Numbers", "data": "users_task:sums", "method": "adamw"}
    squeezed = task(**numbers, loss="users_task:squares", model_options={"squeeze": True})
    assert dataset_of(squeezed).train.targets.shape == (64,)
    assert losses(squeezed) == pytest.approx([2 * loss for loss in losses(task(**numbers, loss="mse"))], rel=0.05)


def test_outputs_and_targets_that_differ_by_a_dimension_are_warned_of():
    config = task(model="users_task:Numbers", data="users_task:sums", method="adamw", loss="users_task:squares")
    with pytest.warns(UserWarning, match=r"outputs are \[64, 1\] and targets \[64\]; their difference would be"):
        train(config)


def test_mse_refuses_outputs_of_another_shape():
    config = task(model="users_task:Numbers", data="users_task:sums", loss="mse")
    loss = loss_of(config, dataset_of(config))
    targets = torch.randn(6)
    output = torch.randn(6, 1)
    assert loss(output, targets).item() == pytest.approx((output[:, 0] - targets).square().mean().item() / 2)
    with pytest.raises(RunError, match=r"output has shape \[1, 1\], but the targets of users_task:sums want \[6, 1\]"):
        loss(torch.randn(1, 1), targets)
    with pytest.raises(RunError, match=r"output has shape \[64\]; users_task:sums wants \[samples, 1\]"):
        train(config.replace(model_options={"squeeze": True}))


# Where the classes are.


@pytest.mark.parametrize("method", ["kfac", "adamw"])
def test_classes_in_dimension_one_are_found(method):
    last = task(method=method, loss="users_task:entropy_of_last")
    first = task(method=method, loss="users_task:entropy", model_options={"classes_at": 1})
    assert losses(first) == pytest.approx(losses(last), rel=1e-4)
    assert train(first).final["test_accuracy"] == train(last).final["test_accuracy"] > 0


def test_shapes_that_do_not_show_the_classes():
    """As many positions as classes."""
    config = task(loss="users_task:entropy", data_options={"positions": 20}, model_options={"classes_at": 1})
    with pytest.raises(ValueError, match=r"say where the classes are, class_dim=1"):
        train(config.replace(method="kfac"))
    unknown, known = train(config.replace(method="adamw")), train(config.replace(method="adamw", class_dim=1))
    assert [row["train_loss"] for row in unknown.epochs] == [row["train_loss"] for row in known.epochs]
    assert "train_accuracy" not in unknown.final
    assert known.final["train_accuracy"] > 0


@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo", "adamw", "sgd"])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_the_dimension_of_the_classes_with_every_method(method, loss):
    exact = {"method_options": {"fisher": "exact"}} if method == "kfac" else {}  # draws nothing
    last = task(method=method, loss=loss, **exact)
    first = last.replace(model_options={"classes_at": 1})
    with pytest.raises(RunError, match=r"if its classes are in dimension 1, say --set class_dim=1"):
        train(first)
    assert losses(first.replace(class_dim=1)) == pytest.approx(losses(last), rel=1e-4)


def test_the_option_of_kfac_still_says_it():
    config = task(method="kfac", method_options={"class_dim": 1}, model_options={"classes_at": 1})
    assert losses(config) == losses(config.replace(method_options={}, class_dim=1))
    assert "class_dim" not in config.to_dict()
    assert config.to_dict()["method_options"] == {"class_dim": 1}
    with pytest.raises(RunError, match="class_dim=-1, but method_options: class_dim=1; say it once"):
        config.replace(class_dim=-1)
    with pytest.raises(RunError, match="'class_dim' is said by the field class_dim"):
        config.replace(method="adamw")


def test_a_dimension_that_the_output_does_not_have():
    with pytest.raises(RunError, match=r"class_dim=3: does not fit the network's output of shape \[64, 8, 20\]"):
        train(task(method="adamw", class_dim=3))


# What is recorded.


@pytest.mark.parametrize("squeeze", [False, True])
def test_one_output_for_two_classes_has_no_accuracy(squeeze):
    run = train(
        task(
            **{"model": "users_task:Numbers", "data": "users_task:signs", "loss": "users_task:of_two"},
            **{"method": "adamw", "model_options": {"squeeze": squeeze}},
        )
    )
    assert run.status == "finished"
    assert "train_accuracy" not in run.final


def test_half_precision_outputs_arrive_in_float32():
    run = train(task(loss="users_task:entropy_of_last", method="adamw", dtype="bfloat16"))  # asserts the dtype
    assert run.status == "finished"


def test_classes_are_found_without_a_trace():
    config = task(loss="users_task:entropy", model_options={"classes_at": 1})
    data = dataset_of(config)
    found, told = build(config, data), build(config.replace(class_dim=1), data)
    assert all(map(torch.equal, found.model.parameters(), told.model.parameters()))
    assert found.optimizer._capture.options.class_dim == told.optimizer._capture.options.class_dim == 1
