"""The benchmark of K-FAC on a convolutional network, with factors and inverses refreshed every tenth step."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mukron.bench.agreement import kfac_update
from mukron.bench.methods import KFAC_DEFAULTS, REFRESH_EVERY, TORCH_SGD, BenchMethod, trained_by
from mukron.bench.steps import Bench
from mukron.bench.tasks import resnet_task
from mukron.optim import KFAC


def conv_bench(classes: int = 10) -> Bench:
    """Builds the benchmark of ResNet-18 on 32 x 32 images.

    Args:
        classes: The number of classes: 10 as in CIFAR-10, or 100 as in CIFAR-100.

    Returns:
        The benchmark, called "conv" or "conv-100".

    Example:
        >>> conv_bench(100).name
        'conv-100'
    """
    name = "conv" if classes == 10 else f"conv-{classes}"
    methods = (replace(TORCH_SGD, period=REFRESH_EVERY), _kfac(), _kfac(fused=True), KFAC_DEFAULTS)
    return Bench(name, resnet_task(classes), methods)


def _kfac(fused: bool = False) -> BenchMethod:
    def make(model: nn.Module, lr: float) -> KFAC:
        return KFAC(
            model, lr=lr, momentum=0.9, factor_every=REFRESH_EVERY, inverse_every=REFRESH_EVERY, fused=fused, trust=None
        )

    name = f"K-FAC (mc), every {REFRESH_EVERY}" + (", fused" if fused else "")
    return BenchMethod(name, trained_by(make), period=REFRESH_EVERY, reference_update=kfac_update("mc"))
