"""Where the time of a step goes, by the labels that it carries."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from mukron.bench.measure import Racer, synchronize
from mukron.bench.result import WHOLE
from mukron.bench.tasks import Batches

OURS = "mukron::"
PERIODS = 3


def parts_of(racer: Racer, pool: Batches, device: str) -> dict[str, float]:
    """Milliseconds a step of the device under every label: our optimizers', and forward, backward and step."""
    assert racer.trainer is not None
    steps = PERIODS * racer.method.period
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    # Backward in this very thread: what it starts then counts as its own.
    with torch.autograd.set_multithreading_enabled(False), profile(activities=activities) as profiled:
        for x, y in islice(cycle(pool), steps):
            racer.trainer(x, y)
        synchronize(device)
    found: dict[str, float] = {}
    for event in profiled.key_averages():
        if event.device_type != DeviceType.CPU or not (event.key in WHOLE or event.key.startswith(OURS)):
            continue
        spent = event.device_time_total if device == "cuda" else event.cpu_time_total
        found[event.key] = found.get(event.key, 0.0) + spent / 1e3 / steps
    return {name: found[name] for name in sorted(found, key=lambda name: (name not in WHOLE, name))}
