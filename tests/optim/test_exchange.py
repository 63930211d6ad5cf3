"""Where several processes will talk: the step asks at four points, and follows the answers."""

from __future__ import annotations

import copy
import math

import torch
from torch.nn import functional as F

from mukron import KFAC
from mukron.curvature import Joint, gather
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


class Alone:
    """One rank that talks to itself."""

    def __init__(self):
        self.asked = []

    def gather(self, passes):
        self.asked.append("gather")
        return Joint(gather(passes), passes, lambda layer: None)

    def union(self, keys):
        return list(keys)

    def owns(self, layer):
        self.asked.append("owns")
        return True

    def share(self, operators):
        self.asked.append("share")
        return operators

    def agree(self, numbers):
        self.asked.append("agree")
        return list(numbers)


class Partner(Alone):
    """Owns all layers but one, whose operators come from elsewhere."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def owns(self, layer):
        return layer != "hidden"

    def share(self, operators):
        anchor = self.other.layers["hidden"].anchor
        return {**operators, "hidden": self.other.state[anchor]["operators"]}


class Disagrees(Alone):
    """Another rank has met a number that is not finite."""

    def agree(self, numbers):
        return [math.nan for _ in numbers]


def trained(model, exchange):
    optimizer = KFAC(model, lr=0.05, momentum=0.9, trust=None)
    optimizer.exchange = exchange
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    return optimizer


def test_one_rank_that_talks_to_itself_changes_nothing():
    torch.manual_seed(0)
    plain = Net(8)
    other, exchange = copy.deepcopy(plain), Alone()
    trained(plain, None)
    trained(other, exchange)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))
    assert set(exchange.asked) == {"gather", "owns", "share", "agree"}


def test_operators_may_come_from_another_rank():
    torch.manual_seed(0)
    plain = Net(8)
    other = copy.deepcopy(plain)
    first = trained(plain, None)
    trained(other, Partner(first))
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_all_ranks_skip_if_one_must():
    torch.manual_seed(0)
    model = Net(8)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = trained(model, Disagrees())
    assert optimizer.skipped == 1
    assert all(map(torch.equal, before, model.parameters()))
