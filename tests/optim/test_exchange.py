"""Where several processes will talk: the step asks at four points, and follows the answers."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F

from mukron import KFAC
from mukron.curvature import Joint, gather
from mukron.optim.direction import announce, directions
from mukron.optim.gradients import probed
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


class Alone:
    """One rank that talks to itself."""

    def gather(self, passes):
        return Joint(gather(passes), passes, lambda layer: None)

    def owns(self, layer):
        return True

    def counts(self, layer):
        return True

    def everywhere(self, layer):
        return False

    def probed(self, layers):
        return probed(layers)

    def agree(self, step, made):
        if not made:
            step.measure()
            step.prepare()
        moves = directions(step.optimizer, step)
        return moves, step.decide(moves)

    def share(self, step, moves):
        return moves


class Listener(Alone):
    """One rank that talks to itself, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def gather(self, passes):
        self.asked.append("gather")
        return super().gather(passes)

    def owns(self, layer):
        self.asked.append("owns")
        return True

    def agree(self, step, made):
        self.asked.append("agree")
        return super().agree(step, made)

    def share(self, step, moves):
        self.asked.append("share")
        return moves


class Partner(Alone):
    """Owns all layers but one, whose moves come from elsewhere."""

    def __init__(self, moves):
        self.moves = moves

    def owns(self, layer):
        return layer != "hidden"

    def share(self, step, moves):
        assert not any(name.startswith("hidden") for name in moves)
        missing = {name: move for name, move in self.moves.items() if name not in moves}
        for name in missing:
            announce(step, step.optimizer.entries[name])
        return {**moves, **missing}


class Keeps(Alone):
    """Keeps the moves of a step."""

    def share(self, step, moves):
        self.moves = dict(moves)
        return moves


class Disagrees(Alone):
    """Another rank has met a number that is not finite."""

    def agree(self, step, made):
        moves, _ = super().agree(step, made)
        return moves, False


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
    other, exchange = copy.deepcopy(plain), Listener()
    trained(plain, None)
    trained(other, exchange)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))
    assert set(exchange.asked) == {"gather", "owns", "share", "agree"}


def test_moves_may_come_from_another_rank():
    torch.manual_seed(0)
    plain = Net(8)
    other = copy.deepcopy(plain)
    keeps = Keeps()
    trained(plain, keeps)
    trained(other, Partner(keeps.moves))
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_all_ranks_skip_if_one_must():
    torch.manual_seed(0)
    model = Net(8)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = trained(model, Disagrees())
    assert optimizer.skipped == 1
    assert all(map(torch.equal, before, model.parameters()))
