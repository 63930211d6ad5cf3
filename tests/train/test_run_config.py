"""The description of a run: what it accepts, what it refuses and how it says so, and that it survives being stored."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from mukron.damping import Fixed, Heuristic, MaxEigenvalue, Rescaled
from mukron.optim import SPECS
from mukron.train import RunConfig, RunError
from mukron.train.config import READERS

EVERYTHING = {  # nothing as by default
    "model": "mine:make",
    "width": 96,
    "base_width": 32,
    "model_options": {"depth": 4, "sizes": [1, [2, 3]]},
    "roles": {"position": "input"},
    "output": "logits",
    "class_dim": 1,
    "data": "mnist",
    "data_options": {"size": 32},
    "samples": 1024,
    "test_samples": 100,
    "augment": ["crop", "flip"],
    "loss": "mse",
    "label_smoothing": 0.1,
    "method": "shampoo:1/4",
    "method_options": {"memory": "ema:0.9", "exclude": ["head"]},
    "scheme": "ntk",
    "output_exponent": "2",
    "decay": "1/2",
    "embedding_lr": "-1/2",
    "base_depth": 2,
    "damping": Rescaled(0.5),
    "lr": 0.25,
    "schedule": "step:1,2.5",
    "warmup": 0.5,
    "momentum": 0.8,
    "weight_decay": 1e-4,
    "clip_norm": 1.0,
    "epochs": 3,
    "batch": 64,
    "seed": 7,
    "dtype": "bfloat16",
    "device": "cuda:1",
    "compile": True,
    "sharding": "fsdp",
    "record": ["features", "spectra"],
    "record_every": 2,
    "evaluate_every": 3,
}


def test_a_config_comes_back_from_json(tmp_path):
    assert set(EVERYTHING) == {each.name for each in fields(RunConfig)} == set(READERS)
    config = RunConfig(**EVERYTHING)
    defaults = RunConfig()
    assert all(getattr(config, name) != getattr(defaults, name) for name in EVERYTHING)
    config.save(tmp_path / "config.json")
    for back in (
        RunConfig.load(tmp_path / "config.json"),
        RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert back == config
        assert back.key() == config.key()
        assert hash(back) == hash(config)
    assert defaults != config


def test_equal_requests_are_one_config():
    one = RunConfig(lr=1, width=64.0, method="Gauss-Newton", scheme="MUP", damping=Rescaled(1.0), output_exponent=0.5)
    other = RunConfig(
        lr=1.0, width=np.int64(64), method="gn", scheme="uniform:0", damping="rescaled:1", output_exponent="1/2"
    )
    assert one == other
    assert one.key() == other.key()
    assert RunConfig(method="adam") == RunConfig(method="adamw")
    assert RunConfig(method="shampoo:1/2") == RunConfig(method="shampoo")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"weight_decay": -0.0}, {"weight_decay": 0.0}),
        ({"model_options": {"a": [-0.0]}}, {"model_options": {"a": [0.0]}}),
        ({"damping": Fixed(1, -0.0)}, {"damping": Fixed(1.0, 0.0)}),
        ({"damping": Rescaled(1)}, {"damping": "rescaled:1"}),
        ({"method_options": {"fallback_lr": 1}}, {"method_options": {"fallback_lr": 1.0}}),
    ],
)
def test_equal_values_make_equal_keys(one, other):
    one, other = RunConfig(**one), RunConfig(**other)
    assert one == other
    assert (one.key(), hash(one), one.differences(other)) == (other.key(), hash(other), {})


def test_a_users_options_are_equal_as_json_has_them():
    """A network may tell 1, 1.0 and true apart."""
    configs = [RunConfig(model_options={"a": value}) for value in (1, 1.0, True)]
    assert len({config.key() for config in configs}) == len(set(configs)) == 3
    assert configs[0] != configs[1]
    assert configs[0].differences(configs[1]) == {"model_options": ({"a": 1}, {"a": 1.0})}
    assert RunConfig() != "a config"


def test_a_key_may_leave_fields_out():
    assert RunConfig(epochs=3).key(without=["epochs"]) == RunConfig(epochs=5).key(without=["epochs"])
    assert RunConfig(epochs=3).key(without=["epochs"]) != RunConfig(lr=1).key(without=["epochs"])


def test_every_field_is_part_of_the_key():
    keys = {RunConfig().key()}
    changes = {**EVERYTHING, "model": "cnn", "method": "foof", "method_options": {"fisher": "exact"}}
    for name, value in changes.items():
        needed = {"model_options": {"depth": 3}} if name == "base_depth" else {}
        keys.add(RunConfig().replace(**{name: value}, **needed).key())
    assert len(keys) == len(changes) + 1


def test_nobody_can_change_a_config():
    options = {"layers": [1, 2], "inner": {"a": 1}}
    config = RunConfig(model_options=options)
    options["layers"].append(3)
    options["inner"]["a"] = 2
    assert config.to_dict()["model_options"] == {"layers": [1, 2], "inner": {"a": 1}}
    with pytest.raises(TypeError):
        config.model_options["layers"] = 1
    with pytest.raises(TypeError):
        config.model_options["inner"]["a"] = 2
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model='': expected a name"),
        ({"width": 0}, "width=0: expected a number above 0"),
        ({"width": True}, "width=True: expected a number"),
        ({"base_width": -1}, "base_width=-1: expected a number above 0"),
        ({"model_options": {"f": print}}, "model_options=.*is nothing that JSON can hold"),
        ({"model_options": [1]}, r"model_options=\[1\]: expected values by name"),
        ({"samples": 0}, "samples=0: expected a whole number from 1 on"),
        ({"augment": "crop"}, "augment='crop': expected a list of names"),
        ({"augment": ["corp"]}, "augment=.*known: crop, flip"),
        ({"loss": "l1"}, "loss='l1': known: cross-entropy, mse"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0: expected a number not below 0 and below 1"),
        (
            {"method": "kfca"},
            r"method='kfca': no such optimizer \(did you mean 'kfac'\?\); known: sgd, adamw, kfac, foof",
        ),
        ({"method": "lion"}, "method='lion': no such optimizer.*; known: sgd, adamw, kfac"),
        (
            {"method_options": {"kl_clip": 1e-3}},
            r"kfac has no 'kl_clip'; say trust=kl:KAPPA, in Python trust=mukron.KL",
        ),
        ({"method_options": {"graft": "adam"}}, r"kfac has no 'graft'; say trust=graft:adam or trust=graft:sgd"),
        ({"scheme": "mupp"}, "scheme='mupp': unknown scheme"),
        ({"output_exponent": "half"}, "output_exponent='half'"),
        ({"decay": "width"}, 'decay=.width.: decay must be "constant" or "1/width" or an exponent'),
        ({"embedding_lr": "1e9999"}, "embedding_lr=.*must be an exponent"),
        ({"output_exponent": -1}, 'output_exponent=-1: expected a number from 0 to 1000, or "zero"'),
        ({"output_exponent": "1e9"}, 'output_exponent=.1e9.: expected a number from 0 to 1000, or "zero"'),
        ({"output_exponent": "1e999999999"}, "output_exponent=.*expected a short number, as in 1/2"),
        ({"output_exponent": "1e-999_999_999"}, "output_exponent=.*expected a short number"),
        ({"scheme": "uniform:1e-999999999"}, "scheme=.*expected a short number"),
        ({"method": "shampoo:1e999999999"}, "method=.*expected a short number"),
        ({"scheme": None}, "scheme=None: expected a name"),
        ({"scheme": 1}, "scheme=1: expected a name"),
        ({"lr": 10**400}, r"lr=10+\.\.\.: expected a number above 0"),
        ({"width": 10**5000}, r"width=.*: expected a number above 0"),
        ({"model_options": {"n": 10**5000}}, "model_options=.*: expected a whole number"),
        ({"loss": ["mse"]}, r"loss=\['mse'\]: known: cross-entropy, mse"),
        ({"model": "mpl"}, r"model='mpl': unknown model 'mpl' \(did you mean 'mlp'\?\); known: mlp"),
        ({"device": "meta"}, "device='meta': holds no numbers"),
        ({"damping": "rescald:1"}, "damping='rescald:1': unknown damping rule 'rescald'; known: rescaled"),
        ({"damping": []}, r"damping=\[\]: expected a number or a damping rule"),
        ({"lr": 0}, "lr=0: expected a number above 0"),
        ({"lr": float("nan")}, "lr=nan: expected a number above 0"),
        ({"lr": float("inf")}, "lr=inf: expected a number above 0"),
        ({"schedule": "cosin"}, "schedule='cosin': known: constant, cosine, linear, step"),
        ({"schedule": "step:20,10"}, "names rising epochs"),
        ({"schedule": "step"}, "names rising epochs"),
        ({"warmup": 30}, "warmup=30: longer than the run's 20 epochs"),
        ({"momentum": 1}, "momentum=1: expected a number not below 0 and below 1"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"clip_norm": 0}, "clip_norm=0: expected a number above 0"),
        ({"epochs": 1.5}, "epochs=1.5: expected a whole number"),
        ({"batch": -3}, "batch=-3"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"dtype": "float16"}, "dtype='float16': known: float32, float64, tf32, bfloat16"),
        ({"device": "gpu"}, "device='gpu': Expected one of cpu, cuda"),
        ({"compile": 1}, "compile=1: expected true or false"),
        ({"record": ["feature"]}, "record=.*known: features, distance, spectra, rates, words"),
        ({"record_every": 0}, "record_every=0"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"model": "mine:make"}, "a network of your own needs base_width"),
        ({"scheme": "sp", "output_exponent": 2}, 'output_exponent: scheme="sp" leaves the initial weights as drawn'),
        ({"method": "sgd", "damping": Rescaled(1.0)}, "damping: sgd has none"),
        ({"method": "foof", "damping": Heuristic(1e-3)}, "the heuristic balances A against B, which foof does not"),
        ({"method_options": {"fishr": "mc"}}, r"kfac has no 'fishr' \(did you mean 'fisher'\?\); known: nesterov"),
        ({"method_options": {"lr": 1}}, "method_options: 'lr' is said by the field lr"),
        ({"method_options": {"likelihood": "gaussian"}}, "'likelihood' is said by the field loss"),
        ({"method": "adamw", "method_options": {"betas": [0.9, 0.99]}}, "'betas' is said by the field momentum"),
        ({"method_options": {"memory": "emma"}}, "method_options: memory='emma': unknown memory 'emma'"),
        ({"method_options": {"memory": None}}, "method_options: memory=None: expected a name"),
        ({"method": "shampoo", "method_options": {"memory": "window:4"}}, "memory='window:4': Shampoo's factors are"),
        ({"method_options": {"exclude": "head"}}, "method_options: exclude='head': expected a list of names"),
        ({"method_options": {"exclude": [1]}}, r"method_options: exclude=\(1,\): expected a name"),
        (
            {"method_options": {"fisher": "none"}},
            "method_options: fisher='none': unknown fisher 'none'; known: 'signs', 'mc', 'exact', 'empirical'",
        ),
        ({"method_options": {"solver": "svd"}}, "method_options: solver='svd': known: cholesky, eigh, newton"),
        (
            {"method": "shampoo", "method_options": {"solver": "cholesky"}},
            "solver='cholesky': known: eigh, newton, tracked",
        ),
        ({"method_options": {"inverse_every": 0}}, "inverse_every=0: expected a whole number from 1 on"),
        ({"method_options": {"inverse_every": "ten"}}, "inverse_every='ten': expected a whole number from 1 on"),
        ({"method_options": {"factor_every": 2, "inverse_every": 3}}, "inverse_every=3 must be a multiple of fac.*=2"),
        ({"method_options": {"class_dim": 1.5}}, "class_dim=1.5: expected a whole number"),
        ({"method_options": {"nesterov": 1}}, "nesterov=1: expected true or false"),
        ({"momentum": 0, "method_options": {"nesterov": True}}, "nesterov=True needs momentum above 0"),
        ({"method_options": {"trust": "graft:rmsprop"}}, "unknown graft 'rmsprop'; known: sgd, adam"),
        ({"method_options": {"fallback_lr": -1}}, "fallback_lr=-1: expected a number not below 0"),
        ({"method": "adamw", "method_options": {"beta2": 1}}, "beta2=1: expected a number not below 0 and below 1"),
        ({"data_options": {"samples": 5}}, "data_options: 'samples' is said by fields of the run"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(RunError, match=message):
        RunConfig(**fields)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(RunError, match=r"lr=-1.*; epochs=0.*; dtype='half'"):
        RunConfig(lr=-1, epochs=0, dtype="half")


def test_unknown_fields_name_the_nearest(tmp_path):
    with pytest.raises(RunError, match=r"a run has no field 'moment' \(did you mean 'momentum'\?\)"):
        RunConfig.from_dict({"moment": 0.9})
    with pytest.raises(RunError, match=r"a run has no field 'learning_rate' \(did you mean 'lr'\?\)"):
        RunConfig().replace(learning_rate=1)
    with pytest.raises(RunError, match="expected the fields of a run by name, found list"):
        RunConfig.from_dict([])
    with pytest.raises(RunError, match=r"format 'mukron.base_shapes' version 1; this mukron reads 'mukron.run_config'"):
        RunConfig.from_dict({"format": "mukron.base_shapes"})
    with pytest.raises(RunError, match=r"has no field 'moment'.*; its fields: model, width, base_width"):
        RunConfig.from_dict({"moment": 0.9})
    with pytest.raises(RunError, match="there is no such file"):
        RunConfig.load(tmp_path / "nothing.json")
    with pytest.raises(RunError, match="is a folder; expected a run's JSON file"):
        RunConfig.load(tmp_path)


def test_a_file_written_by_hand_may_be_short(tmp_path):
    (tmp_path / "run.json").write_text('{"lr": 0.5, "damping": "fixed:1,0.1"}')
    assert RunConfig.load(tmp_path / "run.json") == RunConfig(lr=0.5, damping=Fixed(1.0, 0.1))


@pytest.mark.parametrize("method", [name for name, spec in SPECS.items() if spec.layerwise])
def test_options_are_the_optimizers_own(method):
    """Every option that is offered is an argument, and every argument is an option, a field, or none of JSON's."""
    parameters = inspect.signature(SPECS[method].optimizer.__init__).parameters.values()
    arguments = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    said_by_fields = {"damping", "momentum", "weight_decay", "seed", "e", "e_A", "e_B", "sides", "reduction"}
    not_json = {"output", "grad_scaler", "params", "maximize", "process_group"}
    assert set(SPECS[method].known_options) == arguments - said_by_fields - not_json


def test_a_bare_number_is_the_methods_own_damping():
    assert RunConfig(damping=2).damping == RunConfig(damping="2.0").damping == Rescaled(2.0)
    assert RunConfig(method="shampoo", damping=1e-3).damping == MaxEigenvalue(1e-3)
    with pytest.raises(RunError, match="damping: sgd has none"):
        RunConfig(method="sgd", damping=1.0)
    with pytest.raises(RunError, match="damping=-1"):
        RunConfig(damping=-1)
