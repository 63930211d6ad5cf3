"""Readers of a run's fields: each checks one value and returns it in its one spelling.

Those that other records need too are in ``mukron.readers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

import torch

from mukron import readers as read
from mukron.damping import Rule
from mukron.data import AUGMENTATIONS
from mukron.data.catalogue import usual_name
from mukron.imports import is_function_path
from mukron.models import get_model
from mukron.optim.spec import method_names, spec_of
from mukron.params import plain_width
from mukron.params.apply import DECAYS, decay_exponent, exponent_of
from mukron.readers import Reader
from mukron.theory import Scheme, get_method, get_scheme
from mukron.train.schedules import Schedule

LARGEST_EXPONENT = 1000
LOSSES = ("cross-entropy", "mse")
DTYPES = {  # of the weights
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.float32,
}
SHARDINGS = ("ddp", "fsdp")
RECORDS = ("features", "distance", "spectra", "rates", "words")


def _width(value: Any) -> float:
    number: float = read.number(above=0)(value)
    return plain_width(number)


def _function(path: str) -> str:
    if not is_function_path(path):
        raise ValueError("expected MODULE:FUNCTION, a module's name, not a file's, as in mypackage.nets:make")
    return path


def _model(value: Any) -> str:
    name: str = read.text(value)
    if ":" in name:
        return _function(name)
    get_model(name)
    return name


def _method(value: Any) -> str:
    """The method in its one spelling: "adam" is "adamw" (the same without weight decay), "gn" is "gauss-newton"."""
    name = read.text(value)
    try:
        spec, exact = spec_of(name), get_method(name).name
    except ValueError:
        if ":" in name:
            raise
        known = method_names()
        raise ValueError(f"no such optimizer{read.nearest(name, known)}; known: {', '.join(known)}") from None
    return exact if ":" in exact else spec.name


def _scheme(value: Any) -> str:
    return value.name if isinstance(value, Scheme) else get_scheme(read.text(value)).name


def _exponent(value: Any) -> str:
    if value == "zero":
        return "zero"
    exact = read.exact_number(value)
    if not 0 <= exact <= LARGEST_EXPONENT:
        raise ValueError(f'expected a number from 0 to {LARGEST_EXPONENT}, or "zero"')
    return str(exact)


def _decay(value: Any) -> str:
    """In its one spelling: the law's name if it has one."""
    k = decay_exponent(value)
    return next((name for name, known in DECAYS.items() if known == k), str(k))


def _data(value: Any) -> str:
    name: str = "" if value in ("", None) else read.text(value)
    return _function(name) if ":" in name else usual_name(name)


def _loss(value: Any) -> str:
    if isinstance(value, str) and ":" in value:
        return _function(value)
    try:
        return str(read.one_of(LOSSES)(value))
    except ValueError as error:
        raise ValueError(f"{error}, or MODULE:FUNCTION, a loss of your own") from None


def _damping(value: Any) -> Rule | float:
    """A rule; or a bare number, which means the method's own rule."""
    try:
        return float(read.number()(float(value) if isinstance(value, str) else value))
    except ValueError:
        pass
    rule = Rule.parse(value) if isinstance(value, str) else value
    plain = rule.plain() if isinstance(rule, Rule) else rule
    if not isinstance(plain, Mapping) or plain.get("rule") not in Rule.kinds:
        raise ValueError('expected a number or a damping rule, as in Rescaled(1.0) or "rescaled:1"')
    numbers = {name: read.number()(number) for name, number in plain.items() if name != "rule"}
    return Rule.kinds[plain["rule"]](**numbers)


def _device(value: Any) -> str:
    try:
        device = torch.device(read.text(value))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if device.type == "meta":
        raise ValueError("holds no numbers, so nothing can be trained there; choose cpu or cuda")
    return str(device)


def _arguments(values: Any) -> Any:
    """Keyword arguments of a function: their names are written into scripts."""
    arguments = read.options(values)
    for name in arguments:
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(f"{read.shown(name)} is no name of an argument")
    return arguments


READERS: dict[str, Reader] = {
    "model": _model,
    "width": _width,
    "base_width": read.optional(_width),
    "model_options": _arguments,
    "roles": read.options,
    "data": _data,
    "data_options": _arguments,
    "output": read.optional(read.text),
    "class_dim": read.optional(read.whole()),
    "samples": read.optional(read.whole(1)),
    "test_samples": read.optional(read.whole(1)),
    "augment": read.names(read.one_of(AUGMENTATIONS)),
    "loss": _loss,
    "label_smoothing": read.number(below=1),
    "method": _method,
    "method_options": read.options,
    "scheme": _scheme,
    "output_exponent": read.optional(_exponent),
    "decay": _decay,
    "base_depth": read.optional(read.whole(1)),
    "embedding_lr": lambda value: str(exponent_of("embedding_lr", value)),
    "damping": read.optional(_damping),
    "lr": read.number(above=0),
    "schedule": lambda value: str(Schedule.parse(value)),
    "warmup": read.number(),
    "momentum": read.number(below=1),
    "weight_decay": read.number(),
    "clip_norm": read.optional(read.number(above=0)),
    "epochs": read.whole(1),
    "batch": read.optional(read.whole(1)),
    "seed": read.whole(0),
    "dtype": read.one_of(DTYPES),
    "device": _device,
    "compile": read.flag,
    "sharding": read.one_of(SHARDINGS),
    "record": read.names(read.one_of(RECORDS)),
    "record_every": read.whole(1),
    "evaluate_every": read.whole(1),
}
