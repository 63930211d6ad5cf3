"""Benchmarks: this library's steps beside torch's own, in one run.

Times on shared machines are noisy, so methods take turns and medians are compared. Memory is the peak of a process
of its own.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mukron.models import MLP
from mukron.optim import FOOF, KFAC
from mukron.table import Table

INPUTS, CLASSES = 784, 10
SMALL_LR = 1e-6  # the numbers must stay finite; their values do not matter
METHODS: dict[str, Callable[[MLP], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=SMALL_LR, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=SMALL_LR),
    "K-FAC (mc)": lambda model: KFAC(model, lr=SMALL_LR, momentum=0.9),
    "K-FAC (empirical)": lambda model: KFAC(model, lr=SMALL_LR, momentum=0.9, fisher="empirical"),
    "FOOF": lambda model: FOOF(model, lr=SMALL_LR, momentum=0.9),
}


@dataclass(frozen=True)
class Measured:
    """One method's step: median and quartiles in milliseconds, peak memory in MiB."""

    method: str
    milliseconds: float
    quartiles: tuple[float, float]
    memory: float

    def row(self, base: Measured) -> tuple[str, ...]:
        low, high = self.quartiles
        return (
            *(self.method, f"{self.milliseconds:.2f}", f"{low:.2f} - {high:.2f}"),
            *(
                f"{self.milliseconds / base.milliseconds:.2f}",
                f"{self.memory:.0f}",
                f"{self.memory / max(base.memory, 1e-9):.2f}",
            ),
        )


def stepper(method: str, width: int, batch: int, device: str) -> Callable[[], None]:
    """A function that trains one step on a fixed random batch, everything refreshed."""
    torch.manual_seed(0)
    model = MLP(width, inputs=INPUTS, classes=CLASSES).to(device)
    x, y = torch.randn(batch, INPUTS, device=device), torch.randint(CLASSES, (batch,), device=device)
    optimizer = METHODS[method](model)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        if getattr(optimizer, "skipped", 0):
            raise RuntimeError(f"{method}: a step was skipped; its time would mean nothing")
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def kfac_step(
    width: int, batch: int, memory_width: int, rounds: int, device: str, track: Callable[[Iterable[int]], Iterable[int]]
) -> tuple[list[Measured], Table]:
    """A step of each method on a 784-M-M-10 MLP, cross-entropy, in turns."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch finds no GPU here; choose cpu")
    steps = {method: stepper(method, width, batch, device) for method in METHODS}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for number in track(range(rounds + 3)):
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 3:  # the first ones warm up
                times[method].append(1e3 * (time.perf_counter() - start))
    del steps
    measured = []
    for method, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        measured.append(Measured(method, median, (low, high), peak_memory(method, memory_width, batch, device)))
    title = (
        f"One step, {INPUTS}-{width}-{width}-{CLASSES} MLP, batch {batch}, {device}, {torch.get_num_threads()} threads"
    )
    columns = ("method", "ms", "quartiles", "x SGD", f"MiB at width {memory_width}", "x SGD")
    note = (
        f"torch {torch.__version__}, median of {rounds} rounds in turns; memory: peak of a process of its own, 3 steps"
    )
    return measured, Table(title, columns, tuple(each.row(measured[0]) for each in measured), (note,))


def peak_memory(method: str, width: int, batch: int, device: str) -> float:
    """MiB above what torch itself takes, in a fresh process."""
    command = [sys.executable, "-m", "mukron.bench", method, str(width), str(batch), device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _measure_memory(method: str, width: int, batch: int, device: str) -> float:
    step = stepper(method, 8, batch, device)  # what libraries load on first use is not the method's
    step()
    before = reset_peak(device)
    step = stepper(method, width, batch, device)
    for _ in range(3):
        step()
    return peak(device) - before


def reset_peak(device: str) -> float:
    """Start a new peak, and say what is held now, in MiB."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is held
        return _status("VmRSS")
    except OSError:
        return peak(device)


def peak(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**10


def as_dict(measured: list[Measured]) -> list[dict[str, Any]]:
    return [asdict(each) for each in measured]


if __name__ == "__main__":
    name, width_, batch_, device_ = sys.argv[1:]
    print(_measure_memory(name, int(width_), int(batch_), device_))
