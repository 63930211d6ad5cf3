"""A layer of your own: one class says its fans (for muP) and its layout (for the curvature); it is preconditioned."""

import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.layers import Fans, MatrixLayer, register


class Reversed(nn.Module):
    """A linear layer that stores its weight as [in, out]."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out) / fan_in**0.5)

    def forward(self, x):
        return x @ self.weight


@register(Reversed)
class ReversedLayer(MatrixLayer):
    def __init__(self, module):
        super().__init__(module)
        self.d_in, self.d_out = module.weight.shape

    def fans(self, name, shape):
        return Fans(fan_in=shape[0], fan_out=shape[1])

    def inputs(self, x):
        return x[None, :, None]  # [groups, samples, positions, features]

    def signals(self, delta):
        return delta[None, :, None]

    def matrix(self, weight):
        return weight.mT[None]  # [groups, out, in]

    def weight(self, matrix):
        return matrix[0].mT


def make(width):
    return nn.Sequential(Reversed(20, width), nn.ReLU(), Reversed(width, width), nn.ReLU(), nn.Linear(width, 5))


torch.manual_seed(0)
model = make(256)
p = mukron.parametrize(model, mukron.base_shapes(make, width=32))
opt = mukron.KFAC(model, p, lr=0.1)
x, y = torch.randn(64, 20), torch.randint(5, (64,))
losses = []
for _ in range(10):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())
print(opt.plan())
assert losses[-1] < losses[0]
