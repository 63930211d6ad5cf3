"""K-FAC on a convolutional network, refreshed at every tenth step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mukron.bench.agreement import kfac
from mukron.bench.methods import SGD, Method, by
from mukron.bench.steps import Bench
from mukron.bench.tasks import resnet
from mukron.optim import KFAC

EVERY = 10


def conv(classes: int = 10) -> Bench:
    """On the classes of CIFAR-10 or CIFAR-100."""
    methods = [
        Method(
            f"K-FAC (mc), every {EVERY}{', fused' if fused else ''}",
            by(partial(KFAC, momentum=0.9, factor_every=EVERY, inverse_every=EVERY, fused=fused)),
            period=EVERY,
            truth=kfac("mc"),
        )
        for fused in (False, True)
    ]
    name = "conv" if classes == 10 else f"conv-{classes}"
    return Bench(name, resnet(classes), (replace(SGD, period=EVERY), *methods))
