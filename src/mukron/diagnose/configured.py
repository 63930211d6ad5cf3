"""The coordinate check of a run that a config describes: what ``mukron check`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import mukron
from mukron.curvature import layout
from mukron.data import Dataset
from mukron.diagnose.check import Check
from mukron.diagnose.readings import TOLERANCE
from mukron.diagnose.record import Started, run
from mukron.models import get_model
from mukron.optim.spec import spec_of
from mukron.params import build_without_memory, plain_width
from mukron.train import RunConfig, RunError, base_width_of, build, dataset_of, factory_of, loss_of
from mukron.train.surroundings import precision

IN_SP = 0.1  # times that where nothing is scaled and wide layers take larger steps
NOT_HERE = {
    "batch": "a check learns all its samples in one batch",
    "augment": "a check learns the same batch at every step",
    "schedule": "a check makes a few steps at one learning rate",
    "warmup": "a check makes a few steps at one learning rate",
}
TIMES = (2, 4, 8, 16)  # the base width, for a network of the user's own


def usual_rate(method: str, scheme: str) -> float:
    """A learning rate that suits a check of this method."""
    return spec_of(method).lr * (IN_SP if scheme == "sp" else 1.0)


def check_run(
    config: RunConfig,
    *,
    widths: Sequence[float] | None = None,
    seeds: int = 3,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Check:
    """The config's run at several widths and seeds (its own do not count), for a few steps on its samples in one batch.

    A config that does not say how many samples takes a few.
    """
    for name, why in NOT_HERE.items():
        if getattr(config, name) != getattr(RunConfig, name):
            raise RunError(f"{name}={getattr(config, name)!r}: {why}; leave it out of a check")
    dataset = _few(config, dataset, data_dir)
    inputs = dataset.prepare(dataset.train.inputs, config.weights_dtype)
    widths = usual_widths(config, dataset) if widths is None else widths

    def start(width: float, seed: int) -> Started:
        built = build(config.replace(width=width, seed=seed), dataset)
        if ":" in config.model:
            built.try_out(inputs, dataset.classes)
        return Started(built.model, built.plan, built.optimizer, built.outputs, config.clip_norm)

    batch = (inputs, dataset.train.targets)
    loss = loss_of(config, dataset.classes)
    with precision(config.dtype):
        record = run(start, batch, loss, widths=widths, seeds=range(seeds), steps=steps, progress=progress)
    setting = f"lr {config.lr:g}, {config.data} ({len(dataset.train)} samples), base width {base_width_of(config):g}"
    about = {"config": config.to_dict(), "mukron": mukron.__version__, "torch": torch.__version__}
    return Check(replace(record, setting=setting, about=about), tolerance)


def _few(config: RunConfig, dataset: Dataset | None, data_dir: str | Path | None) -> Dataset:
    if config.samples is not None:
        return dataset_of(config, dataset, data_dir)
    few = config.spec.samples
    if dataset is None and ":" not in config.data:  # a large data set draws them itself
        return dataset_of(config.replace(samples=few), None, data_dir)
    whole = dataset_of(config, dataset, data_dir)
    return whole.subset(min(few, len(whole.train)))


def usual_widths(config: RunConfig, dataset: Dataset) -> list[float]:
    """The network's own, or multiples of the base width; narrower ones where the method would take too long."""
    if ":" not in config.model:
        entry = get_model(config.model)
        times = (config.base_width or entry.base_width) / entry.base_width
        widths = [plain_width(times * width) for width in entry.widths]
    else:
        assert config.base_width is not None
        widths = [plain_width(times * config.base_width) for times in TIMES]
    longest = config.spec.largest_side
    while longest is not None and _largest_side(config, dataset, widths[-1]) > longest:
        if any(width % 2 for width in widths):
            break
        widths = [plain_width(width / 2) for width in widths]
    return widths


def _largest_side(config: RunConfig, dataset: Dataset, width: float) -> int:
    model = build_without_memory(factory_of(config, dataset), width)
    known = [found for module in model.modules() if (found := layout(module)) is not None and not found.one_hot]
    return max((max(each.d_in, each.d_out) for each in known), default=0)
