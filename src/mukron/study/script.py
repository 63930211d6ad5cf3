"""A run as a Python script, for a loop of the user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from mukron.curvature import parse_memory
from mukron.damping import Rule
from mukron.imports import import_function
from mukron.models import get_model
from mukron.theory import MUP, get_method
from mukron.train import RunConfig
from mukron.train.build import SECOND_ORDER
from mukron.train.config import FIRST_ORDER

LINE = 100


def script(config: RunConfig, network_options: Mapping[str, Any]) -> str:
    """The code that builds the config's network, plan and optimizer as a run does, and trains it on a ``loader``.

    network_options: the network's keyword arguments beside its width.
    """
    title = f"{get_method(config.method).title} at width {config.width:g}, settings of base width {config.base_width:g}"
    imports, definition = _network(config, network_options)
    lines = [f'"""{title}. ``loader`` is yours."""', "", "import torch", "from torch.nn import functional as F", ""]
    lines += ["import mukron", *imports, *definition, "", *_setup(config, by_name=not definition), *_schedule(config)]
    return "\n".join([*lines, "", *_loop(config), ""])


def _network(config: RunConfig, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """How ``network``, a function of the width, is imported, and defined where it has options."""
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
    options: dict[str, Any] = dict(config.method_options)
    decay = {"weight_decay": config.weight_decay} if config.weight_decay else {}
    momentum = {"momentum": config.momentum} if config.momentum else {}
    if config.method in FIRST_ORDER:
        groups = f"p.param_groups({', '.join([_literal(config.method), *_keywords({'lr': config.lr, **decay})])})"
        if config.method == "sgd":
            return _call("optimizer = torch.optim.SGD", [groups, *_keywords({**momentum, **options})])
        betas = (config.momentum, options.pop("beta2", 0.999))
        return _call("optimizer = torch.optim.AdamW", [groups, *_keywords({"betas": betas, **options})])
    written = {} if config.damping is None else {"damping": _rule(config.damping)}
    if "memory" in options:
        written["memory"] = f"mukron.{parse_memory(options.pop('memory'))!r}"
    if config.kl_clip is not None:
        options["kl_clip"] = config.kl_clip
    if config.method == "kfac" and config.loss == "mse":
        options["likelihood"] = "gaussian"
    if config.method == "kfac" and config.seed:
        options["seed"] = config.seed
    if exponent := config.method.partition(":")[2]:
        options["e"] = exponent
    arguments = [*_keywords({"lr": config.lr}), *(f"{name}={text}" for name, text in written.items())]
    arguments += _keywords({**momentum, **decay, **options})
    return _call(f"optimizer = mukron.{SECOND_ORDER[config.family].__name__}", ["model", "p", *arguments])


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
    fallback_lr = config.method_options.get("fallback_lr")
    if _is_scheduled(config) and fallback_lr is not None:
        inner += [
            "for group in optimizer.param_groups:",
            f'    group["fallback_lr"] = {fallback_lr} * group["lr"] / {config.lr}',
        ]
    inner += ["optimizer.zero_grad()", *_loss(config), "loss.backward()"]
    if config.clip_norm is not None:
        inner.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {config.clip_norm})")
    inner.append("optimizer.step()")
    if _is_scheduled(config):
        inner.append("scheduler.step()")
    body += [f"    {line}" for line in inner]
    return [f"for epoch in range({config.epochs}):", *(f"    {line}" for line in body)]


def _loss(config: RunConfig) -> list[str]:
    """From x and y to the loss, as a run has it."""
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
    """JSON data as Python writes it; what a config keeps frozen, as a plain dict."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(each)}" for name, each in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _rule(rule: Rule) -> str:
    """With its numbers, and those that have a default only where they are others."""
    numbers = {each.name: (getattr(rule, each.name), each.default) for each in fields(rule)}  # type: ignore[arg-type]
    needed = [repr(number) for number, default in numbers.values() if default is MISSING]
    named = [f"{name}={number}" for name, (number, default) in numbers.items() if default not in (MISSING, number)]
    return f"mukron.{type(rule).__name__}({', '.join(needed + named)})"


def _call(function: str, arguments: list[str], indent: int = 0) -> str:
    """On one line, or one argument a line."""
    margin = " " * indent
    line = f"{margin}{function}({', '.join(arguments)})"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{margin}{function}(", *(f"{margin}    {each}," for each in arguments), f"{margin})"])
