"""What a user brings to a run: small networks, data with positions, and losses."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def random(seed=0):
    return torch.Generator().manual_seed(seed)


class Tokens(nn.Module):
    def __init__(self, width, inputs=20, classes=20, classes_at=-1):
        super().__init__()
        self.first, self.hidden = nn.Embedding(inputs, width), nn.Linear(width, width)
        self.last, self.classes_at = nn.Linear(width, classes, bias=False), classes_at

    def forward(self, x):
        return self.last(torch.relu(self.hidden(self.first(x)))).movedim(-1, self.classes_at)


class Numbers(nn.Module):
    def __init__(self, width, outputs=1, squeeze=False):
        super().__init__()
        self.first, self.last, self.squeeze = nn.Linear(5, width), nn.Linear(width, outputs), squeeze

    def forward(self, x):
        output = self.last(torch.relu(self.first(x)))
        return output.squeeze(-1) if self.squeeze else output


def tokens(positions=8, ignored=0.0):
    x = torch.randint(20, (80, positions), generator=random())
    y = (3 * x + 1) % 20
    y[torch.rand(y.shape, generator=random(1)) < ignored] = -100
    return (x[:64], y[:64]), (x[64:], y[64:])


def flat(ignored=0.0):  # the targets of ``tokens`` that count, one sample each
    return [(x[y != -100][:, None], y[y != -100][:, None]) for x, y in tokens(ignored=ignored)]


def half_without_targets():
    x = torch.randint(20, (64, 8), generator=random())
    y = (x + 1) % 20
    y[:32] = -100
    return (x, y), (x.flip(0), y.flip(0))


def without_targets():
    x = torch.randint(20, (64, 8), generator=random())
    return x, torch.full((64, 8), -100)


def few_classes():  # 50 tokens, but targets from 0 to 19
    x = torch.randint(50, (64, 8), generator=random())
    y = x.roll(-1, 1)
    return x, y.masked_fill(y >= 20, -100)


def integers(dtype="uint8"):
    x = (np.arange(64 * 9).reshape(64, 9) * 7 % 100).astype(dtype)
    return x[:, :-1], x[:, 1:]


def sums():
    x = torch.randn(64, 5, generator=random())
    return x, x.sum(1)


def signs():
    x = torch.randn(64, 5, generator=random())
    return x, (x[:, 0] > 0.7).long()


def entropy(output, targets):
    return F.cross_entropy(output, targets)


def entropy_of_last(output, targets):
    assert output.dtype == torch.float32
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def squares(output, targets):
    return (output - targets).square().mean()


def of_two(output, targets):
    return F.binary_cross_entropy_with_logits(output.flatten(), targets.float())


class AsDict(Tokens):
    def forward(self, x):
        output = super().forward(x)
        return {"values": output, "0": output, "other": None}


class AsTuple(Tokens):
    def forward(self, x):
        return super().forward(x), None
