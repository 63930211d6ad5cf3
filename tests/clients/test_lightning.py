"""Lightning's Trainer, with what ``for_lightning`` returns from ``configure_optimizers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import operators  # noqa: F401
import pytest
import torch
from outcomes import snippet
from tiny import METHODS, planned
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mukron.integrations import for_lightning
from networks import CLASSES, INPUTS, Net

lightning = pytest.importorskip("lightning")

TABLE = "Lightning's Trainer"
X = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % CLASSES


class Module(lightning.LightningModule):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.network, self.plan = planned(Net)
        self.method, self.losses = method, list[float]()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        kind, lr = METHODS[self.method]

        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

        return for_lightning(self.network, kind, self.plan, lr, schedule=schedule)


def trained(
    method: str, *, batch: int = 32, resume: str | None = None, kind: type[Module] = Module, **options: Any
) -> tuple[Module, Any]:
    module = kind(method)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    usual = {"max_epochs": 6, "accelerator": "cpu", "enable_checkpointing": False}
    trainer = lightning.Trainer(**quiet, **{**usual, **options})
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


def assert_alike(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), **(tolerance or {"rtol": 0, "atol": 0}))


def cells(column: str) -> Any:
    marked = [pytest.param(method, marks=pytest.mark.cell(TABLE, method, column)) for method in METHODS]
    return pytest.mark.parametrize("method", marked)


@cells("float32, a schedule")
def test_trains_in_float32(method):
    module, _ = trained(method)
    assert module.losses[-1] < module.losses[0]


@cells("float32, a schedule")
def test_a_scheduler_follows_what_is_logged(method):
    class Watched(Module):
        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            self.log("loss", 1.0)  # which does not fall
            return loss

        def configure_optimizers(self):
            kind, lr = METHODS[method]
            plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, min_lr=lr / 4)
            return for_lightning(self.network, kind, self.plan, lr, schedule=plateau, interval="epoch", monitor="loss")

    _, trainer = trained(method, kind=Watched, max_epochs=5)
    groups = trainer.optimizers[0].param_groups
    assert {group["lr"] for group in groups} == {METHODS[method][1] / 4}


@cells("bf16-mixed")
def test_trains_in_mixed_precision(method):
    module, _ = trained(method, precision="bf16-mixed")
    assert module.losses[-1] < module.losses[0]


@cells("clipping")
def test_clipped_steps_are_those_of_a_loop(method):
    module, _ = trained(method, gradient_clip_val=0.1, max_epochs=3)
    other = Module(method)
    built = other.configure_optimizers()
    optimizer, schedule = built["optimizer"], built["lr_scheduler"]["scheduler"]
    for _ in range(3):
        optimizer.zero_grad()
        other.training_step((X, Y), 0).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    assert_alike(module, other, rtol=1e-4, atol=1e-5)


def test_the_pages_override_clips_in_units_of_the_plan():
    """It is the method that docs/works-with.md shows."""
    scope = {}
    exec(snippet("def configure_gradient_clipping"), scope)

    class Clipping(Module):
        configure_gradient_clipping = scope["configure_gradient_clipping"]

        def training_step(self, batch, number):
            return 100 * super().training_step(batch, number)

        def configure_optimizers(self):
            return self.plan.optimizer(torch.optim.SGD, 0.1)

    module, other = Clipping("AdamW"), Clipping("AdamW")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=32))
    optimizer = other.configure_optimizers()
    other.training_step((X, Y), 0).backward()
    assert other.plan.clip_grad_norm_(1.0) > 2
    optimizer.step()
    assert_alike(module, other, rtol=1e-5, atol=1e-7)


@cells("accumulation")
def test_accumulated_batches_are_one(method):
    whole, _ = trained(method, max_epochs=1)
    parts, _ = trained(method, max_epochs=1, batch=16, accumulate_grad_batches=2)
    assert_alike(parts, whole, rtol=1e-3, atol=1e-3)


@cells("save and resume, bit for bit")
def test_a_resumed_run_is_bit_for_bit_the_same(method):
    whole, _ = trained(method, max_epochs=4)
    _, trainer = trained(method, max_epochs=2)
    trainer.save_checkpoint("half.ckpt")
    resumed, _ = trained(method, max_epochs=4, resume="half.ckpt")
    assert_alike(resumed, whole)
