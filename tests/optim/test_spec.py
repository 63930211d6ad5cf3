"""The records of the methods: each is whole, agrees with its optimizer, and is what the docs say."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mukron import FOOF, KFAC, SOAP, FOOFMirror, GaussNewton, Kronecker, Muon, Shampoo
from mukron import readers as read
from mukron.damping import Constant, MaxEigenvalue, Rescaled
from mukron.memory import EMA, Auto, Batch, Window
from mukron.optim import SPECS, SecondOrder, spec_of
from mukron.optim.listing import MARKER, listing
from mukron.optim.run_options import Option
from mukron.optim.sizes import LayerSize
from mukron.optim.spec import method_names, register, unregister
from mukron.theory import METHODS, get_method
from mukron.train import RunConfig

CLASSES = {
    "kfac": KFAC,
    "foof": FOOF,
    "foof-mirror": FOOFMirror,
    "kronecker": Kronecker,
    "shampoo": Shampoo,
    "soap": SOAP,
    "muon": Muon,
    "gauss-newton": GaussNewton,
}
TORCHS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def test_every_method_has_its_optimizer():
    assert {name: spec.optimizer for name, spec in SPECS.items()} == {**CLASSES, **TORCHS}
    assert all(cls.spec is SPECS[name] for name, cls in CLASSES.items())
    assert [name for name, spec in SPECS.items() if not spec.layerwise] == list(TORCHS)
    assert not hasattr(torch.optim.SGD, "spec")


def test_exponents_and_rule_of_a_class_are_its_records():
    for name, cls in CLASSES.items():
        assert cls.method is METHODS[name]
        assert cls.rule is (Constant if name in ("muon", "soap") else type(SPECS[name].damping))
    assert (KFAC.rule, Shampoo.rule) == (Rescaled, MaxEigenvalue)


@pytest.mark.parametrize("name", SPECS)
def test_a_record_is_whole(name):
    spec = SPECS[name]
    low, high = spec.lr_range
    assert 2.0**low < spec.lr < 2.0**high
    assert spec.damping is None or spec.method.damped
    for option in spec.options:
        assert option.help
        assert len(option.help.splitlines()) == 1
        assert option.name in spec.defaults or (name, option.name) == ("adamw", "beta2")
    assert all(option.stacks for option in spec.options) or not spec.stacks


@pytest.mark.parametrize("name", CLASSES)
def test_the_default_of_an_option_is_a_value_it_reads(name):
    spec = SPECS[name]
    for option in spec.options:
        default = spec.defaults[option.name]
        if option.name in ("memory", "trust"):  # of which text is read
            default = getattr(default, "text", "none" if option.name == "trust" else "batch")
        assert option.read(default) == default


def test_names_aliases_and_variants_lead_to_one_record():
    assert spec_of("shampoo:1/4") is spec_of(" Shampoo") is SPECS["shampoo"]
    assert spec_of("soap:input") is SPECS["soap"]
    assert spec_of("adam") is spec_of("AdamW") is SPECS["adamw"]
    assert spec_of("gn") is SPECS["gauss-newton"]
    assert spec_of("kronecker:1,1/2") is SPECS["kronecker"]
    known = ["sgd", "adamw", "kfac", "foof", "gauss-newton", "kronecker", "kronecker:E_A,E_B", "foof-mirror", "muon"]
    assert method_names() == [*known, "shampoo", "shampoo:E[,SIDES]", "soap", "soap:SIDES"]


def test_methods_of_theory_alone_have_no_record():
    with pytest.raises(ValueError, match="no optimizer of this library; known: sgd, adamw, kfac, foof"):
        spec_of("lion")


def test_every_other_row_of_theory_can_be_trained():
    assert {spec_of(name).method.name for name in METHODS if name != "lion"} == {*METHODS} - {"lion"}


def test_an_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown method 'kfca'; known: 'sgd', .*'shampoo:E\[,SIDES\]'"):
        spec_of("kfca")


def test_arguments_follow_from_a_run():
    run = RunConfig(loss="mse", seed=3, momentum=0.5, method_options={"memory": "ema:0.9", "fisher": "exact"})
    wanted = {
        "momentum": 0.5,
        "memory": EMA(0.9),
        "fisher": "exact",
        "likelihood": "gaussian",
        "seed": 3,
    }
    assert run.spec.keywords(run) == wanted
    run = RunConfig(method="adamw", momentum=0.8, method_options={"beta2": 0.99})
    assert run.spec.keywords(run) == {"betas": (0.8, 0.99)}
    run = RunConfig(method="shampoo:1/4")
    assert run.spec.keywords(run) == {"momentum": 0.9, "e": Fraction(1, 4)}
    run = RunConfig(method="kronecker:1,1/2", method_options={"trust": "none"})
    assert run.spec.keywords(run) == {
        **{"momentum": 0.9, "likelihood": "categorical", "seed": 0, "trust": None},
        **{"e_A": Fraction(1), "e_B": Fraction(1, 2)},
    }
    run = RunConfig(method="shampoo:1/2,input")
    assert run.spec.keywords(run) == {"momentum": 0.9, "e": Fraction(1, 2), "sides": "input"}
    run = RunConfig(method="foof", momentum=0.5, method_options={"trust": "none"})
    assert run.spec.keywords(run) == {"momentum": 0.5, "trust": None}
    assert "seed" not in RunConfig(method="foof").spec.keywords(RunConfig(method="foof", seed=3))


def test_an_option_whose_type_is_the_choice_is_written_as_text():
    @dataclass(frozen=True)
    class MonteCarlo:
        draws: int = 1

    @dataclass(frozen=True)
    class Exact:
        pass

    option = Option.typed("fisher", read.named("Fisher", {"mc": MonteCarlo, "exact": Exact}), "targets of the signals")
    for written, value in {"mc": MonteCarlo(), "mc:4": MonteCarlo(4), "exact": Exact()}.items():
        assert option.read(written) == written
        assert option.parse(written) == value
    for wrong, message in {"mcc": "known: mc, exact", "mc:x": "expected mc or mc:NUMBER", "exact:1": "exact"}.items():
        with pytest.raises(ValueError, match=f"Fisher '{wrong}'.*{message}|unknown Fisher '{wrong}'; {message}"):
            option.read(wrong)
    with pytest.raises(ValueError, match="expected a name"):
        option.read(4)


LAYER = LayerSize(d_in=300, d_out=200, samples=16, classes=10)


@pytest.mark.parametrize(
    ("method", "options", "layer", "numbers"),
    [
        ("sgd", {}, LAYER, 0),
        ("adamw", {}, LAYER, 0),
        ("kfac", {}, LAYER, 16 * 500 + 2 * 16**2),  # rows and Gram matrices of both sides
        ("kfac", {"form": "matrix"}, LAYER, 300**2 + 200**2),
        ("kfac", {"memory": "ema:0.9"}, LAYER, 2 * (300**2 + 200**2)),
        ("kfac", {"memory": "window:3"}, LAYER, 48 * 500 + 2 * 48**2),
        ("kfac", {"fisher": "exact", "form": "rows"}, LAYER, 16 * 300 + 16**2 + 160 * 200 + 160**2),
        ("kfac", {"form": "rows"}, replace(LAYER, positions=4), 64 * 500 + 2 * 64**2),
        ("kfac", {"form": "rows", "sharing": "reduce"}, replace(LAYER, positions=4), 16 * 500 + 2 * 16**2),
        ("kfac", {}, replace(LAYER, one_hot=True), 300 + 16 * 200 + 16**2),
        ("kfac", {"solver": "eigh"}, replace(LAYER, groups=2), 2 * (300**2 + 200**2)),
        ("foof", {}, LAYER, 16 * 300 + 16**2),
        ("shampoo", {}, LAYER, 2 * (300**2 + 200**2)),  # the sums and their roots
        ("shampoo", {"memory": "batch"}, LAYER, 300**2 + 200**2),
        ("shampoo", {"solver": "tracked"}, LAYER, 3 * (300**2 + 200**2)),
        ("shampoo", {"max_size": 250}, LAYER, 2 * 200**2),  # one side has no factor
        ("shampoo", {"max_size": 100}, replace(LAYER, one_hot=True), 2 * 300),
        ("soap", {"max_size": 250}, LAYER, 2 * 200**2),
        ("gauss-newton", {}, replace(LAYER, positions=4), 160**2 + 160 * 4 * 500),
    ],
)
def test_numbers_that_a_layers_state_holds(method, options, layer, numbers):
    spec = SPECS[method]
    plain = {"trust": "none"} if "trust" in spec.known_options else {}
    assert spec.state_size(layer, spec.all_options({**plain, **options})) == numbers


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("shampoo:1/2,input", 2 * 300**2),
        ("shampoo:1/2,output", 2 * 200**2),
        ("soap:input", 2 * 300**2),
    ],
)
def test_numbers_that_one_side_holds(name, numbers):
    spec = spec_of(name)
    assert spec.state_size(LAYER, {**spec.all_options({}), **spec.variant(name)}) == numbers


@pytest.mark.parametrize(
    ("method", "layer", "numbers"),
    [
        ("kfac", LAYER, 2 * (300**2 + 200**2)),  # averages and their inverses
        ("kfac", replace(LAYER, d_in=3000), 16 * 3000 + 16**2 + 2 * 200**2),  # too large for an average
        ("foof", LAYER, 2 * 300**2),
        ("shampoo", LAYER, 2 * (300**2 + 200**2)),
    ],
)
def test_numbers_that_the_defaults_hold(method, layer, numbers):
    spec = SPECS[method]
    assert spec.state_size(layer, spec.all_options({})) == numbers


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({"method": "sgd", "momentum": 0}, 0),
        ({"method": "sgd"}, 1),
        ({"method": "adamw"}, 2),
        ({"method_options": {"trust": "graft:adam"}}, 3),
        ({"method": "shampoo", "momentum": 0}, 0),
    ],
)
def test_copies_of_the_weights_that_moments_take(fields, copies):
    run = RunConfig(**fields)
    assert run.spec.moments(run) == copies


def test_stacks_have_plain_options():
    memory = SPECS["kfac"].known_options["memory"]
    assert memory.stacks == (Batch(), Auto())
    assert memory.parse("window:2") == Window(2) not in memory.stacks
    assert [name for name, spec in SPECS.items() if spec.stacks] == ["sgd", "kfac", "foof"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_range": (-2, -2)}, "lr_range=.* must rise"),
        ({"captures": ("outputs",)}, "captures='outputs'; known: inputs"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SPECS["kfac"], **changes)


def test_a_name_of_theory_keeps_its_exponents():
    with pytest.raises(ValueError, match=r"method 'lion': mukron\.theory knows other exponents by that name"):
        register(replace(SPECS["kfac"], name="lion", method=replace(METHODS["kfac"], name="lion")))(
            type("Mirror", (SecondOrder,), {})
        )
    assert "lion" not in SPECS


def test_what_theory_has_by_itself_is_not_forgotten():
    """Here with a method under a name of its own, whose exponents are those of K-FAC, and which has no damping."""
    plain = register(replace(SPECS["kfac"], name="kfac-plain", damping=None))(type("Plain", (SecondOrder,), {}))
    try:
        assert get_method("kfac-plain") is METHODS["kfac"]
        assert (spec_of("kfac-plain"), spec_of("kfac")) == (plain.spec, SPECS["kfac"])
        assert plain.rule is Constant
    finally:
        unregister("kfac-plain")
    assert spec_of("kfac") is SPECS["kfac"]
    with pytest.raises(ValueError, match="unknown method 'kfac-plain'"):
        get_method("kfac-plain")


def test_the_docs_list_every_method_and_option():
    """``python -m mukron.optim.listing docs/training.md`` brings them up to date."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert listing() in page
    assert page.count(MARKER) == 2


def test_an_optimizers_file_is_short():
    """The record and the class, K-FAC's variant in full."""
    assert len(inspect.getsource(inspect.getmodule(FOOF)).splitlines()) <= 80
