"""One run as plain data: what is trained, on what, by which method, for how long, and what is recorded."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch

from mukron.curvature import FISHERS, Window, parse_memory
from mukron.damping import Heuristic, MaxEigenvalue, Rescaled, Rule
from mukron.data import AUGMENTATIONS
from mukron.linalg import SOLVERS
from mukron.models import get_model
from mukron.optim.fallback import FALLBACKS
from mukron.params import plain_width
from mukron.params.storage import Data, read_json, stamp, write_json
from mukron.theory import SP, Scheme, get_method, get_scheme
from mukron.train.errors import RunError
from mukron.train.schedules import Schedule

KIND, VERSION = "run_config", 1
LARGEST_EXPONENT = 1000
LOSSES = ("cross-entropy", "mse")
DTYPES = {  # of the weights
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.float32,
}
RECORDS = ("features", "distance", "spectra", "rates", "words")

FIRST_ORDER = ("sgd", "adamw")


@dataclass(frozen=True)
class RunConfig:
    """A run as a whole: the same config on the same machine gives the same numbers. Saves to and loads from JSON.

    Every field has a default; what cannot be is refused when the config is made, naming the field.
    """

    model: str = "mlp"  # a built-in network, or "module:function", your own, which is called with its width
    width: float = 256
    base_width: float | None = None  # the width that settings are tuned at; None: the built-in network's usual one
    model_options: Mapping[str, Any] = field(default_factory=dict)  # more keyword arguments of the network
    roles: Mapping[str, str] = field(default_factory=dict)  # of parameters that no known module owns, by name
    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None  # how many for training, the same ones at every seed; None: all
    test_samples: int | None = None
    augment: tuple[str, ...] = ()
    loss: str = "cross-entropy"  # or "mse": half the sum of squares to one-hot minus 1 / classes, mean over samples
    label_smoothing: float = 0.0
    method: str = "kfac"  # sgd, adamw, kfac, foof, shampoo, shampoo:E, gauss-newton
    method_options: Mapping[str, Any] = field(default_factory=dict)  # METHOD_OPTIONS says which
    scheme: str = "mup"
    output_exponent: str | None = None  # b of the output weights instead of the scheme's: a number, or "zero"
    damping: Rule | None = None  # None: the method's own
    lr: float = 0.01
    schedule: str = "constant"  # cosine, linear, or step:60,120: times 0.2 at the start of these epochs
    warmup: float = 0.0  # epochs
    momentum: float = 0.9  # for adamw its beta1
    weight_decay: float = 0.0
    clip_norm: float | None = None  # of the whole gradient
    kl_clip: float | None = None  # of the whole step of a second-order method
    epochs: int = 20
    batch: int | None = None  # None: all samples in one
    seed: int = 0  # of the initial weights, the order of samples, augmentations, dropout and K-FAC's draws
    dtype: str = "float32"  # float64; on float32 weights tf32 (quicker products on a GPU) or bfloat16 (autocast)
    device: str = "cpu"
    compile: bool = False
    record: tuple[str, ...] = ()  # features, distance, spectra, rates, words
    record_every: int = 1  # epochs
    evaluate_every: int = 1  # epochs; the last one always is

    def __post_init__(self) -> None:
        problems = []
        for name, read in READERS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, read(value))
            except (ValueError, TypeError, ArithmeticError) as error:
                problems.append(f"{name}={_shown(value)}: {error}")
        if not problems and isinstance(self.damping, float):
            rule = MaxEigenvalue if self.family == "shampoo" else Rescaled
            object.__setattr__(self, "damping", rule(self.damping))
        problems = problems or list(_read_method_options(self)) or list(_contradictions(self))
        if problems:
            raise RunError("; ".join(problems))

    @property
    def family(self) -> str:
        """The method without its exponent: "shampoo" for "shampoo:1/4"."""
        return self.method.partition(":")[0]

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def replace(self, **changes: Any) -> RunConfig:
        _check_names(changes, "RunConfig.replace")
        return dataclasses.replace(self, **changes)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """By field, this config's value and the other's, as JSON has them."""
        ours, theirs = self.to_dict(), other.to_dict()
        return {name: (ours[name], theirs[name]) for name in ours if _json(ours[name]) != _json(theirs[name])}

    def key(self, without: Collection[str] = ()) -> str:
        """A short name of the content, or of all but some fields: equal configs have equal keys, here and elsewhere."""
        content = _json({name: value for name, value in self.to_dict().items() if name not in without})
        return hashlib.sha256(content.encode()).hexdigest()[:10]

    def to_dict(self) -> Data:
        content = {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}
        return stamp(KIND, VERSION, content)

    @classmethod
    def from_dict(cls, data: object, source: str = "run config") -> RunConfig:
        """Fields that are not there take their defaults, so that a file written by hand may be short."""
        if not isinstance(data, Mapping):
            raise RunError(f"{source}: expected the fields of a run by name, found {type(data).__name__}")
        written = (data.get("format", f"mukron.{KIND}"), data.get("version", VERSION))
        if written != (f"mukron.{KIND}", VERSION):
            raise RunError(
                f"{source}: format {written[0]!r} version {written[1]!r}; this mukron reads 'mukron.{KIND}' version "
                f"{VERSION}"
            )
        fields = {name: value for name, value in data.items() if name not in ("format", "version")}
        _check_names(fields, source)
        return cls(**fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunConfig:
        try:
            return cls.from_dict(read_json(path), source=str(path))
        except FileNotFoundError:
            raise RunError(f"{path}: there is no such file") from None
        except IsADirectoryError:
            raise RunError(f"{path}: is a folder; expected a run's JSON file, such as its config.json") from None
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from error

    def __eq__(self, other: object) -> bool:
        """By what JSON says: 1, 1.0 and true are three values of an option."""
        return _json(self.to_dict()) == _json(other.to_dict()) if isinstance(other, RunConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    def __reduce__(self) -> Any:
        return RunConfig.from_dict, (self.to_dict(),)


# From what was given to what is kept, or an error that says what is allowed.

Reader = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _whole(least: int | None = None) -> Reader:
    allowed = "" if least is None else f" from {least} on"
    lowest = -(2**63) if least is None else least

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not lowest <= int(value) < 2**63:
            raise ValueError(f"expected a whole number{allowed}")
        return int(value)

    return read


def _number(least: float = 0.0, below: float = math.inf, above: float | None = None) -> Reader:
    """A finite number; floats that are whole stay floats, so that 1 and 1.0 are one config."""
    allowed = f"above {above:g}" if above is not None else f"not below {least:g}"
    allowed += f" and below {below:g}" if below < math.inf else ""

    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            number = math.inf
        if not (least <= number < below) or (above is not None and not number > above):
            raise ValueError(f"expected a number {allowed}")
        return number + 0.0  # there is one zero

    return read


def _width(value: Any) -> float:
    number: float = _number(above=0)(value)
    return plain_width(number)


def _one_of(known: Collection[str]) -> Reader:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"known: {', '.join(known)}")
        return value

    return read


def _optional(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _names(read: Reader) -> Reader:
    def read_all(values: Any) -> tuple[str, ...]:
        if isinstance(values, str) or not isinstance(values, (tuple, list)):
            raise ValueError("expected a list of names")
        return tuple(map(read, values))

    return read_all


def _options(values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError("expected values by name")
    frozen: Mapping[str, Any] = _frozen(values)
    return frozen


def _model(value: Any) -> str:
    name = _text(value)
    if ":" not in name:
        get_model(name)
    return name


def _exact(text: str) -> str:
    """Text with exact numbers in it: those with huge exponents would never be ready."""
    if len(text) > 60 or re.search(r"e[-+]?[\d_]{3,}", text, re.IGNORECASE):
        raise ValueError("expected short numbers, as in 1/2 or 0.25")
    return text


def _method(value: Any) -> str:
    name = get_method(_exact(_text(value))).name
    name = "adamw" if name == "adam" else name  # the same without weight decay, and with it the only one of the two
    if name.partition(":")[0] not in METHOD_OPTIONS:
        raise ValueError(f"no optimizer of this library; known: {', '.join(METHOD_OPTIONS)}, shampoo:E")
    return name


def _scheme(value: Any) -> str:
    return value.name if isinstance(value, Scheme) else get_scheme(_exact(_text(value))).name


def _exponent(value: Any) -> str:
    if value == "zero":
        return "zero"
    exact = Fraction(_exact(str(value)))
    if not 0 <= exact <= LARGEST_EXPONENT:
        raise ValueError(f'expected a number from 0 to {LARGEST_EXPONENT}, or "zero"')
    return str(exact)


def _damping(value: Any) -> Rule | float:
    """A rule; or a bare number, which means the method's own rule."""
    try:
        return float(_number()(float(value) if isinstance(value, str) else value))
    except ValueError:
        pass
    rule = Rule.parse(value) if isinstance(value, str) else value
    plain = rule.plain() if isinstance(rule, Rule) else rule
    if not isinstance(plain, Mapping) or plain.get("rule") not in Rule.kinds:
        raise ValueError('expected a number or a damping rule, as in Rescaled(1.0) or "rescaled:1"')
    numbers = {name: _number()(number) for name, number in plain.items() if name != "rule"}
    return Rule.kinds[plain["rule"]](**numbers)


def _memory(value: Any) -> str:
    parse_memory(_text(value))
    return str(value)


def _memory_in_matrices(value: Any) -> str:
    if isinstance(parse_memory(_text(value)), Window):
        raise ValueError("Shampoo's factors are matrices: choose sum, ema:DECAY or batch")
    return str(value)


def _device(value: Any) -> str:
    try:
        device = torch.device(_text(value))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if device.type == "meta":
        raise ValueError("holds no numbers, so nothing can be trained there; choose cpu or cuda")
    return str(device)


READERS: dict[str, Reader] = {
    "model": _model,
    "width": _width,
    "base_width": _optional(_width),
    "model_options": _options,
    "roles": _options,
    "data": _text,
    "data_options": _options,
    "samples": _optional(_whole(1)),
    "test_samples": _optional(_whole(1)),
    "augment": _names(_one_of(AUGMENTATIONS)),
    "loss": _one_of(LOSSES),
    "label_smoothing": _number(below=1),
    "method": _method,
    "method_options": _options,
    "scheme": _scheme,
    "output_exponent": _optional(_exponent),
    "damping": _optional(_damping),
    "lr": _number(above=0),
    "schedule": lambda value: str(Schedule.parse(value)),
    "warmup": _number(),
    "momentum": _number(below=1),
    "weight_decay": _number(),
    "clip_norm": _optional(_number(above=0)),
    "kl_clip": _optional(_number(above=0)),
    "epochs": _whole(1),
    "batch": _optional(_whole(1)),
    "seed": _whole(0),
    "dtype": _one_of(DTYPES),
    "device": _device,
    "compile": _flag,
    "record": _names(_one_of(RECORDS)),
    "record_every": _whole(1),
    "evaluate_every": _whole(1),
}

_ALL: dict[str, Reader] = {
    "nesterov": _flag,
    "decoupled": _flag,
    "graft": _optional(_one_of(("sgd", "adam"))),
    "fallback": _one_of(FALLBACKS),
    "fallback_lr": _optional(_number()),
    "exclude": _names(_text),
}
_EVERY: dict[str, Reader] = {"factor_every": _whole(1), "inverse_every": _whole(1)}
_LAYERS: dict[str, Reader] = {
    "memory": _memory,
    "solver": _one_of(SOLVERS),
    "sharing": _one_of(("expand", "reduce")),
    "form": _one_of(("auto", "rows", "matrix")),
    "fused": _flag,
}
METHOD_OPTIONS: dict[str, dict[str, Reader]] = {  # by method: the optimizer's arguments that have no field of their own
    "sgd": {"nesterov": _flag},
    "adamw": {"beta2": _number(below=1), "eps": _number()},
    "kfac": {**_ALL, **_EVERY, **_LAYERS, "fisher": _one_of(FISHERS), "class_dim": _optional(_whole())},
    "foof": {**_ALL, **_EVERY, **_LAYERS},
    "shampoo": {
        **_ALL,
        **_EVERY,
        "memory": _memory_in_matrices,
        "fused": _flag,
        "solver": _one_of(("eigh", "newton", "tracked")),
        "tolerance": _number(),
        "max_size": _whole(1),
    },
    "gauss-newton": _ALL,
}


def _read_method_options(config: RunConfig) -> Iterator[str]:
    """The method's own arguments, each as its optimizer takes it; says what is wrong with them."""
    known, options = METHOD_OPTIONS[config.family], dict(config.method_options)
    for name, value in options.items():
        if name in READERS or name in ("likelihood", "betas"):
            instead = {"likelihood": "loss", "betas": "momentum"}.get(name, name)
            yield f"method_options: {name!r} is said by the field {instead}"
        elif name not in known:
            yield f"method_options: {config.method} has no {name!r}{_nearest(name, known)}; known: {', '.join(known)}"
        else:
            try:
                options[name] = known[name](value)
            except ValueError as error:
                yield f"method_options: {name}={_shown(value)}: {error}"
    object.__setattr__(config, "method_options", MappingProxyType(options))


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Fields that are right each by itself but not together."""
    if ":" in config.model and config.base_width is None:
        yield f"model={config.model!r}: a network of your own needs base_width, the width that settings are tuned at"
    if config.scheme == SP.name and config.output_exponent is not None:
        yield 'output_exponent: scheme="sp" leaves the initial weights as drawn; use scheme="mup" or "ntk"'
    if config.warmup > config.epochs:
        yield f"warmup={config.warmup:g}: longer than the run's {config.epochs} epochs"
    if config.method in FIRST_ORDER:
        for name in ("damping", "kl_clip"):
            if getattr(config, name) is not None:
                yield f"{name}: {config.method} has none; it is for second-order methods"
    if isinstance(config.damping, Heuristic) and config.method != "kfac":
        yield f"damping: the heuristic balances A against B, which {config.method} does not have; it is for kfac alone"
    for name in ("samples", "test_samples", "seed"):
        if name in config.data_options:
            yield f"data_options: {name!r} is said by fields of the run"
    options = config.method_options
    if options.get("nesterov") and not config.momentum:
        yield "method_options: nesterov=True needs momentum above 0"
    if options.get("fused") and config.clip_norm is not None:
        yield "method_options: fused=True leaves no gradients to clip; use kl_clip, or drop one of the two"
    factors, inverses = options.get("factor_every", 1), options.get("inverse_every", 1)
    if inverses % factors:
        yield f"method_options: inverse_every={inverses} must be a multiple of factor_every={factors}"


def _check_names(fields: Mapping[str, Any], source: str) -> None:
    for name in fields:
        if name not in READERS:
            known = ", ".join(READERS)
            raise RunError(f"{source}: a run has no field {name!r}{_nearest(name, READERS)}; its fields: {known}")


def _nearest(name: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _frozen(value: Any) -> Any:
    """JSON data that nobody can change."""
    if isinstance(value, Mapping):
        return MappingProxyType({_text(name): _frozen(each) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return _whole()(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value) + 0.0  # there is one zero
    raise ValueError(f"{value!r} is nothing that JSON can hold")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    """A value as an error shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "(a huge number)"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, Rule):
        return value.plain()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
