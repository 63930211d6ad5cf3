"""Parameter groups for other people's optimizers: what they multiply, at two widths, and what they refuse."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from mukron.models import CNN
from mukron.params import ParametrizationError, base_shapes, parametrize
from mukron.params.shape_factor import SCALINGS
from networks import GPT, GPT_ROLES, Net

BASE = 8


def wide(width: int) -> nn.Module:
    """A matrix whose sides differ: original scalings multiply by more than 1 for the first."""
    return nn.Sequential(nn.Linear(12, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))


def plan_of(width: int, factory=Net, **options):
    model = factory(width)
    plan = parametrize(model, base_shapes(factory, width=BASE), **options)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return model, plan, names  # the plan holds its model weakly


def by_name(groups, names):
    return {names[id(parameter)]: group for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize(
    ("method", "lr", "eps"),
    [
        # by role: learning rate, and eps under the name that the optimizer has for it
        ("sgd", {"input": 1, "hidden": 0, "output": -1, "vector": 1, "scalar": 0}, None),
        ("lion", {"input": 0, "hidden": -1, "output": -1, "vector": 0, "scalar": 0}, None),
        (
            "adamw",
            {"input": 0, "hidden": -1, "output": -1, "vector": 0, "scalar": 0},
            ("eps", 1e-8, {"input": -1, "hidden": -1, "output": 0, "vector": -1, "scalar": 0}),
        ),
        ("muon", {"input": 0.5, "hidden": 0}, ("eps", 1e-7, {"input": -0.5, "hidden": 0})),
        ("soap", {"input": 0, "hidden": -0.5}, ("eps", 1e-8, {"input": -1, "hidden": -1})),
        ("shampoo", {"input": 0.5, "hidden": 0}, ("matrix_eps", 1e-6, {"input": -1, "hidden": 0})),
    ],
)
def test_multipliers(method, lr, eps, r):
    """Exponents of the width's growth r, at the base width and at four times it."""
    _model, plan, _ = plan_of(r * BASE)
    scaling = {"scaling": "none"} if method == "muon" else {}
    groups = {group["role"]: group for group in plan.param_groups(method, lr=0.3, weight_decay=0.2, **scaling)}
    expected = {role: 0.3 * r**exponent for role, exponent in lr.items()}
    assert {role: group["lr"] for role, group in groups.items()} == pytest.approx(expected)
    assert [group["lr"] * group["weight_decay"] for group in groups.values()] == pytest.approx([0.06] * len(groups))
    if eps is None:
        assert not any("eps" in key for group in groups.values() for key in group)
        return
    key, usual, exponents = eps
    for given in (usual, 1e-3):
        argument = {} if given == usual else {"eps": given}
        groups = {group["role"]: group for group in plan.param_groups(method, lr=0.3, **argument, **scaling)}
        expected = {role: given * r**exponent for role, exponent in exponents.items()}
        assert {role: group[key] for role, group in groups.items()} == pytest.approx(expected)


SCALED = {  # what a Muon itself multiplies the learning rate of a matrix [out, in] by
    "original": lambda out, fan_in: math.sqrt(max(1, out / fan_in)),
    "match_rms_adamw": lambda out, fan_in: 0.2 * math.sqrt(max(out, fan_in)),
    "rms_norm": lambda out, fan_in: 0.2 * math.sqrt(max(out, fan_in)),
    "spectral_norm": lambda out, fan_in: math.sqrt(out / fan_in),
    "none": lambda out, fan_in: 1.0,
}


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("r", [1, 4])
def test_what_a_muon_scales_itself_is_corrected(scaling, r):
    """Group's learning rate times its own scaling is muP's (r_out / r_in)^1/2 times that scaling at the base width."""
    assert set(SCALED) == set(SCALINGS)
    _model, plan, names = plan_of(r * BASE, wide)
    groups = by_name(plan.param_groups("muon", lr=0.02, scaling=scaling), names)
    at_base = {"0.weight": (BASE, 12), "1.weight": (4 * BASE, BASE), "2.weight": (BASE, 4 * BASE)}
    assert set(groups) == set(at_base)
    for name, (out, fan_in) in at_base.items():
        sides = plan.parameters[name].shape
        law = math.sqrt((sides[0] / out) / (sides[1] / fan_in))
        expected = 0.02 * law * SCALED[scaling](out, fan_in)
        assert groups[name]["lr"] * SCALED[scaling](*sides) == pytest.approx(expected), name
    usual = by_name(plan.param_groups("muon", lr=0.02), names)
    assert (scaling == "original") == all(usual[name]["lr"] == groups[name]["lr"] for name in at_base) or r == 1


@pytest.mark.parametrize("method", ["muon", "soap", "shampoo"])
def test_matrix_methods_share_the_parameters_with_another(method):
    model = GPT(32, tied=False)
    plan = parametrize(model, base_shapes(lambda width: GPT(width, tied=False), width=16, roles=GPT_ROLES))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = by_name(plan.param_groups(method, lr=0.1), names)
    others = by_name(plan.param_groups("adamw", lr=0.1, beside=method), names)
    assert not own.keys() & others.keys()
    assert own.keys() | others.keys() == plan.parameters.keys()
    assert all(len(plan.parameters[name].shape) == 2 for name in own)
    assert {"blocks.0.up.weight", "blocks.1.down.weight"} <= own.keys()
    assert {"token.weight", "position", "head.weight", "norm.weight", "blocks.0.up.bias"} <= others.keys()
    said = {group.get("use_muon") for group in own.values()}, {group.get("use_muon") for group in others.values()}
    assert said == (({True}, {False}) if method == "muon" else ({None}, {None}))


def test_kernels_are_shampoos_alone():
    """torch's Muon takes no kernels, and SOAP's law does not hold for them."""
    for method, taken in (("muon", False), ("soap", False), ("shampoo", True)):
        _model, plan, names = plan_of(2 * BASE, CNN)
        if taken:
            assert "conv2.weight" in by_name(plan.param_groups(method, lr=0.1), names)
        else:
            with pytest.raises(ParametrizationError, match="no parameters for"):  # this network has no other matrices
                plan.param_groups(method, lr=0.1)
        assert ("conv2.weight" in by_name(plan.param_groups("lion", lr=0.1, beside=method), names)) != taken


def test_sp_scales_no_eps():
    _model, plan, _ = plan_of(4 * BASE, scheme="sp")
    assert {group["eps"] for group in plan.param_groups("adamw", lr=0.1)} == {1e-8}


def test_soap_that_leaves_long_sides_as_they_are():
    """Sides of 4 widths are longer than the limit at both widths, all others are not."""
    _model, plan, names = plan_of(4 * BASE, lambda width: nn.Sequential(nn.Linear(12, width), nn.Linear(width, 40 * 8)))
    groups = by_name(plan.param_groups("soap", lr=0.1, max_precondition_dim=32), names)
    assert set(groups) == {"0.weight"}
    _model, plan, names = plan_of(4 * BASE, lambda width: nn.Sequential(nn.Linear(12, width), *three(width)))
    groups = by_name(plan.param_groups("soap", lr=0.1, eps=0.01, max_precondition_dim=32), names)
    expected = {  # learning rate and eps: (r_out / r_in)^1/2 over the growth of noise, and one side alone
        "0.weight": (1, 1 / 4),
        "1.weight": (4**-0.5, 4**0.5 / 4),  # the input side
        "2.weight": (4**0.5 / 4, 4**-0.5),  # the output side
        "3.weight": (4**-0.5, 1 / 4),
    }
    for name, (lr, eps) in expected.items():
        assert (groups[name]["lr"], groups[name]["eps"]) == pytest.approx((0.1 * lr, 0.01 * eps)), name


def three(width: int) -> list[nn.Module]:
    return [nn.Linear(width, 8 * width), nn.Linear(8 * width, width), nn.Linear(width, width), nn.Linear(width, 3)]


def test_embeddings_learning_rates():
    shapes = base_shapes(lambda width: GPT(width, tied=False), width=16, roles=GPT_ROLES)
    model = GPT(64, tied=False)
    plan = parametrize(model, shapes, embedding_lr="-1/2")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for method, usual in (("adamw", 1), ("sgd", 4)):
        groups = by_name(plan.param_groups(method, lr=0.1, weight_decay=0.3), names)
        assert groups["token.weight"]["lr"] == pytest.approx(0.1 * usual / 2)
        assert groups["position"]["lr"] == pytest.approx(0.1 * usual)  # a bare parameter, no nn.Embedding
        assert [group["lr"] * group["weight_decay"] for group in groups.values()] == pytest.approx([0.03] * len(groups))
    assert "r_out^-1/2 was chosen" in str(plan.explain("adamw"))


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("muon", {"scaling": "moonlight"}, "unknown scaling 'moonlight'; known: 'original', 'match_rms_adamw', 'rms_n"),
        ("muon", {"scaling": ["original"]}, "unknown scaling ['original']; known: 'original', "),
        ("adamw", {"scaling": "original"}, "scaling='original' is for \"muon\" alone, not for AdamW"),
        ("muon", {"max_precondition_dim": 9}, 'max_precondition_dim=9 is for "soap" alone, not for Muon'),
        ("adamw", {"beside": "adamw"}, 'beside=\'adamw\': expected one of "muon", "soap", "shampoo"'),
        (
            "soap",
            {"beside": "muon"},
            "beside='muon': groups for SOAP hold matrices inside the network alone. Leave",
        ),
        ("muon", {"beside": "muon"}, 'all other parameters, as in param_groups("adamw", lr=..., beside="muon")'),
        ("sgd", {"eps": 1e-8}, "eps=1e-08: SGD has no eps"),
        ("lion", {"eps": 1e-8}, "eps=1e-08: Lion has no eps"),
        ("adamw", {"eps": -1.0}, "eps must not be negative"),
        ("soap", {"max_precondition_dim": 31}, 'here: "first.weight" [32, 12], "hidden.weight" [32, 32]. Give'),
    ],
)
def test_refused(method, given, message):
    _model, plan, _ = plan_of(32)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.param_groups(method, lr=0.1, **given)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (None, {}, 'method must be a name, such as "kfac", or a Method, got None'),
        (3, {"beside": "muon"}, 'method must be a name, such as "kfac", or a Method, got 3'),
        ("adamw", {"model": 3}, "model must be the network, a torch.nn.Module, got 3"),
        ("adamw", {"model": [0]}, "model must be the network, a torch.nn.Module, got [0]"),
    ],
)
def test_what_is_no_method_and_no_network(method, given, message):
    _model, plan, _ = plan_of(32)
    with pytest.raises(TypeError, match=re.escape(message)):
        plan.param_groups(method, lr=0.1, **given)


def test_numbers_that_are_none_are_refused():
    _model, plan, _ = plan_of(32)
    with pytest.raises(TypeError, match="eps"):
        plan.param_groups("adamw", lr=0.1, eps="small")
    assert plan.param_groups("soap", lr=0.1, max_precondition_dim=32)


@pytest.mark.parametrize(("decay", "k"), [("constant", 0), ("1/width", 1), (0.5, 0.5), ("1/3", 1 / 3), (-1, -1)])
@pytest.mark.parametrize("r", [1, 4])
def test_one_step_of_adamw_decays_by_the_law(decay, k, r):
    """Without gradients a step multiplies a weight by 1 - lr weight_decay r_in^-k."""
    model, plan, _ = plan_of(r * BASE, decay=decay)
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    for values in model.parameters():
        values.grad = torch.zeros_like(values)
    torch.optim.AdamW(plan.param_groups("adamw", lr=0.1, weight_decay=0.2)).step()
    for name, after in model.named_parameters():
        r_in = r if name in ("hidden.weight", "head.weight") else 1
        torch.testing.assert_close(after.detach(), before[name] * (1 - 0.02 * r_in**-k), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decay": "width"}, 'decay must be "constant" or "1/width" or an exponent'),
        ({"decay": float("nan")}, "decay must be"),
        ({"decay": None}, "decay must be"),
        ({"embedding_lr": "half"}, "embedding_lr must be an exponent, as a number"),
    ],
)
def test_laws_that_do_not_exist_are_refused(given, message):
    with pytest.raises(ParametrizationError, match=message):
        parametrize(Net(32), base_shapes(Net, width=BASE), **given)


def test_a_plan_with_another_law_is_another_plan(tmp_path):
    model, plan, _ = plan_of(32, decay="1/width", embedding_lr=0.5)
    plan.save(tmp_path / "plan.json")
    loaded = type(plan).load(tmp_path / "plan.json", model)
    assert loaded == plan
    assert str(loaded.explain("kfac")) == str(plan.explain("kfac"))
    assert "r_in^-1 by request" in str(plan.explain("kfac"))
    with pytest.raises(ParametrizationError, match="the saved plan has decay 1, this one 0"):
        plan_of(32)[1].check(plan.to_dict())
    with pytest.raises(ParametrizationError, match="already parametrized, differently: the saved plan has decay 1"):
        parametrize(model, base_shapes(Net, width=BASE))
    assert parametrize(model, base_shapes(Net, width=BASE), decay=1, embedding_lr="1/2") == plan


def test_explain_shows_eps_where_there_is_one():
    _model, plan, _ = plan_of(32)
    rows = {row[0]: dict(zip(plan.explain("kfac", whole=True).columns, row, strict=True))
            for row in plan.explain("kfac", whole=True).rows}  # fmt: skip
    assert rows["norm.weight"]["eps x"] == "0.25"  # Adam's
    assert rows["hidden.weight"]["eps x"] == "-"
    assert "eps x" not in plan.explain("kfac", fallback="sgd").columns
    assert "eps x" not in plan.explain("lion").columns
    first = next(row for row in plan.explain("soap", whole=True).rows if row[0] == "first.weight")
    assert dict(zip(plan.explain("soap", whole=True).columns, first, strict=True))["eps x"] == "0.5"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_torchs_muon_takes_its_scaling_from_the_groups(scaling):
    """Whatever its constructor is given, so that the two cannot disagree."""
    _, plan = make_plan()
    groups = plan.param_groups("muon", lr=0.02, scaling=scaling)
    for other in (None, "original", "match_rms_adamw"):
        optimizer = torch.optim.Muon(groups, adjust_lr_fn=other)
        assert {group["adjust_lr_fn"] for group in optimizer.param_groups} == {scaling}


def test_a_network_without_matrices_for_a_method_is_refused():
    def make(width):
        return nn.Sequential(
            nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(4 * width, 5)
        )

    model = make(16)
    plan = parametrize(model, base_shapes(make, width=8))
    with pytest.raises(ValueError, match="no parameters for Muon here: it takes matrices of two dimensions"):
        plan.param_groups("muon", lr=0.1)


@pytest.mark.parametrize(("lr", "error"), [("0.1", TypeError), (float("nan"), ValueError)])
def test_a_learning_rate_that_is_no_number_is_refused(lr, error):
    with pytest.raises(error, match="lr must be"):
        make_plan()[1].param_groups("adamw", lr=lr)


def make_plan():
    def make(width):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    model = make(32)
    return model, parametrize(model, base_shapes(make, width=8))


def test_sp_scales_nothing_whatever_laws_are_chosen():
    _model, plan, _ = plan_of(4 * BASE, scheme="sp", decay="1/width", embedding_lr="1/2")
    for scale in plan.scales("adamw").values():
        assert (scale.lr, scale.decay, scale.eps) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("largest", [0, -5, True, 2.5, "big"])
def test_a_largest_side_that_is_none_is_refused(largest):
    with pytest.raises((ParametrizationError, TypeError), match="max_precondition_dim"):
        make_plan()[1].param_groups("soap", lr=0.1, max_precondition_dim=largest)
