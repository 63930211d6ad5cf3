"""The cost of training a network: its memory, counted before anything is built, and a measured step.

A step is measured in a separate process, as in the benchmarks, so that its peak memory is not mixed with other memory.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mukron.bench.memory import peak, reset_peak
from mukron.data import Dataset, Split
from mukron.imports import current_folder_after_python
from mukron.layers import MatrixLayer, layer_of
from mukron.optim import SecondOrder
from mukron.optim.options import StepOptions, Trust
from mukron.optim.places import other_uses, places_of
from mukron.optim.shapes import counting_positions
from mukron.optim.sizes import LayerSize
from mukron.optim.transaction import is_due
from mukron.params.inventory import clean_name, inventory
from mukron.table import Table, bytes_
from mukron.theory import method_title
from mukron.train import RunConfig, base_width_of, build, device_of
from mukron.train.randomness import own_random_numbers
from mukron.workers.foreman import SAFE_PATH

SMALL_LR = 1e-6  # the weights must stay finite; their values do not matter
TRIED = 8  # samples of a test run through the network
WARM_UP = 2  # steps at the start that refresh: the first is slower than others, the second is timed
LEAST_SECONDS, MOST_STEPS = 2.0, 30  # more steps are measured up to this time or number: a median of few is noisy
ENOUGH_SECONDS = 20.0  # no further steps are measured after this time
TIME_LIMIT = 300.0  # seconds for the process that measures one method
MEASURE = SAFE_PATH + "from mukron.study.cost import measure_here; measure_here()"


@dataclass(frozen=True)
class TrainingMemory:
    """The memory that training needs, in bytes, counted without building the network."""

    parameters: int  # the number of parameters
    weights: int
    gradients: int
    moments: int  # momentum, or Adam's two moments
    factors: int  # curvature factors and their inverses, in the form that the optimizer uses for this batch size
    work: int  # an estimate of activations and temporary copies within a step

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.factors + self.work


@dataclass(frozen=True)
class StepCost:
    """The measured cost of one method's step."""

    method: str
    seconds: float
    memory: float  # peak memory in bytes, beyond what torch itself uses
    layers: Table | None = None  # the optimizer's ``plan()``, for a second-order one

    def row(self, base: StepCost) -> tuple[str, ...]:
        shown = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"
        time_, memory = self.seconds / base.seconds, self.memory / max(base.memory, 1)
        return (self.method, shown, f"{time_:.2f}", bytes_(self.memory), f"{memory:.2f}")


class SharedLayer(NamedTuple):
    """A layer, and others that use its weight, by name."""

    layer: MatrixLayer
    others: Mapping[str, MatrixLayer] = MappingProxyType({})

    @property
    def heads(self) -> dict[str, MatrixLayer]:
        """The heads that are tied to it, if it is an embedding: they use the transposed weight."""
        return {name: other for name, other in self.others.items() if self.layer.one_hot and not other.one_hot}


class TimedStep(NamedTuple):
    """One step: its time and the work it did."""

    seconds: float
    work: str  # "refresh": factors and inverses, "measure": factors alone, "apply": neither


# Memory.


def _positions(config: RunConfig, dataset: Dataset) -> Mapping[str, int]:
    """How many positions of a sample share each layer's weight, counted in a forward pass at the base width.

    Those of a head that is tied to an embedding have its own name: they are no rows of the embedding's.
    """
    assert config.base_width is not None
    with own_random_numbers(device_of(config)):
        built = build(config.replace(width=config.base_width, compile=False), dataset)
        layers = _layers(config, built.model)
        places = {name: (shared.layer, dict[str, str]()) for name, shared in layers.items()}
        x = dataset.prepare(dataset.train.inputs[:TRIED], config.weights_dtype)
        with counting_positions(built.model, places, {n: shared.others for n, shared in layers.items()}) as positions:
            built.try_out(x, dataset)
    return positions


def _layers(config: RunConfig, model: nn.Module) -> dict[str, SharedLayer]:
    """The layers that a second-order method preconditions; all that have a layout, for other methods."""
    if config.spec.layerwise:
        given = config.spec.all_options(config.method_options)
        method = config.spec.method
        named = {name: given.get(name) for name in ("exclude", "block", "split")}
        options = StepOptions.of(method, Trust.of(given.get("trust")), **named)
        captures = bool(config.spec.captures) or bool(given.get("fused"))
        places = places_of(model, set(inventory(model)), options, method, captures=captures)
        others = other_uses(model, places) if captures else {}
        return {name: SharedLayer(layer, others.get(name, {})) for name, (layer, _) in places.items()}
    named = {clean_name(name): layer_of(module) for name, module in model.named_modules()}
    return {name: SharedLayer(known) for name, known in named.items() if isinstance(known, MatrixLayer)}


def training_memory(config: RunConfig, network: nn.Module, dataset: Dataset, batch: int) -> TrainingMemory:
    """Count the memory that training takes; ``network`` is the config's, and may be on the meta device."""
    positions, spec = _positions(config, dataset), config.spec
    options = {**spec.all_options(config.method_options), **spec.variant(config.method)}
    numbers = sum(parameter.numel() for parameter in network.parameters())
    factors = activations = 0
    for name, shared in _layers(config, network).items():
        known, heads = shared.layer, shared.heads
        sizes = (known.d_in, known.d_out, known.groups, known.one_hot, bool(heads))
        factors += spec.state_size(LayerSize(*sizes, batch, positions.get(name, 1), dataset.classes), options)
        for use, layer in {name: known, **heads}.items():
            activations += batch * positions.get(use, 1) * (layer.d_out + (0 if layer.one_hot else layer.d_in))
    moments = spec.moments(config)
    size = config.weights_dtype.itemsize
    work = 2 * numbers + factors + 4 * activations
    return TrainingMemory(numbers, *(size * count for count in (numbers, numbers, moments * numbers, factors, work)))


def available_memory(device: str) -> int:
    """Return the number of free bytes on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 2**10 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except OSError:  # not Linux: half of the total memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# Measured steps.


class MeasuringError(Exception):
    """A step could not be measured; the message says why."""


def measured(config: RunConfig, dataset: Dataset, batch: int, steps: int) -> tuple[StepCost, ...]:
    """Measure a step of the method and one of SGD, on one batch of the run's data."""
    # clones, since a view would pickle the whole data set
    few = Split(dataset.train.inputs[:batch].clone(), dataset.train.targets[:batch].clone())
    data = replace(dataset, train=few, test=few).to("cpu")
    measured_config = timed_config(config)
    sgd = measured_config.replace(method="sgd", method_options={}, damping=None)
    cost = _measure_in_process(sgd, data, steps)  # first, since it is faster: if it fails, so does the method
    return (cost,) if config.method == "sgd" else (_measure_in_process(measured_config, data, steps), cost)


def timed_config(config: RunConfig) -> RunConfig:
    """Return the run whose steps are timed: two refreshes at the start, then steps as its intervals have them."""
    options = dict(config.method_options)
    if "refresh_warmup" in config.spec.known_options:
        options |= {"refresh_warmup": WARM_UP, "start": 0}
    return config.replace(lr=SMALL_LR, compile=False, method_options=options)


def _measure_in_process(config: RunConfig, dataset: Dataset, steps: int) -> StepCost:
    """Measure in a separate process, with the same module search path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(current_folder_after_python(sys.path))}
    command, work = [sys.executable, "-c", MEASURE], pickle.dumps((config, dataset, steps))
    what = f"a step of {method_title(config.method)} at width {config.width:g}"
    try:
        done = subprocess.run(
            command, input=work, capture_output=True, check=False, timeout=TIME_LIMIT, env=environment
        )
    except subprocess.TimeoutExpired:
        raise MeasuringError(f"{what} was not done after {TIME_LIMIT:g} seconds; plan it on a faster machine") from None
    if done.returncode == -signal.SIGKILL:
        raise MeasuringError(f"{what} was killed, most likely as memory ran out")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise MeasuringError(f"{what} failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    cost = json.loads(done.stdout.splitlines()[-1])  # the network may print lines before it
    layers = None if cost["layers"] is None else Table(*map(_frozen, cost["layers"].values()))
    return StepCost(cost["method"], cost["seconds"], cost["memory"], layers)


def measure_here() -> None:
    """Measure a step: read a config, its data and the number of steps from stdin, print the cost as JSON."""
    config, dataset, steps = pickle.load(sys.stdin.buffer)
    with suppress(OSError):  # if memory runs out, the system kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # its peak memory is read below
    dataset = dataset.to(device)
    few = min(TRIED, len(dataset.train))
    # warm-up, since libraries load on first use
    make_steps(config.replace(width=base_width_of(config)), dataset.subset(few), 1)
    gc.collect()
    before = reset_peak(device.type)
    timed, optimizer = make_steps(config, dataset, steps)
    memory = 2**20 * (peak(device.type) - before)
    seconds = mean_step(timed, optimizer.options if isinstance(optimizer, SecondOrder) else StepOptions())
    layers = optimizer.plan() if isinstance(optimizer, SecondOrder) else None
    print(json.dumps(asdict(StepCost(method_title(config.method), seconds, memory, layers))))


def mean_step(timed: list[TimedStep], options: StepOptions) -> float:
    """Return the mean time of a step over the steps from one refresh to the next.

    Each kind of work counts by its median, without the very first step if another did the same work. Work that was not
    timed, since steps were too slow, counts as the slowest that was.
    """
    usual: dict[str, float] = {}
    for work in {step.work for step in timed}:
        later = [step.seconds for step in timed[1:] if step.work == work]
        usual[work] = statistics.median(later or [timed[0].seconds])
    every = options.inverse_every
    measuring = every // options.factor_every - 1
    cycle = {"refresh": 1, "measure": measuring, "apply": every - 1 - measuring}
    slowest = max(usual.values())
    return sum(count * usual.get(work, slowest) for work, count in cycle.items() if count) / every


def _work(optimizer: Optimizer) -> str:
    """The work of the coming step."""
    if not isinstance(optimizer, SecondOrder) or is_due(optimizer, optimizer.options.inverse_every):
        return "refresh"
    return "measure" if is_due(optimizer, optimizer.options.factor_every) else "apply"


def make_steps(config: RunConfig, dataset: Dataset, steps: int) -> tuple[list[TimedStep], Optimizer]:
    """Take at least so many steps on all samples in one batch; return their times and the optimizer."""
    built = build(config, dataset)
    x, y = dataset.prepare(dataset.train.inputs, config.weights_dtype), dataset.train.targets
    timed: list[TimedStep] = []
    options = getattr(built.optimizer, "options", StepOptions())
    count = steps + (1 if options.inverse_every == 1 else WARM_UP)
    if 1 < options.factor_every < options.inverse_every:
        count = max(count, options.factor_every + 1)  # the first step that measures factors without inverting them
    while (spent := sum(step.seconds for step in timed)) < ENOUGH_SECONDS:
        if len(timed) >= count and (spent > LEAST_SECONDS or len(timed) >= MOST_STEPS):
            break
        work = _work(built.optimizer)
        start = time.perf_counter()
        built.optimizer.zero_grad()
        loss = built.loss(built.outputs(x), y)
        torch.autograd.backward(loss)
        if config.clip_norm is not None:
            built.plan.clip_grad_norm_(config.clip_norm, model=built.model)
        built.optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        timed.append(TimedStep(time.perf_counter() - start, work))
    if getattr(built.optimizer, "skipped", 0):
        raise RuntimeError("the optimizer skipped it: gradients or curvature were not finite")
    return timed, built.optimizer


def _frozen(value: Any) -> Any:
    """Turn the lists of JSON back into the tuples of a table."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
