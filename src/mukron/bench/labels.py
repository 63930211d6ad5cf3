"""The time of a step by part, from the labels that torch's profiler records."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from mukron.bench.measure import MethodTiming, synchronize
from mukron.bench.result import STEP_PHASES
from mukron.bench.tasks import Batches

LABEL_PREFIX = "mukron::"  # of the labels that this library's optimizers set
PROFILED_PERIODS = 3  # periods of a method that are profiled


def profile_step(timing: MethodTiming, pool: Batches, device: str) -> dict[str, float]:
    """Measures the device time of a step under every label.

    Args:
        timing: The method, with its trainer.
        pool: Batches to train on.
        device: "cpu" or "cuda".

    Returns:
        Milliseconds per step: first forward, backward and step, then the labels of this library's optimizers.
    """
    assert timing.trainer is not None
    steps = PROFILED_PERIODS * timing.method.period
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    # Backward runs in this thread, so that the kernels it starts are counted under its label.
    with torch.autograd.set_multithreading_enabled(False), profile(activities=activities) as profiled:
        for x, y in islice(cycle(pool), steps):
            timing.trainer(x, y)
        synchronize(device)
    milliseconds: dict[str, float] = {}
    for event in profiled.key_averages():
        if event.device_type != DeviceType.CPU or not (event.key in STEP_PHASES or event.key.startswith(LABEL_PREFIX)):
            continue
        spent = event.device_time_total if device == "cuda" else event.cpu_time_total
        milliseconds[event.key] = milliseconds.get(event.key, 0.0) + spent / 1e3 / steps
    return {name: milliseconds[name] for name in sorted(milliseconds, key=lambda name: (name not in STEP_PHASES, name))}
