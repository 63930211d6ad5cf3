"""What ranks run in ``test_sent_ahead.py``."""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
import warnings
from functools import partial

import ranks
import torch
from joined_batches import METHODS
from ranks import OWN, SPREAD, WRAPPED, bounds, called_by, made, whole
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mukron.optim import exchange
from mukron.optim.counting import CollectiveCount

warnings.simplefilter("ignore")
STEPS = 7
EVERY = ("kfac", "kfac, plain", "kfac, empirical", "kfac, reduce", "kfac, window", "foof", "gauss-newton")
STATISTICS = "all_to_all"  # the collective that brings them


class Run:
    """A few steps of this rank, as one of several; ``during`` is told of each backward pass before its step."""

    def __init__(self, kind, make, how=WRAPPED, again=False, dtype=torch.float64, **given):
        size = torch.distributed.get_world_size()
        self.rank, self.model = torch.distributed.get_rank(), made(kind, dtype)
        called = called_by(how, kind, self.model)
        group = {"process_group": torch.distributed.group.WORLD} if how == OWN else {}
        self.optimizer = make(called, **group, **given)
        self.forward = partial(checkpoint, called, use_reentrant=False) if again else called
        self.kind, self.size, self.dtype = kind, size, dtype

    def loss(self, seed, rows=12, part=None):
        from ranks import batch

        x, y = batch(self.kind, seed, self.dtype, rows)
        ends = bounds(self.size, rows)
        part = slice(ends[self.rank], ends[self.rank + 1]) if part is None else part
        return F.cross_entropy(self.forward(x[part]), y[part], reduction="sum") * (self.size / rows)

    def begun(self):
        """Messages of this step that are on their way."""
        ahead = self.optimizer.together.ahead
        return 0 if ahead is None else len(ahead.begun)

    def weights(self):
        return {name: whole(value.detach()) for name, value in self.model.state_dict().items()}


def alike(one, other, what):
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{what}: {name} differs by {(value - other[name]).abs().max():.1e}"


def compared(what, train):
    """The same, bit for bit, whether statistics are sent ahead or not; returns what was begun by the end of a pass."""
    begun = []
    ahead = train(begun)
    send_ahead, exchange.ahead_of = exchange.ahead_of, lambda optimizer, ranks: None
    try:
        alike(ahead, train([]), what)
    finally:
        exchange.ahead_of = send_ahead
    return begun


def plainly(begun, kind, make, how, **given):
    run = Run(kind, make, how, **given)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        begun.append(run.begun())
        run.optimizer.step()
    return run.weights()


def every_way(rank, folder):
    """From the third step on all messages have begun when the backward pass ends, with every method and way."""
    ways = ("rows", "owner", "factors")
    for place, name in enumerate(EVERY):
        for how in (WRAPPED, OWN):
            way = ways[(place + (how == OWN)) % 3]
            what = f"{name}, {how}, {way}"
            begun = compared(what, partial(plainly, kind="mlp", make=METHODS[name], how=how, communication=way))
            assert begun[:2] == [0, 0], f"{what}: {begun}"
            assert begun[-1] > 0, f"{what}: {begun}"
        begun = compared(f"{name}, small", partial(plainly, kind="small", make=METHODS[name], how=WRAPPED))
        assert begun[-1] > 0, f"{name}, small: {begun}"


def checkpointing(rank, folder):
    """Layers that run again in the backward pass are sent once: as many messages and bytes as where they do not."""
    for name in ("kfac", "foof"):
        begun, arrived = {}, {}
        for again in (False, True):
            with CollectiveCount() as count:
                given = {"kind": "mlp", "make": METHODS[name], "how": WRAPPED, "again": again}
                begun[again] = compared(f"{name}, {again}", partial(plainly, **given))
            arrived[again] = count.by_kind()
        assert begun[True] == begun[False], f"{name}: {begun}"
        assert begun[True][-1] > 0, f"{name}: {begun}"
        assert arrived[True] == arrived[False], f"{name}: {arrived}"


def spread(rank, folder):
    for name in EVERY:
        begun = compared(f"{name}, spread", partial(plainly, kind="mlp", make=METHODS[name], how=SPREAD))
        assert begun[-1] > 0, f"{name}: {begun}"


def nothing_twice(rank, folder):
    """What was sent in the backward pass is not sent in the step; all bytes are those of a step that waits."""
    for name, way in (("kfac", "owner"), ("kfac, plain", "rows"), ("foof", "factors")):
        counted = {}
        for waits in (False, True):
            send_ahead = exchange.ahead_of
            if waits:
                exchange.ahead_of = lambda optimizer, ranks: None
            run = Run("mlp", METHODS[name], communication=way)
            for step in range(STEPS):
                run.optimizer.zero_grad()
                with CollectiveCount() as backward:
                    run.loss(step).backward()
                with CollectiveCount() as of_step:
                    run.optimizer.step()
            exchange.ahead_of = send_ahead
            counted[waits] = backward.by_kind().get(STATISTICS, 0), of_step.by_kind().get(STATISTICS, 0)
        assert sum(counted[False]) == sum(counted[True]), f"{name}: {counted}"
        assert counted[True][0] == 0 == counted[False][1], f"{name}: {counted}"


def upset(begun, make, how, upsets):
    """What happens between a backward pass and its step is not what messages were begun for."""
    run = Run("mlp", make, how)
    for step in range(12):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=step == 4)
        begun.append(run.begun())
        upsets(run, step, loss)
        run.optimizer.step()
    return run.weights()


def thrown_away(run, step, loss):
    if step == 5:
        run.optimizer.zero_grad()
        run.loss(100).backward()


def added_to(run, step, loss):
    if step == 5:
        run.loss(100).backward()


def twice(run, step, loss):
    if step == 4:
        loss.backward()


def other_sizes(run, step, loss):
    if step in (5, 8):  # on the last rank alone the part of the batch is longer
        ends = bounds(run.size)
        part = slice(ends[run.rank], ends[run.rank + 1] + (run.rank == run.size - 1))
        run.optimizer.zero_grad()
        run.loss(100, 13, part).backward()


def not_finite(run, step, loss):
    if step == 5 and run.rank == 0:
        next(run.model.parameters()).grad.fill_(torch.nan)


def loaded(run, step, loss):
    if step in (5, 6):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.optimizer.zero_grad()
        run.loss(100).backward()


def never_stepped(run, step, loss):
    if step == 5:
        for _ in range(3):
            run.loss(100).backward()
            run.optimizer.zero_grad()
        run.loss(101).backward()


def upsets(rank, folder):
    for happens in (thrown_away, added_to, twice, other_sizes, not_finite, loaded, never_stepped):
        wrapped = OWN if happens is twice else WRAPPED  # which averages the first of two backward passes alone
        for name, how in (("kfac", wrapped), ("kfac, plain", OWN), ("kfac, empirical", wrapped), ("foof", OWN)):
            what = f"{happens.__name__}, {name}"
            begun = compared(what, partial(upset, make=METHODS[name], how=how, upsets=happens))
            assert begun[3] > 0, f"{what}: {begun}"
            assert begun[-1] > 0, f"{what}: {begun}"


def experts(rank, folder):
    """A layer that runs on one rank alone, and a batch that another rank has nothing of."""
    for name in ("kfac", "kfac, empirical", "foof"):
        compared(f"{name}, experts", partial(plainly, kind="experts", make=METHODS[name], how=WRAPPED))


def micro_batches(begun, how):
    run = Run("mlp", METHODS["kfac"], how)
    for step in range(9):
        run.optimizer.zero_grad()
        for k in range(3 if step == 7 else 2):
            run.loss(2 * step + k).backward()
            begun.append(run.begun())
        run.optimizer.step()
    return run.weights()


def accumulated(rank, folder):
    """Messages begin in the last backward pass of a step, as the last step had them."""
    for how in (WRAPPED, OWN):
        begun = compared(f"accumulated, {how}", partial(micro_batches, how=how))
        assert begun[6] == 0 < begun[7], begun
        assert begun[-2] == 0, begun


def two_optimizers(rank, folder):
    """Models that take turns, and one that is given up after a backward pass on one rank alone had gone further."""
    one, other = Run("mlp", METHODS["kfac"]), Run("small", METHODS["foof"], OWN)
    for step in range(6):
        for run in (one, other):
            run.optimizer.zero_grad()
            run.loss(step).backward()
        assert step < 4 or (one.begun() and other.begun())
        for run in (other, one):
            run.optimizer.step()
    last = Run("mlp", METHODS["kfac, empirical"], OWN)
    for step in range(6):
        last.optimizer.zero_grad()
        if step < 5 or rank == 0:  # the last one on one rank alone
            last.loss(step).backward()
        if step < 5:
            last.optimizer.step()
    begun = compared("after one that was given up", partial(plainly, kind="mlp", make=METHODS["foof"], how=WRAPPED))
    assert begun[-1] > 0, begun


def threads():
    return len(os.listdir("/proc/self/task"))


def orders_that_differ(rank, folder):
    """Two models whose passes differ in number on one rank: messages of one are never taken for those of the other."""

    def train(begun, less):
        one, other = (Run("mlp", METHODS["foof"], OWN, communication="owner") for _ in range(2))
        for step in range(7):
            one.optimizer.zero_grad()
            other.optimizer.zero_grad()
            for _ in range(2 - (less == "passes" and step == 5 and rank == 1)):
                rows = slice(0, 12) if rank == 0 else slice(12, 12)
                one.loss(step, part=rows if less == "samples" and step == 5 else None).backward()
            other.loss(100 + step).backward()
            begun.append(other.begun())
            for run in (one, other):
                run.optimizer.step()
        return one.weights() | {f"other {name}": value for name, value in other.weights().items()}

    for less in ("samples", "passes"):
        begun = compared(f"fewer {less}", partial(train, less=less))
        assert begun[-1] > 0, begun


def groups_and_lanes(rank, folder):
    """Other groups, of which a rank may be in more than others, have nothing to do with it; no lane stays behind."""
    from torch import distributed

    others = [distributed.new_group([0, 1], use_local_synchronization=True), distributed.new_group([0])]
    plainly([], "mlp", METHODS["kfac"], OWN)
    gc.collect()
    before = threads() if sys.platform == "linux" else None
    for _ in range(4):
        part = distributed.new_group([0, 1])
        given_up = METHODS["foof"](made("mlp", torch.float64), process_group=part)
        for _ in range(5):
            given_up.zero_grad()
            x, y = ranks.batch("mlp", rank, torch.float64)
            F.cross_entropy(given_up.model(x), y).backward()
            given_up.step()
        F.cross_entropy(given_up.model(x), y).backward()
        assert given_up.together.ahead.begun
        del given_up
        gc.collect()
        distributed.destroy_process_group(part)
        plainly([], "mlp", METHODS["kfac"], OWN)
    gc.collect()
    assert before is None or threads() <= before + 6  # those of the last one that was given up
    del others


def the_end_of_python(rank, folder):
    """Lanes of optimizers that a program still holds end their threads before Python does; one that waits is left."""
    from mukron.curvature.ahead import Lane

    def lane_of(run):
        return run.optimizer.together.ahead.lane

    runs = [Run("mlp", METHODS["kfac, empirical"], OWN, communication="rows") for _ in range(2)]
    for step in range(6):
        for run in runs:
            run.optimizer.zero_grad()
            if step < 5 or (run is runs[1] and rank == 0):  # at last one rank alone begins something
                run.loss(step).backward()
            if step < 5:
                run.optimizer.step()
    before = threads() if sys.platform == "linux" else None
    ended, open_lane = lane_of(runs[0]), lane_of(runs[1])
    Lane.close_all()
    assert not hasattr(ended, "group")
    assert hasattr(open_lane, "group") == (rank == 0)
    assert before is None or threads() < before
    if rank == 0:
        (folder / "looked").touch()
    while not (folder / "looked").exists():  # what rank 0 waits for fails once the other has ended
        time.sleep(0.01)
