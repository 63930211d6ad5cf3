"""What ranks run in ``test_every_step.py``."""

from __future__ import annotations

import copy
import datetime
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
from joined_batches import METHODS
from ranks import OWN, SPREAD, WRAPPED, batch, bounds, called_by, equal_everywhere, made, reference_of, trained, whole
from torch import nn
from torch.nn import functional as F

import mukron

warnings.simplefilter("ignore")
F64 = torch.float64


def mistakes(rank, folder):
    """What is no step of the joined batch is refused when it happens, and not when weights are compared again."""
    for make in (METHODS["kfac"], METHODS["foof"], METHODS["muon"]):
        for mistake in ("the inner model", "no_sync", "another learning rate"):
            model = made("mlp", F64)
            called = called_by(WRAPPED, "mlp", model)
            optimizer = make(called)
            for step in range(4):
                x, y = (part[6 * rank : 6 * rank + 6] for part in batch("mlp", step, F64))
                optimizer.zero_grad()
                before = copy.deepcopy(model.state_dict())
                if step == 3 and mistake == "another learning rate":
                    optimizer.param_groups[0]["lr"] *= 1 + rank
                if step == 3 and mistake == "no_sync":
                    with called.no_sync():
                        F.cross_entropy(called(x), y).backward()
                else:
                    right = step < 3 or mistake != "the inner model"
                    F.cross_entropy((called if right else model)(x), y).backward()
                if step < 3:
                    optimizer.step()
                    continue
                apart = "learning rates" if "rate" in mistake else "gradients"
                with pytest.raises(RuntimeError, match=f"the {apart} of 2 processes differ"):
                    optimizer.step()
                assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


SLIPS = {  # what one rank alone does in the fourth step -> what is said on all
    "evaluates": "no forward pass of the model was seen",
    "a pass again": "no forward pass of the model was seen",
    "another decay": r"the weight decays of 2 processes differ \(in group 0: 0.0, 0.1\)",
    "another damping": r'the settings "damping" of 2 processes differ',
    "frozen": "the parameters that are trained",
    "clipped, not averaged": "the gradients of 2 processes differ",
}


def slips(rank, folder):
    """A process that does something else than the others is told of at once, on all of them."""
    for name, how in (("foof", WRAPPED), ("kfac", OWN), ("kfac, empirical", WRAPPED), ("shampoo", OWN)):
        for slip, said in SLIPS.items():
            unmeasured = slip in ("evaluates", "a pass again")
            if (how == OWN) == (slip == "clipped, not averaged") or (name == "shampoo" and unmeasured):
                continue  # gradients are averaged by the step; or nothing is measured
            if how == WRAPPED and slip in ("a pass again", "frozen"):
                continue  # DistributedDataParallel itself refuses these
            model = made("mlp", F64)
            called = called_by(how, "mlp", model)
            group = {"process_group": torch.distributed.group.WORLD} if how == OWN else {}
            optimizer = METHODS[name](called, **group)
            for step in range(4):
                x, y = (part[6 * rank : 6 * rank + 6] for part in batch("mlp", step, F64))
                optimizer.zero_grad()
                here = step == 3 and rank == 1
                if here and slip == "evaluates":
                    model.eval()
                if here and slip.startswith("another"):
                    key = "weight_decay" if "decay" in slip else "damping"
                    optimizer.param_groups[0][key] += 0.1
                if here and slip == "frozen":
                    model[0].weight.requires_grad_(False)
                not_averaged = step == 3 and slip == "clipped, not averaged"
                before, caught = copy.deepcopy(model.state_dict()), nullcontext()
                if step == 3:  # the others wait in their backward pass for the numbers of samples that are drawn for
                    waits = "|did not come together" if unmeasured and name == "kfac" else ""
                    caught = pytest.raises(RuntimeError, match=said + waits)
                with caught:
                    loss = F.cross_entropy((model if not_averaged else called)(x), y)
                    if here and slip == "a pass again":
                        loss.backward(retain_graph=True)
                        optimizer.zero_grad()
                    loss.backward()
                    if not_averaged:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                    optimizer.step()
                same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
                assert same == (step == 3)


def nothing_first(rank, folder):
    """A micro-batch whose targets are all ignored, before one that counts: its zero gradient was not thrown away."""
    size = torch.distributed.get_world_size()

    def trained(name, ranks, how):
        model = made("mlp", F64)
        called = called_by(how, "mlp", model)
        optimizer = METHODS[name](called, **({"process_group": torch.distributed.group.WORLD} if how == OWN else {}))
        for step in range(4):
            optimizer.zero_grad()
            for k in range(2):
                x, y = batch("mlp", 2 * step + k, F64)
                y = torch.full_like(y, -100) if k == 0 and step % 2 else y
                part = slice(6 * rank, 6 * rank + 6) if ranks > 1 else slice(None)
                n = 12 if step % 2 else 24
                (F.cross_entropy(called(x[part]), y[part], reduction="sum") * ranks / n).backward()
            optimizer.step()
        return {key: value.detach().clone() for key, value in model.state_dict().items()}

    for name in ("kfac", "kfac, empirical", "foof", "gauss-newton"):
        for how in (WRAPPED, OWN):
            ours = trained(name, size, how)
            initialized, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False
            try:
                one = trained(name, 1, None)
            finally:
                torch.distributed.is_initialized = initialized
            for key, value in one.items():
                off = float((ours[key] - value).norm() / value.norm())
                assert off < 1e-10, f"{name}, {how}: {key} is {off:.1e} off"


class Tokens(nn.Module):
    """An embedding, a layer and a head, at every position."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 12), nn.Linear(12, 9)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


IGNORED = {  # targets [12, 5] of two ranks or three
    "some": (slice(0, 4), slice(2, None)),
    "half of a rank": (slice(0, 6), slice(2, None)),
    "all of a rank": (slice(0, 6), slice(None)),
}
WITH_POSITIONS = {
    "kfac": lambda model, **given: mukron.KFAC(model, lr=0.05, class_dim=-1, **given),
    "kfac, plain": lambda model, **given: mukron.KFAC(model, lr=0.01, class_dim=-1, trust=None, **given),
    "kfac, empirical": lambda model, **given: mukron.KFAC(
        model, lr=0.05, class_dim=-1, fisher="empirical", exclude=(), **given
    ),
    "kfac, reduce": lambda model, **given: mukron.KFAC(model, lr=0.05, class_dim=-1, sharing="reduce", **given),
    "foof": lambda model, **given: mukron.FOOF(model, lr=0.1, class_dim=-1, exclude=(), **given),
    "gauss-newton": lambda model, **given: mukron.GaussNewton(model, lr=0.05, **given),
}


def trained_with_padding(make, ignored, reduction, ranks, micro, how):
    """The weights after some steps: of this rank, or of one process, whose micro-batches are then the ranks' parts."""
    torch.manual_seed(0)
    model = Tokens().double()
    called = called_by(how, "tokens", model)
    optimizer = make(called, **({"process_group": torch.distributed.group.WORLD} if how == OWN else {}))
    ends = bounds(micro)
    mine = range(micro) if ranks == 1 else [torch.distributed.get_rank()]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randint(9, (12, 5), generator=generator) for _ in range(2))
        y[IGNORED[ignored]] = -100
        optimizer.zero_grad()
        used = (y != -100).sum() if reduction == "positions" else (y != -100).any(1).sum()
        for part in mine:
            of = slice(ends[part], ends[part + 1])
            loss = F.cross_entropy(called(x[of]).flatten(0, 1), y[of].flatten(), reduction="sum") / used
            (loss * ranks).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def padding(rank, folder):
    """Positions that the loss ignores may be on one rank alone, or in one micro-batch."""
    size = torch.distributed.get_world_size()
    for place, (name, make) in enumerate(WITH_POSITIONS.items()):
        for ignored in IGNORED:
            reduction = ("positions", "samples")[place % 2]
            how = (WRAPPED, OWN)[(place + len(ignored)) % 2]
            ours = trained_with_padding(make, ignored, reduction, size, size, how)
            equal_everywhere(ours, name)
            initialized, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False
            try:
                for micro in (1, size):
                    one = trained_with_padding(make, ignored, reduction, 1, micro, None)
                    for key, value in one.items():
                        off = float((ours[key] - value).norm() / value.norm())
                        what = f"{name}, {ignored} ignored, {how}, {micro} micro-batches: {key}"
                        assert off < 1e-10, f"{what} is {off:.1e} off"
            finally:
                torch.distributed.is_initialized = initialized


def sparse_gradients(rank, folder):
    """What one rank alone must refuse, all of them do, instead of waiting for it."""
    torch.manual_seed(0)
    model = Tokens(sparse=rank == 1)
    optimizer = mukron.KFAC(model, lr=0.05, class_dim=-1, process_group=torch.distributed.group.WORLD)
    F.cross_entropy(model(torch.arange(8).reshape(4, 2)).flatten(0, 1), torch.arange(8)).backward()
    with pytest.raises(ValueError, match=r'parameter "embedding.weight" has a sparse gradient'):
        optimizer.step()


def uneven_passes(rank, folder):
    """Targets are drawn for samples of the joined batch: with other numbers of passes ranks wait, and then say so."""
    group = torch.distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=5))
    torch.manual_seed(0)
    model = made("mlp", F64)
    optimizer = mukron.KFAC(model, lr=0.05, process_group=group)
    x, y = batch("mlp", 0, F64)

    def train():
        for _ in range(2 if rank == 0 else 1):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"did not come together"):
        train()


OWN_PASSES = ("kfac", "kfac, mc", "kfac, exact", "gauss-newton")


def no_samples(rank, folder):
    """All samples are on rank 0. Where passes of our own would wait for the other rank, both say so, and can go on."""
    for name in (*OWN_PASSES, "kfac, empirical", "foof", "shampoo"):
        for how in (SPREAD, WRAPPED, OWN):
            model = made("mlp", F64)
            called = called_by(how, "mlp", model)
            group = {"process_group": torch.distributed.group.WORLD} if how == OWN else {}
            optimizer = METHODS[name](called, **group)

            def backward(step, ends, called=called):
                x, y = (part[ends[rank] : ends[rank + 1]] for part in batch("mlp", step, F64))
                (F.cross_entropy(called(x), y, reduction="sum") * 2 / 12).backward()

            refused = how == SPREAD and name in OWN_PASSES
            if refused:
                advice = "FOOF and KFAC" if name == "gauss-newton" else 'fisher="empirical" can do without'
                with pytest.raises(RuntimeError, match=f"rank 1 of 2 got no sample of this batch.*{advice}"):
                    backward(0, (0, 12, 12))
            for step in range(2):
                optimizer.zero_grad()
                backward(step, (0, 6, 12) if refused else (0, 12, 12))
                optimizer.step()
            for key, value in reference_of("mlp", METHODS[name], F64, 2, 1, "cpu").items():
                off = float((whole(model.state_dict()[key]) - value).norm() / value.norm())
                assert off < 1e-10, f"{name}, {how}: {key} is {off:.1e} off"


def sequences_of_other_lengths(rank, folder):
    """One pass of our own for each output: with other numbers of them ranks would wait for each other."""
    for method, given in ((mukron.KFAC, {"fisher": "exact", "class_dim": -1}), (mukron.GaussNewton, {})):
        torch.manual_seed(0)
        model = Tokens()
        called = called_by(SPREAD, "tokens", model)
        optimizer = method(called, lr=0.05, **given)
        with pytest.raises(RuntimeError, match="output has 18, 27 numbers a sample on ranks 0 to 1"):
            called(torch.zeros(4, 2 + rank, dtype=torch.long))
        F.cross_entropy(called(torch.arange(8).reshape(4, 2)).flatten(0, 1), torch.arange(8)).backward()
        optimizer.step()
        assert optimizer.steps == 1


def experts_with_some_of_the_samples(rank, folder):
    """An expert got some of one rank's samples: all ranks say the same, and what they say works."""
    from test_idle_layers import Mixture
    from torch.distributed.fsdp import fully_shard

    for how in (WRAPPED, OWN, SPREAD):
        group = {"process_group": torch.distributed.group.WORLD} if how == OWN else {}
        for exclude in (None, ("experts.0", "experts.1", "experts.2")):
            torch.manual_seed(0)
            model = Mixture(3).double()
            called = fully_shard(model) if how == SPREAD else called_by(how, "mixture", model)
            optimizer = mukron.GaussNewton(called, lr=0.05, exclude=exclude, **group)
            x, y = (part[6 * rank : 6 * rank + 6] for part in batch("mlp", 0, F64))
            F.cross_entropy(called(x), y).backward()
            if exclude is not None:
                optimizer.step()
                assert optimizer.steps == 1
                continue
            with pytest.raises(RuntimeError, match=r'in a pass of 6 samples.*exclude=\("experts.0",') as error:
                optimizer.step()
            told = [None, None]
            torch.distributed.all_gather_object(told, str(error.value))
            assert told[0] == told[1]


def saved_on_one_rank(rank, folder):
    """Says soon what it waits for, and at last that nobody came, or where the others are."""
    from mukron.curvature import ranks as of_curvature
    from mukron.optim import exchange

    of_curvature.SOON, exchange.WAITS_FOR_RANKS = 0.2, datetime.timedelta(seconds=3)
    for waits in ("barrier", "not at all"):
        model = made("mlp", F64)
        called = called_by(WRAPPED, "mlp", model)
        optimizer = METHODS["kfac"](called)
        x, y = (part[6 * rank : 6 * rank + 6] for part in batch("mlp", 0, F64))
        F.cross_entropy(called(x), y).backward()
        optimizer.step()
        if waits == "barrier":
            if rank == 1:
                torch.distributed.barrier()  # as people do while the first rank saves
            with pytest.raises(RuntimeError, match=r"rank 0 was in state_dict\(\), rank 1 was in the step"):
                optimizer.state_dict() if rank == 0 else optimizer.step()
        elif rank == 0:
            with (
                pytest.warns(UserWarning, match="waits to be called on all of 2 ranks"),
                pytest.raises(RuntimeError, match="on rank 0, but not on all of 2 ranks"),
            ):
                optimizer.state_dict()
        else:
            time.sleep(4)


def alone(rank, folder):
    """One process with a model that ``fully_shard`` has taken, as on a machine with one GPU."""
    for name, make in METHODS.items():
        for kind in ("mlp", "small"):
            ours = trained(kind, make, F64, 4, 1, 0, how=SPREAD)
            for key, value in reference_of(kind, make, F64, 4, 1, "cpu").items():
                off = float((ours[key] - value).norm() / value.norm())
                assert off < 1e-10, f"{name}, {kind}: {key} is {off:.1e} off"
    model = made("mlp", F64)
    optimizer = METHODS["kfac"](called_by(SPREAD, "mlp", model))
    x, y = batch("mlp", 0, F64)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.steps == 1
