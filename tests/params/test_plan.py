"""What a plan tells: groups, multipliers, explanations, files."""

from __future__ import annotations

import json
import re

import pytest
import torch

from mukron.params import BaseShapes, Parametrization, ParametrizationError, base_shapes, parametrize
from mukron.theory import METHODS
from networks import GPT, GPT_ROLES, INPUTS, Net

MODEL = Net(64)
PLAN = parametrize(MODEL, base_shapes(Net, width=8))


def test_groups_hold_every_parameter_once():
    groups = PLAN.param_groups("adamw", 0.1)
    grouped = [id(values) for group in groups for values in group["params"]]
    assert sorted(grouped) == sorted(id(values) for values in MODEL.parameters())


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("sgd", {"input": 8, "hidden": 1, "output": 1 / 8, "vector": 8, "scalar": 1}),
        ("adamw", {"input": 1, "hidden": 1 / 8, "output": 1 / 8, "vector": 1, "scalar": 1}),
        ("kfac", {"input": 1, "hidden": 1, "output": 1, "vector": 1, "scalar": 1}),
        ("foof", {"input": 8, "hidden": 8, "output": 1, "vector": 8, "scalar": 1}),
        ("shampoo", {"input": 8**0.5, "hidden": 1, "output": 8**-0.5, "vector": 8**0.5, "scalar": 1}),
        ("gauss-newton", {"input": 1, "hidden": 1, "output": 1, "vector": 1, "scalar": 1}),
    ],
)
def test_learning_rates(method, expected):
    scales = {name: scale for name, scale in PLAN.scales(method).items() if not name.startswith("norm")}
    assert {PLAN.parameters[name].role.value: scale.lr for name, scale in scales.items()} == pytest.approx(expected)
    if method in ("sgd", "adamw"):
        groups = PLAN.param_groups(method, lr=0.3)
        assert {group["role"]: group["lr"] / 0.3 for group in groups} == pytest.approx(expected)
    else:
        with pytest.raises(ParametrizationError, match="none of torch's own optimizers"):
            PLAN.param_groups(method, lr=0.3)


def test_damping():
    assert PLAN.scales("kfac")["hidden.weight"].damping == {"A": 8, "B": 1 / 8}
    assert PLAN.scales("kfac")["first.weight"].damping == {"A": 1, "B": 1 / 8}
    assert PLAN.scales("shampoo")["head.weight"].damping == {"L": 8, "R": 8}
    assert PLAN.scales("sgd")["head.weight"].damping == {}


@pytest.mark.parametrize(("method", "optimizer"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_weight_decay_shrinks_every_layer_alike(method, optimizer):
    """With no gradient one step multiplies every weight by 1 - lr * weight_decay, whatever its layer and width."""
    model = Net(64)
    plan = parametrize(model, base_shapes(Net, width=8))
    before = [values.detach().clone() for values in model.parameters()]
    for values in model.parameters():
        values.grad = torch.zeros_like(values)
    optimizer(plan.param_groups(method, lr=0.1, weight_decay=0.2)).step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old * (1 - 0.1 * 0.2), rtol=1e-6)


def test_weight_decay_is_always_said():
    """torch's AdamW decays by 0.01 unless told: the groups tell it."""
    assert {group["weight_decay"] for group in torch.optim.AdamW(PLAN.param_groups("adamw", 0.1)).param_groups} == {0.0}


def test_refused_numbers():
    with pytest.raises(ParametrizationError, match="use param_groups"):
        PLAN.param_groups("adam", 0.1, weight_decay=0.1)
    assert PLAN.param_groups("adam", 0.1)
    assert PLAN.param_groups(METHODS["sgd"], 0.1)[0]["lr"] > 0
    for wrong in ({"lr": float("nan")}, {"lr": -0.1}, {"lr": 0.1, "weight_decay": -1.0}):
        with pytest.raises(ParametrizationError, match="must not be negative"):
            PLAN.param_groups("sgd", **wrong)
    with pytest.raises(ValueError, match="unknown method 'sdg'"):
        PLAN.param_groups("sdg", 0.1)


def test_groups_work_with_schedulers_and_state_dicts():
    optimizer = torch.optim.SGD(PLAN.param_groups("sgd", 0.1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = [group["lr"] for group in optimizer.param_groups]
    MODEL(torch.randn(4, INPUTS)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr / 2 for lr in before])
    fresh = torch.optim.SGD(PLAN.param_groups("sgd", 0.1), momentum=0.9)
    fresh.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_explain_names_every_parameter_and_its_numbers():
    table = PLAN.explain("kfac", whole=True)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == [name for name, _ in MODEL.named_parameters()]
    hidden = rows["hidden.weight"]
    assert (hidden["role"], hidden["shape"], hidden["base shape"]) == ("hidden", "64 x 64", "8 x 8")
    assert (hidden["r_in"], hidden["r_out"], hidden["lr x"]) == ("8", "8", "1")
    assert (hidden["rho_A x"], hidden["rho_B x"]) == ("8", "0.125")
    assert rows["norm.weight"]["initial std"] == "constant"
    assert all(row["why"] for row in rows.values())
    assert "hidden.weight" in str(table)
    assert repr(table) == str(table)  # reads well at a prompt


@pytest.mark.parametrize("method", ["sgd", "adamw", "kfac", "foof", "foof-mirror", "shampoo", "gauss-newton"])
@pytest.mark.parametrize("scheme", ["mup", "sp", "ntk", "uniform:1/4"])
def test_reasons_agree_with_the_multipliers(method, scheme):
    """A row whose learning rate is scaled says so, and one that is not does not."""
    model = Net(32)
    table = parametrize(model, base_shapes(Net, width=8), scheme).explain(method)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        assert ("would move like" in row["why"]) == (row["lr x"] != "1"), row


def test_norm_layers_take_the_fallbacks_row():
    rows = {name: PLAN.explain("kfac", fallback=name, whole=True) for name in ("sgd", "adamw")}
    cells = {
        name: dict(zip(table.columns, next(row for row in table.rows if row[0] == "norm.weight"), strict=True))
        for name, table in rows.items()
    }
    assert (cells["sgd"]["lr x"], cells["adamw"]["lr x"]) == ("8", "1")
    assert cells["sgd"]["rho_B x"] == "-"
    assert "not preconditioned, SGD's row" in cells["sgd"]["why"]
    assert PLAN.scales("kfac")["norm.weight"].damping == {}
    assert PLAN.scales("kfac")["hidden.bias"].lr == 1.0  # a bias is preconditioned


def test_explain_tells_of_tied_names_and_of_an_output_exponent():
    model = GPT(32)
    plan = parametrize(model, base_shapes(GPT, width=16, roles=GPT_ROLES))
    assert "token.weight is also head.weight" in str(plan.explain("kfac"))
    zero = Net(32)
    assert "is zero by request" in str(
        parametrize(zero, base_shapes(Net, width=8), output_exponent="zero").explain("sgd")
    )


def test_files_round_trip(tmp_path):
    shapes = base_shapes(GPT, width=16, roles=GPT_ROLES)
    shapes.save(tmp_path / "shapes.json")
    assert BaseShapes.load(tmp_path / "shapes.json") == shapes
    from_model = base_shapes(Net(8))
    from_model.save(tmp_path / "shapes.json")  # overwrites
    assert BaseShapes.load(tmp_path / "shapes.json") == from_model

    model = GPT(64)
    for number, options in enumerate([{}, {"output_exponent": "zero"}, {"output_exponent": 0.75}]):
        plan = parametrize(GPT(64), shapes, "uniform:1/4", **options)
        plan.save(tmp_path / f"plan{number}.json")
        loaded = Parametrization.load(tmp_path / f"plan{number}.json", model)
        assert loaded == plan
        assert loaded.param_groups("sgd", 0.1)  # bound to the model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan0.json", "plan1.json", "plan2.json", "shapes.json"]


def test_a_loaded_plan_must_fit_the_model(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(
        ParametrizationError, match=r'"first.weight": \[32, 12\] in this network, \[64, 12\] in the plan'
    ):
        Parametrization.load(tmp_path / "plan.json", Net(32))
    other = Net(64)
    parametrize(other, base_shapes(Net, width=16))
    with pytest.raises(ParametrizationError, match="the saved plan has base shape"):
        Parametrization.load(tmp_path / "plan.json", other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a JSON file"),
        ("[]", "expected format 'mukron.parametrization', found 'list'"),
        ('{"format": "mukron.base_shapes"}', "expected format 'mukron.parametrization', found 'mukron.base_shapes'"),
        ('{"format": "mukron.parametrization", "version": 1}', "damaged, KeyError 'parameters'"),
        ('{"format": "mukron.parametrization", "version": 99}', "format version 99, this mukron reads version 2"),
    ],
)
def test_files_of_another_kind(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ParametrizationError, match=re.escape(str(path)) + ".*" + re.escape(message)):
        Parametrization.load(path)


def test_files_say_their_format(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["format"], data["version"]) == ("mukron.parametrization", 2)
    assert data["parameters"]["hidden.weight"]["r_in"] == "8"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    old = (tmp_path / "plan.json").read_text()
    monkeypatch.setattr(Parametrization, "to_dict", lambda self: {"bad": object()})
    with pytest.raises(TypeError):
        PLAN.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == old
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
