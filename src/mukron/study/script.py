"""A run as a Python script with its own training loop."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from typing import Any

import mukron
from mukron.damping import Rule
from mukron.imports import import_function
from mukron.models import get_model
from mukron.theory import MUP, get_method
from mukron.train import RunConfig

LINE = 100  # characters


def script(config: RunConfig, network_options: Mapping[str, Any]) -> str:
    """The code that builds the config's network, plan and optimizer as a run does, and trains it on a ``loader``.

    network_options: the network's keyword arguments, apart from its width.
    """
    title = f"{get_method(config.method).title} at width {config.width:g}, settings of base width {config.base_width:g}"
    imports, definition = _network(config, network_options)
    lines = [f'"""{title}. ``loader`` is yours."""', "", "import torch", "from torch.nn import functional as F", ""]
    lines += ["import mukron", *imports, *_own_imports(config), *definition, ""]
    lines += [*_setup(config, by_name=not definition), *_schedule(config)]
    return "\n".join([*lines, "", *_loop(config), ""])


def _network(config: RunConfig, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The imports of ``network``, a function of the width, and its definition if the network has options."""
    module, _, name = config.model.partition(":")
    if not name:
        module, name = "mukron.models", get_model(config.model).factory.__name__
    schedule = ["from mukron.train.schedules import Schedule"] if _is_scheduled(config) else []
    if not options:
        return [f"from {module} import {name}" + ("" if name == "network" else " as network"), *schedule], []
    call = _call(f"return {name}", ["width", *_keywords(options)], indent=4)
    return [f"from {module} import {name}", *schedule], ["", "", "def network(width):", call, ""]


def _setup(config: RunConfig, by_name: bool) -> list[str]:
    roles = [f"roles={_literal(config.roles)}"] if config.roles else []
    changed = {"scheme": config.scheme} if config.scheme != MUP.name else {}
    if config.output_exponent is not None:
        changed["output_exponent"] = config.output_exponent
    width = f"{config.width!r}"
    if by_name and "width" in inspect.signature(import_function(config.model, "model")).parameters:
        width = f"width={width}"
    places = [] if config.device == "cpu" else [_literal(config.device)]
    places += ["torch.float64"] if config.dtype == "float64" else []
    return [
        f"torch.manual_seed({config.seed})",
        _call("shapes = mukron.base_shapes", ["network", f"width={config.base_width!r}", *roles]),
        f"model = network({width})",
        _call("p = mukron.parametrize", ["model", "shapes", *_keywords(changed)]),
        *([_call("model.to", places)] if places else []),
        _optimizer(config),
        *(["compiled = torch.compile(model, dynamic=False)"] if config.compile else []),
    ]


def _optimizer(config: RunConfig) -> str:
    spec = config.spec
    usual = {"momentum": 0.9} if "memory" in spec.known_options and spec.bounded(config.method_options) else {}
    keywords = {
        name: value
        for name, value in spec.keywords(config).items()
        if name in config.method_options
        or name not in spec.defaults
        or value not in (spec.defaults[name], usual.get(name))
    }
    decay = {"weight_decay": config.weight_decay} if config.weight_decay else {}
    if not spec.layerwise:
        groups = f"p.param_groups({', '.join([_literal(config.method), *_keywords({'lr': config.lr, **decay})])})"
        return _call(f"optimizer = torch.optim.{spec.optimizer.__name__}", [groups, *_keywords(keywords)])
    given = {} if config.damping is None else {"damping": config.damping}
    arguments = _keywords({"lr": config.lr, **given, **decay, **keywords})
    return _call(f"optimizer = {_named(spec.optimizer)}", ["model", "p", *arguments])


def _own_imports(config: RunConfig) -> list[str]:
    """The imports of the optimizer and of its settings' types, if these are not exported by mukron or torch."""
    spec = config.spec
    kinds: list[type] = [type(value) for value in spec.keywords(config).values() if is_dataclass(value)]
    kinds += [spec.optimizer] if spec.layerwise else []
    return [f"from {kind.__module__} import {kind.__name__}" for kind in kinds if not _is_public(kind)]


def _is_public(kind: type) -> bool:
    return getattr(mukron, kind.__name__, None) is kind


def _named(kind: type) -> str:
    return f"mukron.{kind.__name__}" if _is_public(kind) else kind.__name__


def _is_scheduled(config: RunConfig) -> bool:
    return config.schedule != "constant" or config.warmup > 0


def _schedule(config: RunConfig) -> list[str]:
    if not _is_scheduled(config):
        return []
    return [
        f"schedule, steps = Schedule.parse({_literal(config.schedule)}), {config.epochs} * len(loader)",
        "scheduler = torch.optim.lr_scheduler.LambdaLR(",
        "    optimizer,",
        f"    lambda step: schedule.factor(min(step, steps - 1), len(loader), {config.epochs}, {config.warmup}),",
        ")",
    ]


def _loop(config: RunConfig) -> list[str]:
    size = "all samples in one batch" if config.batch is None else f"batches of {config.batch}"
    augmented = f", augmented by {', '.join(config.augment)}" if config.augment else ""
    body = [f"for x, y in loader:  # {size}{augmented}: inputs, class numbers"]
    inner = []
    if config.device != "cpu":
        inner.append(f"x, y = x.to({_literal(config.device)}), y.to({_literal(config.device)})")
    inner += ["optimizer.zero_grad()", *_loss(config), "loss.backward()"]
    if config.clip_norm is not None:
        inner.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {config.clip_norm})")
    inner.append("optimizer.step()")
    if _is_scheduled(config):
        inner.append("scheduler.step()")
    body += [f"    {line}" for line in inner]
    return [f"for epoch in range({config.epochs}):", *(f"    {line}" for line in body)]


def _loss(config: RunConfig) -> list[str]:
    """The lines that compute the loss from x and y."""
    network = "compiled" if config.compile else "model"
    lines = [f"output = {network}(x)"]
    if config.dtype == "bfloat16":
        device = config.device.partition(":")[0]
        lines = [f"with torch.autocast({_literal(device)}, dtype=torch.bfloat16):", f"    output = {network}(x)"]
        lines.append("output = output.float()")
    if config.loss != "mse":
        smoothing = [f"label_smoothing={config.label_smoothing}"] if config.label_smoothing else []
        return [*lines, _call("loss = F.cross_entropy", ["output", "y", *smoothing])]
    targets = "F.one_hot(y, output.shape[1]).to(output) - 1 / output.shape[1]"
    if config.label_smoothing:
        targets = f"{1 - config.label_smoothing} * ({targets})"
    return [*lines, f"targets = {targets}", "loss = (output - targets).square().sum(1).mean() / 2"]


def _keywords(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_literal(value)}" for name, value in values.items()]


def _literal(value: Any) -> str:
    """A value as Python source: mappings as plain dicts, settings as calls of their types."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Rule):
        return _rule(value)
    if is_dataclass(value):
        settings = (f"{field.name}={_literal(getattr(value, field.name))}" for field in fields(value))
        return f"{_named(type(value))}({', '.join(settings)})"
    return json.dumps(str(value)) if isinstance(value, (str, Fraction)) else repr(value)


def _rule(rule: Rule) -> str:
    """A damping rule as Python source, without numbers that have their default value."""
    numbers = {
        field.name: (getattr(rule, field.name), field.default)
        for field in fields(rule)  # type: ignore[arg-type]
    }
    needed = [repr(number) for number, default in numbers.values() if default is MISSING]
    named = [f"{name}={number}" for name, (number, default) in numbers.items() if default not in (MISSING, number)]
    return f"mukron.{type(rule).__name__}({', '.join(needed + named)})"


def _call(function: str, arguments: list[str], indent: int = 0) -> str:
    """A call on one line, or with one argument per line if it is too long."""
    margin = " " * indent
    line = f"{margin}{function}({', '.join(arguments)})"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{margin}{function}(", *(f"{margin}    {argument}," for argument in arguments), f"{margin})"])
