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
from mukron.data import Dataset
from mukron.data.dataset import IGNORED
from mukron.imports import import_function
from mukron.models import get_model
from mukron.theory import method_title
from mukron.train import RunConfig
from mukron.train.outputs import given_class_dim

LINE = 100  # characters
CLASSES, NUMBER, NUMBERS = "classes", "number", "numbers"  # kinds of targets: of a sample
POSITIONS, MASKED, REAL_POSITIONS = "positions", "masked", "real positions"  # of a sample's positions; some ignored
REAL = (NUMBER, NUMBERS, REAL_POSITIONS)
OWN_DATA, OWN_LOSS = "own_data", "own_loss"  # what a user's functions are imported as
SCRIPT_NAMES = (  # of the script itself, which a user's network may have too
    "F DataLoader TensorDataset Schedule torch mukron load as_dataset augmentation augment network model shapes p data "
    "inputs targets loader x y counted seen output output_of loss wanted total epoch Mapping sys "
    "optimizer compiled schedule scheduler steps "
    f"{OWN_DATA} {OWN_LOSS}"
).split()


def script(
    config: RunConfig, network_options: Mapping[str, Any], targets: str = CLASSES, data_dir: str | None = None
) -> str:
    """Write the code that loads the config's data, builds its network, plan and optimizer as a run does, and trains it.

    Args:
        config: The run. Without a batch size all samples are one batch.
        network_options: The network's keyword arguments, apart from its width.
        targets: What the data's targets are, as ``kind_of_targets`` says.
        data_dir: Where data sets are kept; None: the usual folder.

    Returns:
        A Python script.

    Example:
        >>> from mukron.train import RunConfig
        >>> code = script(RunConfig(method="sgd", width=512, base_width=64), {"inputs": 64, "classes": 10})
        >>> code.splitlines()[0]
        '\"\"\"SGD at width 512, settings of base width 64.\"\"\"'
    """
    title = f"{method_title(config.method)} at width {config.width:g}, settings of base width {config.base_width:g}"
    imports, definition = _network(config, network_options)
    imports += [*_data_imports(config), *_own_imports(config)]
    imports.sort(key=lambda line: (not line.startswith("from mukron."), line))
    standard, path = _standard_imports(config)
    body = [*definition, *_output(config), "", *_data(config, data_dir), ""]
    body += [*_setup(config, targets, by_name=not definition), *_schedule(config), "", *_loop(config, targets), ""]
    torch_imports = ["import torch"]
    torch_imports += ["from torch.nn import functional as F"] if any("F." in line for line in body) else []
    torch_imports += [] if config.batch is None else ["from torch.utils.data import DataLoader, TensorDataset"]
    return "\n".join([f'"""{title}."""', "", *standard, *torch_imports, "", "import mukron", *path, *imports, *body])


def kind_of_targets(dataset: Dataset) -> str:
    """Return what a data set's targets are: class numbers of samples, or of their positions, or real numbers.

    Args:
        dataset: The data set.

    Returns:
        "classes"; "positions", or "masked" if some of them are ignored; "number" for one a sample,
        "numbers" for several, or "real positions" for those of every position.

    Example:
        >>> from mukron.data import load
        >>> kind_of_targets(load("digits"))
        'classes'
    """
    targets = dataset.train.targets
    if dataset.regression:
        return {1: NUMBER, 2: NUMBERS}.get(targets.ndim, REAL_POSITIONS)
    if targets.ndim == 1:
        return CLASSES
    return MASKED if bool((targets == IGNORED).any()) else POSITIONS


def _standard_imports(config: RunConfig) -> tuple[list[str], list[str]]:
    """The imports of the standard library; and a line by which modules of the user's own are found."""
    own = any(":" in path for path in (config.model, config.data, config.loss))
    lines = ["import sys"] if own else []
    lines += ["from collections.abc import Mapping"] if config.output is not None else []
    path = ["", 'sys.path.insert(0, "")  # modules of the current folder', ""] if own else []
    return [*lines, ""] if lines else [], path


def _network(config: RunConfig, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The imports of ``network``, a function of the width, and its definition if the network has options."""
    module, _, name = config.model.partition(":")
    if not name:
        module, name = "mukron.models", get_model(config.model).factory.__name__
    schedule = ["from mukron.train.schedules import Schedule"] if _is_scheduled(config) else []
    if not options:
        return [_import(module, name, "network"), *schedule], []
    called = f"own_{name}" if name in SCRIPT_NAMES else name
    given, arguments = dict(options), "width"
    if config.base_depth is not None:
        arguments = f"width, depth={given.pop('depth')!r}"
    keywords = [*_keywords(given), *(["depth=depth"] if config.base_depth is not None else [])]
    call = _call(f"return {called}", ["width", *keywords], indent=4)
    return [_import(module, name, called), *schedule], ["", "", f"def network({arguments}):", call, ""]


def _import(module: str, name: str, alias: str) -> str:
    return f"from {module} import {name}" + ("" if name == alias else f" as {alias}")


def _data_imports(config: RunConfig) -> list[str]:
    """The imports of the data, and of a loss of the user's own."""
    own = ":" in config.data
    names = ["as_dataset" if own else "load", *(["augmentation"] if config.augment else [])]
    lines = [f"from mukron.data import {', '.join(sorted(names))}"]
    functions = {config.data: OWN_DATA, config.loss: OWN_LOSS}
    parts = {alias: path.partition(":") for path, alias in functions.items() if ":" in path}
    return [*lines, *(_import(module, name, alias) for alias, (module, _, name) in parts.items())]


def _data(config: RunConfig, folder: str | None) -> list[str]:
    """The lines that load the data and make ``loader``."""
    given = {"samples": config.samples, "test_samples": config.test_samples}
    subset = {name: number for name, number in given.items() if number is not None}
    if ":" in config.data:
        values = f"{OWN_DATA}({', '.join(_keywords(config.data_options))})"
        call = _call("data = as_dataset", [_literal(config.data), values])
        call += f".subset({', '.join(_keywords(subset))})" if subset else ""
    else:
        place = [] if folder is None else [_literal(folder)]
        call = _call("data = load", [_literal(config.data), *place, *_keywords({**subset, **config.data_options})])
    inputs = "data.train.inputs" if config.augment else f"data.prepare({_prepared(config, 'data.train.inputs')})"
    lines = [call, f"inputs, targets = {inputs}, data.train.targets"]
    if config.batch is None:
        return [*lines, "loader = [(inputs, targets)]  # all samples in one batch"]
    batches = [f"batch_size={config.batch}", "shuffle=True", "drop_last=True"]
    return [*lines, _call("loader = DataLoader", ["TensorDataset(inputs, targets)", *batches])]


def _prepared(config: RunConfig, inputs: str) -> str:
    """The arguments of ``data.prepare``."""
    return f"{inputs}, torch.float64" if config.dtype == "float64" else inputs


def _output(config: RunConfig) -> list[str]:
    """The definition of ``output_of``, if the run names the network's output among the things that it returns."""
    name = config.output
    if name is None:
        return []
    part = f"returned[{_literal(name)}]"
    if name.isidentifier():
        part += f" if isinstance(returned, Mapping) else returned.{name}"
    elif name.isdecimal():
        part += f" if isinstance(returned, Mapping) else returned[{name}]"
    return ["", "", "def output_of(returned):", f"    return {part}", ""]


def _setup(config: RunConfig, targets: str, by_name: bool) -> list[str]:
    roles = [f"roles={_literal(config.roles)}"] if config.roles else []
    depth = [] if config.base_depth is None else [f"depth={config.base_depth}"]
    usual = RunConfig().plan_options
    changed = {name: value for name, value in config.plan_options.items() if value != usual[name]}
    width = f"{config.width!r}"
    own = by_name and ":" in config.model
    if own and "width" in inspect.signature(import_function(config.model, "model")).parameters:
        width = f"width={width}"
    places = [] if config.device == "cpu" else [_literal(config.device)]
    places += ["torch.float64"] if config.dtype == "float64" else []
    precision = ['torch.set_float32_matmul_precision("high")'] if config.dtype == "tf32" else []
    return [
        *precision,
        f"torch.manual_seed({config.seed})",
        _call("shapes = mukron.base_shapes", ["network", f"width={config.base_width!r}", *depth, *roles]),
        f"model = network({width})",
        _call("p = mukron.parametrize", ["model", "shapes", *_keywords(changed)]),
        *([_call("model.to", places)] if places else []),
        _optimizer(config, targets),
        *(["compiled = torch.compile(model, dynamic=False)"] if config.compile else []),
    ]


def _optimizer(config: RunConfig, targets: str) -> str:
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
        of_groups = {"lr": config.lr, **decay, **({"eps": keywords.pop("eps")} if "eps" in keywords else {})}
        groups = f"p.param_groups({', '.join([_literal(config.method), *_keywords(of_groups)])})"
        return _call(f"optimizer = torch.optim.{spec.optimizer.__name__}", [groups, *_keywords(keywords)])
    given = {} if config.damping is None else {"damping": config.damping}
    class_dim = _class_dim(config)
    if targets in (POSITIONS, MASKED) and class_dim is not None and "class_dim" in spec.defaults:
        keywords = {**keywords, "class_dim": class_dim}
    if targets in REAL and ":" in config.loss and "likelihood" in spec.defaults:
        keywords = {**keywords, "likelihood": config.method_options.get("likelihood", "gaussian")}
    if config.loss == "mse" and targets in (POSITIONS, MASKED, REAL_POSITIONS) and "reduction" in spec.defaults:
        keywords = {**keywords, "reduction": "positions"}
    arguments = _keywords({"lr": config.lr, **given, **decay, **keywords})
    if "output" in spec.defaults and config.output is not None:
        arguments.append("output=output_of")
    return _call(f"optimizer = {_named(spec.optimizer)}", ["model", "p", *arguments])


def _class_dim(config: RunConfig) -> int | None:
    """Where the classes are in an output with positions: the last dimension of a built-in loss, unless it is said."""
    given = given_class_dim(config)
    return -1 if given is None and ":" not in config.loss else given


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


def _loop(config: RunConfig, targets: str) -> list[str]:
    inner = []
    if config.device != "cpu":
        inner.append(f"x, y = x.to({_literal(config.device)}), y.to({_literal(config.device)})")
    if config.augment:
        inner.append(f"augment = augmentation({_literal(config.augment)}, int(torch.randint(2**31, ())), data.mean)")
        inner.append(f"x = data.prepare({_prepared(config, 'x')}, augment=augment)")
    step = ["optimizer.zero_grad()", *_forward(config), *_loss(config, targets), "loss.backward()"]
    if config.clip_norm is not None:
        step.append(f"p.clip_grad_norm_({config.clip_norm})")
    step.append("optimizer.step()")
    start, number, end = "total = 0.0", "len(loader)", "total += loss.item()"
    if targets == MASKED:  # the mean over the targets that count, of which a batch may have none
        inner.append(f"counted = int((y != {IGNORED}).sum())")
        step.append("total, seen = total + loss.item() * counted, seen + counted")
        inner += ["if counted:", *(f"    {line}" for line in step)]
        start, number, end = "total, seen = 0.0, 0", "seen", ""
    else:
        inner += step
    inner += [*(["scheduler.step()"] if _is_scheduled(config) else []), *([end] if end else [])]
    body = [start, "for x, y in loader:", *(f"    {line}" for line in inner)]
    body.append(f'print(f"epoch {{epoch + 1}}: loss {{total / {number}:.4g}}")')
    return [f"for epoch in range({config.epochs}):", *(f"    {line}" for line in body)]


def _forward(config: RunConfig) -> list[str]:
    """The lines that compute the output from x."""
    call = f"{'compiled' if config.compile else 'model'}(x)"
    if config.output is not None:
        call = f"output_of({call})"
    if config.dtype != "bfloat16":
        return [f"output = {call}"]
    device = config.device.partition(":")[0]
    lines = [f"with torch.autocast({_literal(device)}, dtype=torch.bfloat16):", f"    output = {call}"]
    return [*lines, "output = output.float()"]


def _loss(config: RunConfig, targets: str) -> list[str]:
    """The lines that compute the loss from the output and y."""
    if ":" in config.loss:
        return [f"loss = {OWN_LOSS}(output, y)"]
    class_dim, positions = _class_dim(config), targets in (POSITIONS, MASKED)
    moved = positions and class_dim != -1
    if config.loss != "mse":
        output = f"output.movedim({class_dim}, -1)" if moved else "output"
        pair = [f"{output}.flatten(0, -2)", "y.flatten()"] if positions else ["output", "y"]
        smoothing = [f"label_smoothing={config.label_smoothing}"] if config.label_smoothing else []
        return [_call("loss = F.cross_entropy", [*pair, *smoothing])]
    if targets in REAL:
        wanted = "y[:, None]" if targets == NUMBER else "y"
        return [f"loss = (output - {wanted}.to(output)).square().sum(-1).mean() / 2"]
    masked = targets == MASKED
    labels = "y.clamp(min=0)" if masked else "y"
    wanted = f"F.one_hot({labels}, output.shape[-1]).to(output) - 1 / output.shape[-1]"
    if config.label_smoothing:
        wanted = f"{1 - config.label_smoothing} * ({wanted})"
    lines = [f"output = output.movedim({class_dim}, -1)"] if moved else []
    chosen = f"[y != {IGNORED}]" if masked else ""
    return [*lines, f"wanted = {wanted}", f"loss = (output - wanted).square().sum(-1){chosen}.mean() / 2"]


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
