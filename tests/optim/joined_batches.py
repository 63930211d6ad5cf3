"""What ranks run in ``test_joined_batches.py``."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from ranks import compared

import mukron

warnings.simplefilter("ignore")
F64, F32 = torch.float64, torch.float32

METHODS = {
    "kfac": partial(mukron.KFAC, lr=0.05),
    "kfac, plain": partial(mukron.KFAC, lr=0.02, trust=None),
    "kfac, mc": partial(mukron.KFAC, lr=0.05, fisher="mc"),
    "kfac, exact": partial(mukron.KFAC, lr=0.05, fisher="exact", memory="batch"),
    "kfac, empirical": partial(mukron.KFAC, lr=0.05, fisher="empirical"),
    "kfac, empirical, plain": partial(mukron.KFAC, lr=0.02, fisher="empirical", trust=None),
    "kfac, every 4": partial(mukron.KFAC, lr=0.05, factor_every=2, inverse_every=4, refresh_warmup=1),
    "kfac, reduce": partial(mukron.KFAC, lr=0.05, sharing="reduce"),
    "kfac, window": partial(mukron.KFAC, lr=0.05, memory="window:2"),
    "kfac, rows": partial(mukron.KFAC, lr=0.05, memory="batch", form="rows"),
    "kfac, matrix, eigh": partial(mukron.KFAC, lr=0.05, memory="ema:0.9", solver="eigh"),
    "kfac, kl": partial(mukron.KFAC, lr=0.05, trust="kl"),
    "kfac, graft": partial(mukron.KFAC, lr=0.01, trust=mukron.Graft("adam")),
    "foof": partial(mukron.FOOF, lr=0.1),
    "foof, plain": partial(mukron.FOOF, lr=0.02, trust=None),
    "gauss-newton": partial(mukron.GaussNewton, lr=0.05),
    "gauss-newton, plain": partial(mukron.GaussNewton, lr=0.01, trust=None),
    "shampoo": partial(mukron.Shampoo, lr=0.05),
    "muon": partial(mukron.Muon, lr=0.02),
}


def every_method(rank, folder):
    for name, make in METHODS.items():
        compared(name, "mlp", make, F64, 1e-10, steps=8)


def every_layer(rank, folder):
    for name in ("kfac", "kfac, empirical", "kfac, exact", "kfac, reduce", "foof", "gauss-newton"):
        compared(name, "small", METHODS[name], F64, 1e-10, steps=6)


def options_of_batches(rank, folder):
    for name in ("kfac", "kfac, mc", "kfac, empirical", "kfac, exact", "foof", "gauss-newton"):
        compared(f"{name}, unequal", "mlp", METHODS[name], F64, 1e-10, steps=6, unequal=True)
        compared(f"{name}, accumulated", "mlp", METHODS[name], F64, 1e-10, steps=6, micro=2)
    for name in ("kfac", "kfac, empirical", "foof"):
        compared(f"{name}, experts", "experts", METHODS[name], F64, 1e-10, steps=6)


def single_precision(rank, folder):
    for name in ("kfac", "kfac, plain", "foof", "gauss-newton"):
        compared(name, "mlp", METHODS[name], F32, 1e-5, steps=6)
