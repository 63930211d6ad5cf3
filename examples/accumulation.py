"""Gradient accumulation: four micro-batches make the same step as the whole batch, curvature included."""

import copy

import torch
from torch.nn import functional as F

import mukron
from mukron.models import MLP

torch.manual_seed(0)
whole = MLP(128, inputs=64).double()
parts = copy.deepcopy(whole)
x, y = torch.randn(64, 64).double(), torch.randint(10, (64,))

opt = mukron.KFAC(whole, lr=0.1, fisher="exact")
F.cross_entropy(whole(x), y).backward()
opt.step()

opt = mukron.KFAC(parts, lr=0.1, fisher="exact")
for rows in torch.arange(64).chunk(4):
    loss = F.cross_entropy(parts(x[rows]), y[rows]) / 4  # each is a quarter of the mean
    loss.backward()
opt.step()  # one step, from the statistics of all four

largest = max(float((a - b).detach().abs().max()) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
print(f"largest difference {largest:.1e}")
assert largest < 1e-10
