"""What a factor remembers: this batch only, a moving average, a sum, or a window of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mukron.linalg import DiagonalFactor, Factor, KeptFactor, MatrixFactor, RowsFactor

State = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """This batch alone."""

    def update(self, state: State, batch: Factor) -> Factor:
        return batch.mix(state, 0.0, 1.0) if isinstance(batch, KeptFactor) else batch


@dataclass(frozen=True)
class EMA:
    """Exponential moving average, M <- decay M + (1 - decay) M_batch, corrected for its start at zero."""

    decay: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"EMA's decay must lie in [0, 1), got {self.decay}")

    def update(self, state: State, batch: Factor) -> Factor:
        updates = state["updates"] = state.get("updates", 0) + 1
        if isinstance(batch, KeptFactor):  # which holds what is corrected already
            whole = 1 - self.decay**updates
            return batch.mix(state, (whole - (1 - self.decay)) / whole, (1 - self.decay) / whole)
        new = _dense(batch) * (1 - self.decay)
        total = state["total"] = new if "total" not in state else self.decay * state["total"] + new
        return _factor(total / (1 - self.decay**updates), batch)


@dataclass(frozen=True)
class Sum:
    """The sum of all batches so far (Shampoo's own)."""

    def update(self, state: State, batch: Factor) -> Factor:
        if isinstance(batch, KeptFactor):
            return batch.mix(state, 1.0, 1.0)
        new = _dense(batch)
        total = state["total"] = new if "total" not in state else state["total"] + new
        return _factor(total, batch)


@dataclass(frozen=True)
class Window:
    """The mean of the last ``batches`` batches, kept as rows: no matrix of the layer's size."""

    batches: int = 4

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"a window holds at least one batch, got {self.batches}")

    def update(self, state: State, batch: Factor) -> Factor:
        """Rows are stored divided by the root of their own count, so that a window is a plain mean."""
        if not isinstance(batch, RowsFactor):  # an embedding's frequencies
            new = _dense(batch)
            kept = state["batches"] = [*state.get("batches", []), new][-self.batches :]
            return _factor(torch.stack(kept).mean(0), batch)
        new = batch.X / batch.n**0.5
        kept = state["batches"] = [*state.get("batches", []), new][-self.batches :]
        return RowsFactor(torch.cat(kept, dim=-2), len(kept))


Memory = Batch | EMA | Sum | Window


def parse_memory(text: str) -> Memory:
    """From text: "batch", "sum", "ema:0.95" or "window:4"."""
    name, _, number = text.strip().lower().partition(":")
    kinds: dict[str, Callable[[str], Memory]] = {
        "batch": lambda _: Batch(),
        "sum": lambda _: Sum(),
        "ema": lambda decay: EMA(float(decay)) if decay else EMA(),
        "window": lambda batches: Window(int(batches)) if batches else Window(),
    }
    if name not in kinds or (number and name in ("batch", "sum")):
        raise ValueError(f"unknown memory {text!r}; known: batch, sum, ema:DECAY, window:BATCHES")
    return kinds[name](number)


def needs_matrix(memory: Memory) -> bool:
    """Running averages mix batches of any age: only the matrix itself can hold them."""
    return isinstance(memory, (EMA, Sum))


def _dense(factor: Factor) -> Tensor:
    if isinstance(factor, DiagonalFactor):
        return factor.m
    if isinstance(factor, RowsFactor):
        return factor.X.mT @ factor.X / factor.n
    assert isinstance(factor, MatrixFactor)
    return factor.M


def _factor(values: Tensor, like: Factor) -> Factor:
    return DiagonalFactor(values) if isinstance(like, DiagonalFactor) else MatrixFactor(values)
