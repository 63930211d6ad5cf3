"""K-FAC on a convolutional network, refreshed at every tenth step."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mukron.bench.agreement import kfac
from mukron.bench.methods import SGD, Method, by
from mukron.bench.steps import Bench
from mukron.bench.tasks import resnet
from mukron.optim import KFAC

EVERY = 10


def conv(classes: int = 10) -> Bench:
    """On the classes of CIFAR-10 or CIFAR-100."""
    name = "conv" if classes == 10 else f"conv-{classes}"
    return Bench(name, resnet(classes), (replace(SGD, period=EVERY), _kfac(), _kfac(fused=True)))


def _kfac(fused: bool = False) -> Method:
    def make(model: nn.Module, lr: float) -> KFAC:
        return KFAC(model, lr=lr, momentum=0.9, factor_every=EVERY, inverse_every=EVERY, fused=fused)

    name = f"K-FAC (mc), every {EVERY}" + (", fused" if fused else "")
    return Method(name, by(make), period=EVERY, truth=kfac("mc"))
