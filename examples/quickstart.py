"""K-FAC with settings tuned at width 64, used at width 1024: the two lines that matter are marked."""

import torch
from torch.nn import functional as F

import mukron
from mukron.data import load
from mukron.models import MLP

digits = load("digits")  # scikit-learn's: pip install 'mukron[studies]'
x, y = digits.prepare(digits.train.inputs), digits.train.targets


def make(width):
    return MLP(width, inputs=64)


torch.manual_seed(0)
model = make(width=1024)
p = mukron.parametrize(model, mukron.base_shapes(make, width=64))  # 1: scales the initial weights
opt = mukron.KFAC(model, p, lr=0.1, damping=1.0)  # 2: scales learning rates and damping

for step in range(20):
    batch = torch.randperm(len(x))[:256]
    opt.zero_grad()
    loss = F.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step + 1:2d}  loss {loss.item():.4f}")

print(opt.plan())
