"""A loop with Accelerate, with the loss that a model of transformers computes inside of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import HF_MODELS, METHODS, exactly, options_of, planned, samples
from torch.utils.data import DataLoader

from mukron.integrations import build_optimizer

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

TABLE = "A loop with Accelerate"


def trained(
    method: str,
    name: str = "ViT",
    *,
    batch: int = 16,
    steps: int = 6,
    optimizer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The losses, the model, and the accelerator, after so many passes."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model, plan = planned(HF_MODELS[name])
    kind, lr = METHODS[method]
    optimizer = build_optimizer(kind, model, plan, lr, **options_of(method, name), **(optimizer_options or {}))
    loader = DataLoader(samples(name), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, run = [], Run(accelerator, model, optimizer, loader)
    for _ in range(steps):
        losses += run.epoch()
    return losses, model, run


class Run:
    def __init__(self, *parts: Any) -> None:
        self.accelerator, self.model, self.optimizer, self.loader = parts

    def epoch(self) -> list[float]:
        losses = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 10.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def cells(column: str) -> Any:
    marked = [pytest.param(method, marks=pytest.mark.cell(TABLE, method, column)) for method in METHODS]
    return pytest.mark.parametrize("method", marked)


def assert_alike(ours: Any, theirs: Any, **tolerance: float) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), **(tolerance or {"rtol": 0, "atol": 0}))


@cells("bf16")
def test_trains_in_bf16(method):
    losses, _, _ = trained(method, mixed_precision="bf16")
    assert losses[-1] < losses[0]


@cells("accumulation")
def test_accumulated_batches_are_one(method):
    _, whole, _ = trained(method, steps=1, optimizer_options=exactly(method))
    _, parts, _ = trained(method, steps=1, batch=8, optimizer_options=exactly(method), gradient_accumulation_steps=2)
    assert_alike(parts, whole, rtol=1e-3, atol=1e-3)


@cells("save_state and load_state, bit for bit")
def test_a_resumed_run_is_bit_for_bit_the_same(method):
    _, whole, _ = trained(method, steps=4, mixed_precision="bf16")
    _, _, first = trained(method, steps=2, mixed_precision="bf16")
    first.accelerator.save_state("half")
    _, resumed, second = trained(method, steps=1, mixed_precision="bf16")
    second.accelerator.load_state("half")
    second.epoch()
    second.epoch()
    assert_alike(resumed, whole)
