"""The coordinate check of a run configuration, as ``mukron check`` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mukron
from mukron.data import Dataset, option_names
from mukron.diagnose.branches import BranchCheck, check_branches
from mukron.diagnose.check import Check, is_clear
from mukron.diagnose.depth import DepthCheck, depth_check
from mukron.diagnose.readings import EXPONENT_TOLERANCE
from mukron.diagnose.record import TrainingSetup
from mukron.diagnose.runs import record_runs, suitable_rate
from mukron.layers import MatrixLayer, layer_of
from mukron.models import MODELS, get_model
from mukron.optim.options import Trust
from mukron.optim.spec import spec_of
from mukron.params import base_shapes, build_without_memory, parametrize, plain_width
from mukron.train import RunConfig, RunError, base_width_of, build, dataset_of, factory_of, loss_of
from mukron.train.build import optimizer_of
from mukron.train.outputs import output_of
from mukron.train.surroundings import precision

SP_FACTOR = 0.1  # for SP, where learning rates are not scaled and wide layers take larger steps
UNSUPPORTED = {
    "batch": "a check learns all its samples in one batch",
    "augment": "a check learns the same batch at every step",
    "schedule": "a check makes a few steps at one learning rate",
    "warmup": "a check makes a few steps at one learning rate",
}
MULTIPLES = (2, 4, 8, 16)  # of the base width, for a network of the user's
FEW_ROWS = 16  # samples x positions, where samples have positions: fewer than the narrowest layers have features


def usual_rate(method: str, scheme: str) -> float:
    """Return a learning rate that suits a coordinate check.

    Args:
        method: The name of the method.
        scheme: The name of the parametrization.

    Returns:
        The learning rate.

    Example:
        >>> from mukron.diagnose.configured import usual_rate
        >>> usual_rate("kfac", "mup")
        0.01
    """
    return spec_of(method).lr * (SP_FACTOR if scheme == "sp" else 1.0)


def with_plain_step(config: RunConfig) -> RunConfig:
    """Return a configuration whose steps have no bound, unless it says which they have.

    Theory is about the plain step, and a bound would hide a layer whose steps grow or vanish.

    Args:
        config: The configuration.

    Returns:
        The configuration with ``trust`` among its method's options, for methods that have it.

    Example:
        >>> from mukron.diagnose.configured import with_plain_step
        >>> from mukron.train import RunConfig
        >>> dict(with_plain_step(RunConfig()).method_options)
        {'trust': 'none'}
    """
    if "trust" not in config.spec.known_options or "trust" in config.method_options:
        return config
    return config.replace(method_options={**config.method_options, "trust": "none"})


def check_run(
    config: RunConfig,
    *,
    widths: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int = 3,
    calibrate: bool = False,
    tolerance: float = EXPONENT_TOLERANCE,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Check:
    """Check a run configuration at several widths and seeds, for a few steps with all its samples in one batch.

    Args:
        config: The configuration; its width, seed and number of epochs are not used. If it does not give the number of
            samples, a few are taken.
        widths: The widths to compare; by default those that are usual for the network.
        seeds: The number of seeds. None: as many as the verdict needs, from three to eight.
        steps: The number of steps of every run.
        calibrate: Whether the learning rate is lowered until the first steps are small at the narrowest width.
        tolerance: The largest exponent that still counts as zero.
        dataset: The data set; by default the one that the configuration names.
        data_dir: The folder of the data sets.
        progress: Called with the number of runs that are done, the number of all runs as far as it is known, and what
            is run next with an estimate of the time that is left.

    Returns:
        The check, with verdicts on every layer.

    Raises:
        RunError: The configuration has a setting that a check cannot use, such as a schedule.

    Example:
        >>> from mukron.diagnose.configured import check_run
        >>> from mukron.train import RunConfig
        >>> check = check_run(RunConfig(method="sgd", lr=0.1, samples=8), widths=(128, 256), seeds=1, steps=1)
        >>> check.record.widths
        (128, 256)
    """
    for name, why in UNSUPPORTED.items():
        if getattr(config, name) != getattr(RunConfig, name):
            raise RunError(f"{name}={getattr(config, name)!r}: {why}; leave it out of a check")
    dataset = _small_dataset(config, dataset, data_dir)
    inputs = dataset.prepare(dataset.train.inputs, config.weights_dtype)
    widths = usual_widths(config, dataset) if widths is None else widths

    def start(width: float, seed: int, lr: float | None = None) -> TrainingSetup:
        changes = {"width": width, "seed": seed, **({} if lr is None else {"lr": lr})}
        built = build(config.replace(**changes), dataset)
        built.try_out(inputs, dataset)
        return TrainingSetup(built.model, built.plan, built.optimizer, built.outputs, config.clip_norm)

    batch = (inputs, dataset.train.targets)
    loss = loss_of(config, dataset)
    with precision(config.dtype):
        if calibrate:
            lr = suitable_rate(lambda lr: start(min(widths), 0, lr), batch, loss, config.lr, steps)
            config = config.replace(lr=lr)
        record = record_runs(
            start,
            batch,
            loss,
            widths=widths,
            seeds=None if seeds is None else range(seeds),
            steps=steps,
            clear=lambda record: is_clear(record, tolerance),
            progress=progress,
        )
    setting = f"lr {config.lr:g}, {config.data} ({len(dataset.train)} samples), base width {base_width_of(config):g}"
    if "trust" in config.spec.known_options:
        trust = Trust.of(config.spec.all_options(config.method_options)["trust"])
        setting = f"trust {'none' if trust is None else trust.text}, {setting}"
    about = {"config": config.to_dict(), "mukron": mukron.__version__, "torch": torch.__version__}
    return Check(replace(record, setting=setting, about=about), tolerance)


def check_depths(
    config: RunConfig,
    *,
    base_depth: int,
    depths: Sequence[int] | None = None,
    seeds: int = 3,
    steps: int = 1,
    calibrate: bool = False,
    tolerance: float = EXPONENT_TOLERANCE,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
) -> tuple[BranchCheck, DepthCheck]:
    """Check a run configuration at several depths: its residual branches, and how features change with depth.

    The network is called with ``depth``, and a built-in one also with ``base_depth``, which multiplies its branches.

    Args:
        config: The configuration; its width, seed and number of epochs are not used.
        base_depth: The depth that settings are tuned at.
        depths: The depths to compare; by default 1, 2, 4, 8 and 16 times the base depth.
        seeds: The number of seeds at each depth.
        steps: The number of steps of every run.
        calibrate: Whether the learning rate is lowered until the first steps are small at the base depth.
        tolerance: The largest deviation of an exponent that passes.
        dataset: The data set; by default the one that the configuration names.
        data_dir: The folder of the data sets.

    Returns:
        Whether branches are multiplied by 1/L, and the exponents of all changes.

    Raises:
        RunError: The built-in network has no blocks whose number can grow.

    Example:
        >>> from mukron.diagnose.configured import check_depths
        >>> from mukron.train import RunConfig
        >>> config = RunConfig(model="resmlp", method="sgd", lr=0.1, samples=8)
        >>> branches, features = check_depths(config, base_depth=2, depths=(2, 4), seeds=1)
        >>> branches.ok, features.depths
        (True, (2, 4))
    """
    if ":" not in config.model and "base_depth" not in signature(get_model(config.model).factory).parameters:
        known = [name for name, model in MODELS.items() if "base_depth" in signature(model.factory).parameters]
        raise RunError(f"model={config.model!r} has no residual blocks whose number can grow; {', '.join(known)} have")
    dataset = _small_dataset(config, dataset, data_dir)
    inputs, targets = dataset.prepare(dataset.train.inputs, config.weights_dtype), dataset.train.targets
    width, mean_loss = base_width_of(config), loss_of(config, dataset)

    def factory(width: float, depth: int) -> nn.Module:
        multiplied = {} if ":" in config.model else {"base_depth": base_depth}
        options = {**config.model_options, "depth": depth, **multiplied}
        return factory_of(config.replace(model_options=options), dataset)(width)

    def loss(output: Any, targets: Tensor) -> Tensor:
        return mean_loss(output_of(config, output), targets)

    def start(lr: float) -> TrainingSetup:
        torch.manual_seed(0)
        model = factory(width, base_depth).to(inputs.device)
        plan = parametrize(model, shapes, config.scheme)
        optimizer = optimizer_of(config.replace(lr=lr), model, plan, dataset)
        return TrainingSetup(model, plan, optimizer, lambda inputs: output_of(config, model(inputs)))

    roles = dict(config.roles)
    shapes = base_shapes(factory, width, depth=base_depth, roles=roles)
    sizes: dict[str, Any] = {"base_width": width, "base_depth": base_depth, "roles": roles, "tolerance": tolerance}
    with precision(config.dtype):
        branches = check_branches(factory, inputs, **sizes)
        if calibrate:
            config = config.replace(lr=suitable_rate(start, (inputs, targets), mean_loss, config.lr, steps))
        features = depth_check(
            factory,
            lambda model, plan: optimizer_of(config, model, plan, dataset),
            (inputs, targets),
            depths=depths,
            seeds=seeds,
            steps=steps,
            scheme=config.scheme,
            loss=loss,
            progress=False,
            **sizes,
        )
    return branches, features


def _small_dataset(config: RunConfig, dataset: Dataset | None, data_dir: str | Path | None) -> Dataset:
    if config.samples is not None:
        return dataset_of(config, dataset, data_dir)
    samples = config.spec.samples
    if dataset is None and ":" not in config.data and "length" in option_names(config.data):  # a text
        short = {"length": FEW_ROWS, **config.data_options}
        return _few_rows(dataset_of(config.replace(data_options=short), None, data_dir), samples)
    if dataset is None and ":" not in config.data:  # a large data set reads only these
        return dataset_of(config.replace(samples=samples), None, data_dir)
    return _few_rows(dataset_of(config, dataset, data_dir), samples)


def _few_rows(dataset: Dataset, samples: int) -> Dataset:
    """Return a few samples: one, if each has many positions."""
    positions = dataset.train.targets[0].numel() if not dataset.regression and len(dataset.train) else 1
    samples = max(1, FEW_ROWS // positions) if positions > 1 else samples
    return dataset.subset(min(samples, len(dataset.train)))


def usual_widths(config: RunConfig, dataset: Dataset) -> list[float]:
    """Return the usual widths of the network, or multiples of the base width; narrower ones for a slow method."""
    if ":" not in config.model:
        entry = get_model(config.model)
        multiple = (config.base_width or entry.base_width) / entry.base_width
        widths = [plain_width(multiple * width) for width in entry.widths]
    else:
        assert config.base_width is not None
        widths = [plain_width(multiple * config.base_width) for multiple in MULTIPLES]
    longest = config.spec.largest_side
    while longest is not None and _largest_side(config, dataset, widths[-1]) > longest:
        if any(width % 2 for width in widths):
            break
        widths = [plain_width(width / 2) for width in widths]
    return widths


def _largest_side(config: RunConfig, dataset: Dataset, width: float) -> int:
    model = build_without_memory(factory_of(config, dataset), width)
    layers = [layer for layer in map(layer_of, model.modules()) if isinstance(layer, MatrixLayer) and not layer.one_hot]
    return max((max(layer.d_in, layer.d_out) for layer in layers), default=0)
