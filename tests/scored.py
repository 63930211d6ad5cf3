"""A model that computes its loss inside of itself, a wrapper that casts what it returns, and its training."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
METHODS = {
    **{f"kfac {fisher}": (KFAC, {"fisher": fisher}) for fisher in ("signs", "mc", "exact", "empirical")},
    "kfac fused": (KFAC, {"fisher": "signs", "fused": True}),
    "foof": (FOOF, {}),
    "gauss-newton": (GaussNewton, {"damping": 1.0}),
}


class Scored(nn.Module):
    """Returns its loss and its logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits.float(), y), "logits": logits}


def cast_after(model, *, autocast, dtypes):
    """Replace forward by one under autocast whose outputs are cast, once or several times."""
    forward = model.forward

    def wrapped(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            returned = forward(*arguments)
        for dtype in dtypes:
            returned = {name: value.to(dtype) for name, value in returned.items()}
        return returned

    model.forward = wrapped
    return model


def trained(model, method, called=None, *, inside, micro=1, steps=3):
    kind, options = method
    optimizer = kind(model, lr=0.05, output=lambda returned: returned["logits"], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in zip(X.chunk(micro), Y.chunk(micro), strict=True):
            returned = (called or model)(x, y)
            loss = returned["loss"] if inside else F.cross_entropy(returned["logits"].float(), y)
            (loss / micro).backward()
        optimizer.step()
    assert (optimizer.steps, optimizer.skipped) == (steps, 0)
    return optimizer, [parameter.detach().clone() for parameter in model.parameters()]
