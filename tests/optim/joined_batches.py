"""What ranks run in ``test_joined_batches.py``."""

from __future__ import annotations

import warnings
from functools import partial

import ranks
import torch
from ranks import OWN, SPREAD, WRAPPED, compared
from torch.distributed.device_mesh import init_device_mesh

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

FUSED = {
    "kfac": partial(mukron.KFAC, lr=0.05, memory="batch", fused=True),
    "foof": partial(mukron.FOOF, lr=0.1, memory="batch", fused=True),
}
CROSSED = {  # options that nothing above crosses with several processes
    "soap, eigh": partial(mukron.SOAP, lr=0.02, solver="eigh", inverse_every=2),
    "kfac, sum": partial(mukron.KFAC, lr=0.05, memory="sum"),
    "kfac, rms": partial(mukron.KFAC, lr=0.01, trust=mukron.RMS()),
    "foof, rms": partial(mukron.FOOF, lr=0.01, trust=mukron.RMS()),
    "shampoo, rms": partial(mukron.Shampoo, lr=0.01, trust=mukron.RMS()),
    "foof, reduce, every 4": partial(
        mukron.FOOF, lr=0.05, sharing="reduce", factor_every=2, inverse_every=4, refresh_warmup=1
    ),
}
WITH_EMBEDDING = {  # which is preconditioned, too
    "kfac": partial(mukron.KFAC, lr=0.05, exclude=()),
    "kfac, empirical, plain": partial(mukron.KFAC, lr=0.02, fisher="empirical", trust=None, exclude=()),
    "foof": partial(mukron.FOOF, lr=0.05, exclude=()),
    "shampoo": partial(mukron.Shampoo, lr=0.05, exclude=()),
}
EXCHANGED = ("kfac", "foof", "gauss")  # whose curvature travels
WAYS = ("rows", "owner", "factors")


def a_bias_alone(model, **given):
    """The weight of the layer in the middle is not trained."""
    trained = [parameter for name, parameter in model.named_parameters() if name != "2.weight"]
    return mukron.KFAC(model, lr=0.05, params=trained, **given)


def every_method(rank, folder):
    for name, make in METHODS.items():
        compared(name, "mlp", make, F64, 1e-10, steps=8)


def own_gradients(rank, folder):
    """The step averages gradients, or has them as D^T H of all rows; curvature travels in every way."""
    for place, (name, make) in enumerate(METHODS.items()):
        way = {"communication": WAYS[place % 3]} if name.startswith(EXCHANGED) else {}
        compared(f"{name}, own, {way}", "mlp", make, F64, 1e-10, steps=6, how=OWN, **way)
        if way:
            other = WAYS[(place + 1) % 3]
            compared(f"{name}, {other}", "mlp", make, F64, 1e-10, steps=6, communication=other)
    for name, make in FUSED.items():
        compared(f"{name}, fused", "mlp", make, F64, 1e-10, steps=6, how=OWN)
    compared("kfac, own, accumulated", "mlp", METHODS["kfac"], F64, 1e-10, steps=6, how=OWN, micro=2, unequal=True)
    compared("kfac, own, experts", "experts", METHODS["kfac"], F64, 1e-10, steps=6, how=OWN)


def spread_weights(rank, folder):
    for name, make in METHODS.items():
        compared(f"{name}, spread", "mlp", make, F64, 1e-10, steps=6, how=SPREAD)
    for name in ("kfac", "foof", "gauss-newton", "shampoo"):
        compared(f"{name}, spread", "small", METHODS[name], F64, 1e-10, steps=4, how=SPREAD)
    unequal = {"micro": 2, "unequal": torch.distributed.get_world_size() == 2}  # of three one would have no sample
    compared("kfac, spread, accumulated", "mlp", METHODS["kfac"], F64, 1e-10, steps=6, how=SPREAD, **unequal)
    compared("kfac, spread, experts", "experts", METHODS["kfac"], F64, 1e-10, steps=6, how=SPREAD)
    compared("kfac, spread, a bias", "mlp", a_bias_alone, F64, 1e-10, steps=3, how=SPREAD, communication="rows")


def every_layer(rank, folder):
    for place, name in enumerate(("kfac", "kfac, empirical", "kfac, exact", "kfac, reduce", "foof", "gauss-newton")):
        compared(name, "small", METHODS[name], F64, 1e-10, steps=6)
        way = WAYS[place % 3]
        compared(f"{name}, own, {way}", "small", METHODS[name], F64, 1e-10, steps=6, how=OWN, communication=way)


def crossed(rank, folder):
    """Options in each of the three ways to train, one way that curvature travels after the other."""
    for place, (name, make) in enumerate(CROSSED.items()):
        for how in WRAPPED, OWN, SPREAD:
            way = {"communication": WAYS[place % 3]} if name.startswith(EXCHANGED) and how == OWN else {}
            tolerance = 1e-8 if name.startswith("soap") else 1e-10  # whose bases enlarge rounding
            compared(f"{name}, {how}, {way}", "mlp", make, F64, tolerance, steps=6, how=how, **way)
    for name, make in {**WITH_EMBEDDING, "foof, reduce, every 4": CROSSED["foof, reduce, every 4"]}.items():
        for how, way in zip((WRAPPED, OWN, SPREAD), WAYS, strict=True):
            given = {"communication": way} if name.startswith(EXCHANGED) and how == OWN else {}
            compared(f"{name}, embedding, {how}", "small", make, F64, 1e-10, steps=4, how=how, **given)
    for name in ("shampoo", "muon"):  # convolutions and attention
        for how in (WRAPPED, OWN):
            compared(f"{name}, small, {how}", "small", METHODS[name], F64, 1e-10, steps=6, how=how)
    for name in ("kfac", "kfac, rows", "foof", "gauss-newton", "shampoo", "muon"):
        for how in (OWN, SPREAD):
            compared(f"{name}, again, {how}", "mlp", METHODS[name], F64, 1e-10, steps=6, how=how, again=True)


def options_of_batches(rank, folder):
    for name in ("kfac", "kfac, mc", "kfac, empirical", "kfac, exact", "foof", "gauss-newton"):
        compared(f"{name}, unequal", "mlp", METHODS[name], F64, 1e-10, steps=6, unequal=True)
        compared(f"{name}, accumulated", "mlp", METHODS[name], F64, 1e-10, steps=6, micro=2)
    for name in ("kfac", "kfac, empirical", "foof"):
        compared(f"{name}, experts", "experts", METHODS[name], F64, 1e-10, steps=6)
    for name in ("kfac", "kfac, rows", "foof", "gauss-newton"):  # activation checkpointing
        compared(f"{name}, again", "mlp", METHODS[name], F64, 1e-10, steps=6, again=True)


def single_precision(rank, folder):
    for name in ("kfac", "kfac, plain", "foof", "gauss-newton"):
        compared(name, "mlp", METHODS[name], F32, 1e-5, steps=20)
        compared(f"{name}, own", "mlp", METHODS[name], F32, 1e-5, steps=20, how=OWN, communication="rows")


def enlarged_rounding(rank, folder):
    """How far methods are off that enlarge rounding, as docs/distributed.md says; a few times that elsewhere."""
    shampoo, muon = METHODS["shampoo"], METHODS["muon"]
    for kind in ("mlp", "small"):
        compared(f"shampoo, {kind}", kind, shampoo, F32, 1e-2, steps=20)
        compared(f"muon, {kind}", kind, muon, F32, 2e-2, steps=20)
    compared("muon, single products", "mlp", partial(muon, precision="float32"), F32, 1e-5, steps=20)
    compared("soap", "mlp", partial(mukron.SOAP, lr=0.05), F64, 0.5, steps=4)
    for every in (2, 4, 8):
        given = {"trust": "kl", "inverse_every": every, "factor_every": every, "refresh_warmup": 0}
        compared(f"kl, every {every}", "small", partial(mukron.KFAC, lr=0.05, **given), F64, 1e-6, steps=8)


def two_dimensional_mesh(rank, folder):
    """Two replicas of two parts each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ranks.spread = partial(ranks.spread, mesh=mesh)
    for name in ("kfac", "foof", "shampoo", "muon"):
        compared(f"{name}, two dimensions", "mlp", METHODS[name], F64, 1e-10, steps=6, how=SPREAD)
    compared("kfac, two dimensions", "small", METHODS["kfac"], F64, 1e-10, steps=4, how=SPREAD)


def on_one_gpu(rank, folder):
    """All ranks on the same GPU, over Gloo: NCCL wants a GPU for each."""
    for name, make in METHODS.items():
        compared(f"{name}, GPU", "mlp", make, F64, 1e-10, steps=6, device="cuda")
        way = {"communication": WAYS[len(name) % 3]} if name.startswith(EXCHANGED) else {}
        compared(f"{name}, GPU, own", "mlp", make, F64, 1e-10, steps=6, device="cuda", how=OWN, **way)
    for name in ("kfac", "kfac, empirical", "foof", "shampoo", "gauss-newton"):
        compared(f"{name}, GPU", "small", METHODS[name], F64, 1e-10, steps=4, device="cuda")
    for name in ("kfac", "foof"):
        compared(f"{name}, GPU, single", "mlp", METHODS[name], F32, 1e-4, steps=6, device="cuda")
