"""What ranks run in ``test_statistics_of_ranks.py``."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from ranks import OWN, SPREAD, WRAPPED, batch, compared, made, reference_of
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mukron import FOOF, KFAC

warnings.simplefilter("ignore")
F64 = torch.float64


def bucket_views(rank, folder):
    """Where gradients are parts of the wrapper's buffers, it moves them to others when the second pass begins."""
    for make in (partial(KFAC, lr=0.05), partial(KFAC, lr=0.05, fisher="empirical"), partial(FOOF, lr=0.5)):
        model = made("mlp", F64)
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = make(called)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch("mlp", step, F64)
            for first in (0, 6):  # two micro-batches, without ``no_sync``
                part = slice(first + 3 * rank, first + 3 * rank + 3)
                (F.cross_entropy(called(x[part]), y[part]) / 2).backward()
            optimizer.step()
        reference = reference_of("mlp", make, F64, 3, 2, "cpu")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, reference[name], rtol=1e-10, atol=1e-12, msg=name)


REDUCED = {
    "kfac": partial(KFAC, lr=0.05, sharing="reduce", trust=None),
    "kfac, kl": partial(KFAC, lr=0.05, sharing="reduce", trust="kl"),
    "kfac, empirical": partial(KFAC, lr=0.05, sharing="reduce", fisher="empirical"),
    "foof": partial(FOOF, lr=0.05, sharing="reduce", trust=None),
}


def reduced_experts(rank, folder):
    """One row for each sample of the batch, also of those that a layer gets on other ranks alone."""
    for name, make in REDUCED.items():
        for how in (WRAPPED, OWN):
            for communication in ("auto", "rows", "owner", "factors"):
                what = f"{name}, {how}, {communication}"
                compared(what, "experts", make, F64, 1e-10, 4, how=how, communication=communication)


def spread_reduced_experts(rank, folder):
    for name, make in REDUCED.items():
        compared(f"{name}, spread", "experts", make, F64, 1e-10, 4, how=SPREAD)


def windows(rank, folder):
    """Rows are remembered, of an embedding's signals too, whatever would travel fastest."""
    for make in (
        partial(KFAC, lr=0.05, memory="window:2", exclude=()),
        partial(KFAC, lr=0.01, memory="window:2", exclude=(), trust=None),
    ):
        for how in (WRAPPED, OWN):
            for communication in ("auto", "factors", "owner"):
                compared(f"{how}, {communication}", "small", make, F64, 1e-10, 4, how=how, communication=communication)
