"""One run as plain data: what is trained, on what, by which method, for how long, and what is recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from mukron import readers as read
from mukron.damping import Heuristic, Rule
from mukron.imports import NAMED_BY, FileFunction, UntrustedError
from mukron.models import get_model
from mukron.optim.docs import MOVED
from mukron.optim.spec import MethodSpec, spec_of
from mukron.params.storage import Data, read_json, stamp, write_json
from mukron.theory import SP
from mukron.train.errors import RunError
from mukron.train.fields import DTYPES, READERS

KIND, VERSION = "run_config", 1
USUAL_DATA = "digits"  # of a network of one's own
LATER = {
    "output": None,
    "class_dim": None,
    "decay": "constant",
    "embedding_lr": "0",
    "base_depth": None,
    "sharding": "ddp",
}  # fields that came later: left out of JSON where they have this value, so that keys stay
SAID_BY_FIELDS = {"likelihood": "loss", "betas": "momentum"}  # optimizers' arguments, and the fields they follow from
OPTIONS_NOW = {"kl_clip": "trust=kl:KAPPA", "graft": "trust=graft:adam or trust=graft:sgd"}  # former options, and now


@dataclass(frozen=True)
class RunConfig:
    """A run as a whole: the same config on the same machine gives the same numbers. Saves to and loads from JSON.

    Every field has a default; what cannot be is refused when the config is made, naming the field.

    Attributes:
        model: A built-in network, or "module:function", your own, which is called with its width.
        width: The width of the network.
        base_width: The width that settings are tuned at; None: the built-in network's usual one.
        model_options: More keyword arguments of the network.
        roles: Roles of parameters that no known module owns, by name.
        output: Where the network returns several things, the name of its output: a key, an attribute or a number.
        class_dim: The dimension of an output with positions that holds the classes. None: the last one; with a loss of
            your own, the one that the shapes of output and targets show.
        data: A data set by name, a text file or token numbers (.npy), or "module:function", your own. "": the built-in
            network's usual one.
        data_options: More keyword arguments of the data set.
        samples: Number of training samples, the same ones at every seed; None: all.
        test_samples: Number of test samples; None: all.
        augment: Augmentations by name, in their order.
        loss: "cross-entropy", "mse", or "module:function", your own, called with outputs and targets. "mse" is half the
            sum of squares to the targets, of classes to one-hot minus 1 / classes; mean over samples and positions.
        label_smoothing: Label smoothing, from 0 to below 1.
        method: Any of ``mukron.optim.SPECS``, or a variant such as "shampoo:1/4".
        method_options: Options of the method, those in its record.
        scheme: "mup", "sp", "ntk" or "uniform:R".
        output_exponent: The exponent b of the output weights instead of the scheme's: a number, or "zero".
        decay: How learning rate times weight decay follows the width: "constant", "1/width" or an exponent.
        base_depth: The depth that settings are tuned at; ``model_options`` then say the network's own, ``depth``. A
            built-in network multiplies its residual branches by base depth / depth. None: no laws of depth.
        embedding_lr: An exponent: embeddings' learning rates are multiplied by that power of their growth.
        damping: A damping rule, or a number, which means the method's own rule; None: the method's default.
        lr: The learning rate.
        schedule: "constant", "cosine", "linear", or "step:60,120": times 0.2 at the start of these epochs.
        warmup: Epochs in which the learning rate rises to its value.
        momentum: Momentum: on the gradient beside a trust, on the update without one; for AdamW its beta1.
        weight_decay: A step shrinks each weight by the learning rate times this.
        clip_norm: The largest norm of the whole gradient, in units of the plan (at the base width, the plain norm);
            None: no limit.
        epochs: Number of epochs.
        batch: Batch size; None: all samples in one batch, 32 windows of a text.
        seed: Seed of the initial weights, the order of samples, augmentations, dropout and K-FAC's draws.
        dtype: "float32", "float64", "tf32" (float32 weights, faster products on a GPU) or "bfloat16" (float32 weights,
            autocast).
        device: A device of torch.
        compile: Compile the network.
        sharding: What each of several processes holds: "ddp", the whole network; "fsdp", a part of each weight.
        record: What is measured on the way: "features", "distance", "spectra", "rates", "words".
        record_every: Epochs between two measurements.
        evaluate_every: Epochs between two evaluations on the test samples; the last epoch is always evaluated.

    Example:
        >>> RunConfig(method="shampoo", width=1024).replace(lr=0.5).lr
        0.5
    """

    model: str = "mlp"
    width: float = 256
    base_width: float | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None
    class_dim: int | None = None
    data: str = ""
    data_options: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    test_samples: int | None = None
    augment: tuple[str, ...] = ()
    loss: str = "cross-entropy"
    label_smoothing: float = 0.0
    method: str = "kfac"
    method_options: Mapping[str, Any] = field(default_factory=dict)
    scheme: str = "mup"
    output_exponent: str | None = None
    decay: str = "constant"
    embedding_lr: str = "0"
    base_depth: int | None = None
    damping: Rule | None = None
    lr: float = 0.01
    schedule: str = "constant"
    warmup: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = None
    epochs: int = 20
    batch: int | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    compile: bool = False
    sharding: str = "ddp"
    record: tuple[str, ...] = ()
    record_every: int = 1
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        problems = []
        for name, reader in READERS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, reader(value))
            except (ValueError, TypeError, ArithmeticError) as error:
                problems.append(f"{name}={read.shown(value)}: {error}")
        if not problems and not self.data:
            object.__setattr__(self, "data", USUAL_DATA if ":" in self.model else get_model(self.model).data)
        if not problems and isinstance(self.damping, float) and self.spec.damping is not None:
            rule: Any = type(self.spec.damping)
            object.__setattr__(self, "damping", rule(self.damping))
        problems = problems or list(_read_method_options(self)) or list(_contradictions(self))
        if problems:
            raise RunError("; ".join(problems))

    @property
    def spec(self) -> MethodSpec:
        """The record of the method; a variant such as "shampoo:1/4" has that of its family."""
        return spec_of(self.method)

    @property
    def weights_dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return DTYPES[self.dtype]

    def replace(self, **changes: Any) -> RunConfig:
        """Return the same config with other values in some fields.

        Args:
            changes: The new values by field.
        """
        _check_names(changes, "RunConfig.replace")
        return dataclasses.replace(self, **changes)

    def trusted(self, trust: bool = True) -> RunConfig:
        """Return the same config, whose functions are imported although a file names them.

        ``load`` and ``from_dict`` read data that anybody may have written. A "module:function" there is kept, but
        whatever would import it raises an ``UntrustedError``.

        Args:
            trust: False: only check that no function is named by a file.

        Raises:
            UntrustedError: A file names functions, and ``trust`` is False.
        """
        functions = {name: path for name in NAMED_BY if isinstance(path := getattr(self, name), FileFunction)}
        if functions and not trust:
            raise UntrustedError(functions)
        return self.replace(**{name: str(path) for name, path in functions.items()})

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """By field, this config's value and the other's, as JSON has them.

        Args:
            other: Another config.
        """
        ours, theirs = {**LATER, **self.to_dict()}, {**LATER, **other.to_dict()}
        return {name: (ours[name], theirs[name]) for name in ours if _json(ours[name]) != _json(theirs[name])}

    @property
    def plan_options(self) -> dict[str, Any]:
        """What ``parametrize`` is told beside the network and its base shapes."""
        return {name: getattr(self, name) for name in ("scheme", "output_exponent", "decay", "embedding_lr")}

    def key(self, without: Collection[str] = ()) -> str:
        """A short name of the content, or of all but some fields: equal configs have equal keys, here and elsewhere.

        Args:
            without: Fields that do not count.
        """
        content = _json({name: value for name, value in self.to_dict().items() if name not in without})
        return hashlib.sha256(content.encode()).hexdigest()[:10]

    def to_dict(self) -> Data:
        """Return the config as plain data for JSON."""
        content = {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}
        content = {name: value for name, value in content.items() if name not in LATER or value != LATER[name]}
        return stamp(KIND, VERSION, content)

    @classmethod
    def from_dict(cls, data: object, source: str = "run config", *, trust: bool = False) -> RunConfig:
        """Read plain data. Fields that are missing take their defaults, so that a file written by hand may be short.

        Args:
            data: The fields by name.
            source: Names the data in errors.
            trust: Whether "module:function" in the data may be imported; otherwise ``trusted`` allows it later.
        """
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
        for name in NAMED_BY if not trust else ():
            path = fields.get(name)
            if isinstance(path, str) and ":" in path and not isinstance(path, FileFunction):
                fields[name] = FileFunction(path, source)
        return cls(**fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config as JSON.

        Args:
            path: The path of the JSON file.
        """
        write_json(path, self.to_dict(), seal=False)  # it may be edited

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunConfig:
        """Read a config from a JSON file.

        Args:
            path: The path of the JSON file.
        """
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
        return _unpickled, (self.to_dict(),)


def _unpickled(data: Data) -> RunConfig:
    return RunConfig.from_dict(data, trust=True)  # a FileFunction stays one


def _read_method_options(config: RunConfig) -> Iterator[str]:
    """The method's own arguments, each as its option reads it; says what is wrong with them."""
    known, options = config.spec.known_options, dict(config.method_options)
    for name, value in options.items():
        is_option = name in known and (name == "class_dim" or (name == "likelihood" and ":" in config.loss))
        if (name in READERS or name in SAID_BY_FIELDS) and not is_option:
            yield f"method_options: {name!r} is said by the field {SAID_BY_FIELDS.get(name, name)}"
        elif name in MOVED and "trust" in known:
            yield f"method_options: {config.method} has no {name!r}; say {OPTIONS_NOW[name]}, in Python {MOVED[name]}"
        elif name not in known:
            nearest = read.nearest(name, known)
            yield f"method_options: {config.method} has no {name!r}{nearest}; known: {', '.join(known)}"
        else:
            try:
                options[name] = known[name].read(value)
            except ValueError as error:
                yield f"method_options: {name}={read.shown(value)}: {error}"
    object.__setattr__(config, "method_options", MappingProxyType(options))


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Fields that are right each by itself but not together."""
    if ":" in config.model and config.base_width is None:
        yield f"model={config.model!r}: a network of your own needs base_width, the width that settings are tuned at"
    if config.scheme == SP.name and config.output_exponent is not None:
        yield 'output_exponent: scheme="sp" leaves the initial weights as drawn; use scheme="mup" or "ntk"'
    if config.warmup > config.epochs:
        yield f"warmup={config.warmup:g}: longer than the run's {config.epochs} epochs"
    spec = config.spec
    if config.damping is not None and spec.damping is None:
        yield f"damping: {config.method} has none; it is for second-order methods"
    if isinstance(config.damping, Heuristic) and {factor.name for factor in spec.method.damped} != {"A", "B"}:
        yield f"damping: the heuristic balances A against B, which {config.method} does not have; it is for kfac alone"
    if config.label_smoothing and ":" in config.loss:
        yield f"label_smoothing: {config.loss!r} is a loss of your own; smooth the labels there"
    for name in ("samples", "test_samples", "seed"):
        if name in config.data_options:
            yield f"data_options: {name!r} is said by fields of the run"
    options = config.method_options
    if config.class_dim is not None and options.get("class_dim") not in (None, config.class_dim):
        yield f"class_dim={config.class_dim}, but method_options: class_dim={options['class_dim']}; say it once"
    if config.base_depth is not None:
        depth = config.model_options.get("depth")
        if isinstance(depth, bool) or not isinstance(depth, int):
            yield f"base_depth={config.base_depth}: say the network's own depth too, model_options.depth"
        if "base_depth" in config.model_options:
            yield "base_depth: say it once, not in model_options too"
    if options.get("nesterov") and not config.momentum:
        yield "method_options: nesterov=True needs momentum above 0"
    if options.get("fused") and config.clip_norm is not None:
        yield "method_options: fused=True leaves no gradients to clip; bound the step by trust, or drop one of the two"
    factors, inverses = options.get("factor_every", 1), options.get("inverse_every") or options.get("factor_every", 1)
    if inverses % factors:
        yield f"method_options: inverse_every={inverses} must be a multiple of factor_every={factors}"


def _check_names(fields: Mapping[str, Any], source: str) -> None:
    for name in fields:
        if name not in READERS:
            known = ", ".join(READERS)
            raise RunError(f"{source}: a run has no field {name!r}{read.nearest(name, READERS)}; its fields: {known}")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Rule):
        return value.plain()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
