"""Checkpoint and resume: the run that was interrupted ends bit for bit where the other one does."""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import mukron
from mukron.models import MLP


def make(width):
    return MLP(width, inputs=64)


def start():
    model = make(256)
    p = mukron.parametrize(model, mukron.base_shapes(make, width=64))
    return model, mukron.KFAC(model, p, lr=0.1, momentum=0.9, memory=mukron.EMA(0.95))


def train(model, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


torch.manual_seed(0)
x, y = torch.randn(64, 64), torch.randint(10, (64,))
model, opt = start()
train(model, opt, 5)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
    train(model, opt, 5)

    resumed, opt = start()  # the same script: build, parametrize, make the optimizer ...
    saved = torch.load(path, weights_only=True)
    resumed.load_state_dict(saved["model"])  # ... then load
    opt.load_state_dict(saved["opt"])
    train(resumed, opt, 5)

assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
print("resumed bit for bit")
