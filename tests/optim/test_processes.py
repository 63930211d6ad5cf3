"""Two processes: either a step is that of the joined batch, or it is refused on both."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from ranks import in_code

import mukron

START = """
import os, sys, torch
from contextlib import nullcontext
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
import pytest
import mukron
from networks import INPUTS, Net

def together():
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

def network():
    torch.manual_seed(0)
    return Net(8).double()

def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, INPUTS, dtype=torch.float64, generator=generator)
    return x, torch.arange(12) % 3

def train(called, optimizer, steps, part=slice(None)):
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(called(x[part]), y[part]).backward()
        optimizer.step()

half = slice(6 * rank, 6 * rank + 6)
"""


def in_two_processes(code: str, folder: Path) -> None:
    in_code(START + textwrap.dedent(code), 2, folder)


NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_methods_that_need_gradients_alone_take_the_steps_of_the_joined_batch(tmp_path):
    """Wrapped before the optimizer is made, or after it, as Accelerate does."""
    in_two_processes(
        """
        together()
        # and how far from the joined batch's; of SOAP's QR rounding chooses the basis of directions without a gradient
        methods = {
            "shampoo": (lambda m: mukron.Shampoo(m, lr=0.05), 1e-10),
            "shampoo, plain": (lambda m: mukron.Shampoo(m, lr=0.01, trust=None), 1e-10),
            "shampoo, graft": (lambda m: mukron.Shampoo(m, lr=0.01, trust=mukron.Graft("adam")), 1e-10),
            "soap": (lambda m: mukron.SOAP(m, lr=0.05, inverse_every=3), None),
            "soap, eigh": (lambda m: mukron.SOAP(m, lr=0.05, inverse_every=3, solver="eigh"), 1e-8),
            "muon": (lambda m: mukron.Muon(m, lr=0.02), 1e-10),
        }
        for name, (make, _) in methods.items():
            wrapped = DDP(network())
            train(wrapped, make(wrapped), 20, half)
            plain = network()
            late = make(plain)
            train(DDP(plain), late, 20, half)
            for a, b in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
                assert torch.equal(a, b), name
                other = [torch.empty_like(a) for _ in range(2)]
                torch.distributed.all_gather(other, a.detach())
                assert torch.equal(*other), name
            torch.save(plain.state_dict(), f"{file}-{name}-{rank}.pt")
        torch.distributed.destroy_process_group()
        for name, (make, tolerance) in methods.items():  # in one process, on the joined batch
            if tolerance is None:
                continue
            alone = network()
            train(alone, make(alone), 20)
            saved = torch.load(f"{file}-{name}-{rank}.pt")
            for key, value in alone.state_dict().items():
                torch.testing.assert_close(value, saved[key], rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")
        """,
        tmp_path,
    )


def test_ranks_stay_alike_with_the_options_of_the_wrapper(tmp_path):
    """In three precisions, with accumulated micro-batches, and over a comparison in the middle."""
    in_two_processes(
        """
        import mukron.optim.processes as processes
        processes.COMPARED_EVERY = 3
        together()
        methods = {mukron.Shampoo: 0.05, mukron.SOAP: 0.05, mukron.Muon: 0.02}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for options in ({"static_graph": True}, {"find_unused_parameters": True}, {}):
                for make, lr in methods.items():
                    wrapped = DDP(network().to(dtype), **options)
                    optimizer = make(wrapped, lr=lr)
                    for step in range(7):
                        x, y = (each[half] for each in batch(step))
                        optimizer.zero_grad()
                        if not options:
                            with wrapped.no_sync():
                                F.cross_entropy(wrapped(x[:3].to(dtype)), y[:3]).backward()
                        F.cross_entropy(wrapped(x[3:].to(dtype)), y[3:]).backward()
                        optimizer.step()
                    assert optimizer.steps == 7
                    for parameter in wrapped.parameters():
                        other = [torch.empty_like(parameter) for _ in range(2)]
                        torch.distributed.all_gather(other, parameter.detach())
                        assert torch.equal(*other), (dtype, options)
        """,
        tmp_path,
    )


def test_curvature_of_the_joined_batch_where_the_model_is_wrapped_later(tmp_path):
    """Optimizers that were made before the processes met, and gradients that are averaged by hand; no fused steps."""
    in_two_processes(
        """
        early = {make: make(network(), lr=0.05) for make in (mukron.KFAC, mukron.FOOF, mukron.GaussNewton)}
        together()
        for make, optimizer in early.items():
            train(DDP(optimizer.model), optimizer, 4, half)
            wrapped = DDP(network())
            train(wrapped, make(wrapped, lr=0.05), 4, half)
            byhand = network()
            of_hand = make(byhand, lr=0.05)
            for step in range(4):
                x, y = batch(step)
                of_hand.zero_grad()
                F.cross_entropy(byhand(x[half]), y[half]).backward()
                for p in byhand.parameters():
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= 2
                of_hand.step()
            for a, b, c in zip(optimizer.model.parameters(), wrapped.parameters(), byhand.parameters(), strict=True):
                assert torch.equal(a, b)
                torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)
        with pytest.raises(RuntimeError, match="gradients that are never formed cannot be averaged"):
            mukron.KFAC(network(), lr=0.05, fused=True)
        with pytest.raises(RuntimeError, match="gradients that are never formed cannot be averaged"):
            mukron.Shampoo(network(), lr=0.05, fused=True)
        """,
        tmp_path,
    )


def test_one_rank_whose_loss_is_not_finite_or_whose_inverse_fails(tmp_path):
    """Both ranks skip the step of a loss that is not finite; one rescues an inverse that failed, or both raise."""
    in_two_processes(
        """
        import mukron.optim.transaction as transaction
        from mukron.linalg import FactorizationError
        together()
        wrapped = DDP(network())
        optimizer = mukron.KFAC(wrapped, lr=0.05)
        train(wrapped, optimizer, 2, half)
        before = [p.detach().clone() for p in wrapped.parameters()]
        x, y = batch(9)
        optimizer.zero_grad()
        (F.cross_entropy(wrapped(x[half]), y[half]) * (float("nan") if rank else 1.0)).backward()
        optimizer.step()
        assert optimizer.skipped == 1
        assert all(map(torch.equal, before, wrapped.parameters()))

        plain, failures = transaction.prepare, []
        def prepare(blocks, powers, solver, rescue=True):
            prepared, numbers = plain(blocks, powers, solver, rescue)
            if rank == 1 and blocks:
                failures.append(rescue)
                prepared = [FactorizationError("made to fail"), *prepared[1:]]
            return prepared, numbers
        transaction.prepare = prepare
        with pytest.warns(RuntimeWarning, match="kept the last inverse") if rank else nullcontext():
            train(wrapped, optimizer, 1, half)
        fresh = DDP(network())
        with pytest.raises(RuntimeError, match="made to fail; raise the damping" if rank else "rank 1 could not take"):
            train(fresh, mukron.KFAC(fresh, lr=0.05), 1, half)
        assert all(map(torch.equal, fresh.module.parameters(), network().parameters()))
        transaction.prepare, failures = plain, failures[:2]
        assert optimizer.steps == 3
        assert failures == ([False, True] if rank else [])
        train(wrapped, optimizer, 2, half)
        for p in wrapped.parameters():
            other = [torch.empty_like(p) for _ in range(2)]
            torch.distributed.all_gather(other, p.detach())
            assert torch.equal(*other)
        """,
        tmp_path,
    )


METHODS = "KFAC", "FOOF", "GaussNewton", "Shampoo", "SOAP", "Muon"


def test_layers_are_shared_out_and_their_state_is_whole_when_it_is_saved(tmp_path):
    """A rank keeps the state of its own layers; what two ranks save is what one process goes on with."""
    in_two_processes(
        f"""
        import copy
        import mukron.optim.exchange as exchange
        together()
        def wide():
            torch.manual_seed(0)
            hidden = [nn.Linear(INPUTS if k == 0 else 32, 32) for k in range(6)]
            return nn.Sequential(*hidden, nn.Linear(32, 3)).double()
        def make(name, model):  # of SOAP's QR rounding chooses the basis of directions without a gradient
            options = {{"solver": "eigh"}} if name == "SOAP" else {{}}
            if name in ("KFAC", "FOOF", "GaussNewton"):  # rows of small layers may be cheaper sent to all
                options["communication"] = "owner"
            return getattr(mukron, name)(model, lr=0.02, **options)
        for name in {METHODS}:
            wrapped = DDP(wide())
            optimizer = make(name, wrapped)
            train(wrapped, optimizer, 3, half)
            known = {{layer for layer, entry in optimizer.layers.items()
                      if any(key not in exchange.EVERYWHERE for key in optimizer.state[entry.anchor])}}
            assert known == {{layer for layer, owner in optimizer.together.owned.owner.items() if owner == rank}}, name
            both = [None, None]
            torch.distributed.all_gather_object(both, sorted(known))
            assert sorted(both[0] + both[1]) == sorted(optimizer.layers), name
            assert abs(len(both[0]) - len(both[1])) <= 2, (name, both)
            state, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(wrapped.module.state_dict())
            train(wrapped, optimizer, 3, half)
            again = DDP(wide())
            again.module.load_state_dict(before)
            resumed = make(name, again)
            resumed.load_state_dict(state_dict=state)
            train(again, resumed, 3, half)
            for a, b in zip(wrapped.parameters(), again.parameters(), strict=True):
                assert torch.equal(a, b), name
            if rank == 0:
                torch.save((state, before, wrapped.module.state_dict()), f"{{file}}-{{name}}.pt")
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        for name in {METHODS}:
            state, before, after = torch.load(f"{{file}}-{{name}}.pt", weights_only=True)
            alone = wide()
            alone.load_state_dict(before)
            optimizer = make(name, alone)
            optimizer.load_state_dict(state)
            train(alone, optimizer, 3)
            for key, value in alone.state_dict().items():
                torch.testing.assert_close(value, after[key], rtol=1e-6, atol=1e-8, msg=f"{{name}}: {{key}}")
        """,
        tmp_path,
    )


def test_a_state_that_one_rank_alone_saves_is_refused_and_so_are_other_ranks(tmp_path):
    in_two_processes(
        """
        import copy, datetime
        import mukron.optim.exchange as exchange
        exchange.WAITS_FOR_RANKS = datetime.timedelta(seconds=3)
        together()
        wrapped = DDP(network())
        optimizer = mukron.KFAC(wrapped, lr=0.05)
        train(wrapped, optimizer, 2, half)
        other, of_other = copy.deepcopy((wrapped.module, optimizer))
        if rank == 0:
            with pytest.raises(RuntimeError, match="called on rank 0, but not on all of 2 ranks"):
                optimizer.state_dict()
        else:
            import time
            time.sleep(6)
        torch.distributed.destroy_process_group()
        F.cross_entropy(other(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(RuntimeError, match="spread over 2 processes"):
            of_other.step()
        """,
        tmp_path,
    )


def test_copies_have_the_whole_state_but_no_group(tmp_path):
    """Before their first step, too; one that averages gradients itself is refused until it is given its group again."""
    in_two_processes(
        """
        import copy
        from mukron.optim.saving import Bundle
        from states import contents
        together()
        for given in ({}, {"process_group": torch.distributed.group.WORLD}):
            model = network()
            called = model if given else DDP(model)
            optimizer = mukron.KFAC(called, lr=0.05, communication="owner", **given)
            train(called, optimizer, 2, half)
            other, of_other = copy.deepcopy((model, optimizer))
            assert Bundle(contents(of_other)) == Bundle(contents(optimizer))
        F.cross_entropy(other(batch(2)[0][half]), batch(2)[1][half]).backward()
        with pytest.raises(RuntimeError, match="the gradients of 2 processes differ"):
            of_other.step()
        again = mukron.KFAC(other, lr=0.05, communication="owner", **given)
        again.load_state_dict(of_other.state_dict())
        train(other, again, 2, half)
        train(model, optimizer, 2, half)
        assert all(map(torch.equal, model.parameters(), other.parameters()))
        """,
        tmp_path,
    )


def test_gradients_that_are_not_averaged_are_refused_on_every_rank(tmp_path):
    in_two_processes(
        """
        together()
        model = network()
        optimizer = mukron.Muon(model, lr=0.02)
        with pytest.raises(RuntimeError, match="gradients of 2 processes differ"):
            train(model, optimizer, 1, half)

        model = network()
        optimizer = mukron.Muon(model, lr=0.02)
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x[half]), y[half]).backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
        wrapped = DDP(network())
        optimizer = mukron.Muon(wrapped, lr=0.02)
        with wrapped.no_sync(), pytest.raises(RuntimeError, match="outside of no_sync"):
            train(wrapped, optimizer, 1, half)
        wrapped = DDP(network())
        with pytest.raises(RuntimeError, match="Call the wrapped model, the DistributedDataParallel"):
            train(wrapped.module, mukron.Muon(wrapped, lr=0.02), 1, half)
        """,
        tmp_path,
    )


def test_weights_and_learning_rates_that_differ_are_refused(tmp_path):
    """Also after a refusal that was caught, in a copy, and where ranks disagree in the order of entries alone."""
    in_two_processes(
        """
        import copy
        together()

        def average(model):
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)

        torch.manual_seed(rank)
        apart = Net(8).double()
        optimizer = mukron.Muon(apart, lr=0.02)
        for _ in range(2):
            F.cross_entropy(apart(batch(0)[0]), batch(0)[1]).backward()
            average(apart)
            with pytest.raises(RuntimeError, match="the weights of 2 processes differ"):
                optimizer.step()
        wrapped = DDP(network())
        with pytest.raises(RuntimeError, match="differ. Give all of them the same learning rates"):
            train(wrapped, mukron.Muon(wrapped, lr=0.02 + 0.01 * rank), 1, half)
        optimizer = mukron.Muon(wrapped, lr=0.02)
        train(wrapped, optimizer, 2, half)
        other, of_other = copy.deepcopy((wrapped.module, optimizer))
        with pytest.raises(RuntimeError, match="the gradients of 2 processes differ"):
            train(other, of_other, 1, half)
        square = nn.Linear(4, 4, bias=False)
        nn.init.eye_(square.weight)
        square(torch.eye(4)[rank : rank + 1]).sum().backward()
        with pytest.raises(RuntimeError, match="the gradients of 2 processes differ"):
            mukron.Muon(square, lr=0.02, exclude=()).step()
        """,
        tmp_path,
    )


def test_equal_gradients_pass_with_any_number_of_threads(tmp_path):
    in_two_processes(
        """
        together()
        torch.set_num_threads(1 + rank)
        torch.manual_seed(0)
        wrapped = DDP(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)))
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
        optimizer = mukron.Muon(wrapped, lr=0.02)
        wrapped(x).logsumexp(1).mean().backward()
        optimizer.step()
        assert optimizer.steps == 1
        """,
        tmp_path,
    )


def test_each_process_by_itself(tmp_path):
    """In a process group of one rank every method trains alone, K-FAC too."""
    in_two_processes(
        """
        together()
        own = [torch.distributed.new_group([k]) for k in range(2)][rank]
        for make in (mukron.KFAC, mukron.Muon):
            wrapped = DDP(network(), process_group=own)
            optimizer = make(wrapped, lr=0.02)
            train(wrapped, optimizer, 2 + rank, half)
            assert optimizer.steps == 2 + rank
        """,
        tmp_path,
    )


def test_one_rank_whose_loss_is_not_finite_skips_the_step_on_both(tmp_path):
    in_two_processes(
        """
        together()
        wrapped = DDP(network())
        optimizer = mukron.Shampoo(wrapped, lr=0.05)
        train(wrapped, optimizer, 2, half)
        before = [p.detach().clone() for p in wrapped.parameters()]
        x, y = batch(9)
        optimizer.zero_grad()
        (F.cross_entropy(wrapped(x[half]), y[half]) * (float("nan") if rank else 1.0)).backward()
        optimizer.step()
        assert optimizer.skipped == 1
        assert all(map(torch.equal, before, wrapped.parameters()))
        train(wrapped, optimizer, 2, half)
        assert optimizer.steps == 4
        """,
        tmp_path,
    )


def test_models_that_are_sharded_too_late_or_twice_are_refused(tmp_path):
    in_two_processes(
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        together()
        model = network()
        early = mukron.Muon(model, lr=0.02)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(RuntimeError, match="shard the model first, then make the optimizer"):
            early.step()
        world = torch.distributed.group.WORLD
        for called, how in ((model, "fully_shard"), (DDP(network()), "DistributedDataParallel")):
            with pytest.raises(RuntimeError, match=f"but {how} averages those of this one already"):
                mukron.KFAC(called, lr=0.02, process_group=world)
        with pytest.raises(RuntimeError, match="leave decoupled=True"):
            mukron.Shampoo(model, lr=0.02, weight_decay=0.1, decoupled=False)
        with pytest.raises(TypeError, match="process_group must be a group of torch.distributed .* got 2"):
            mukron.KFAC(network(), lr=0.02, process_group=2)
        with pytest.raises(ValueError, match="unknown communication 'ring'"):
            mukron.KFAC(network(), lr=0.02, communication="ring")
        """,
        tmp_path,
    )


@pytest.mark.parametrize("how", ["process_group", "DistributedDataParallel", "fully_shard"])
def test_a_rank_that_dies_ends_the_others(how, tmp_path):
    """They get an error from the exchange at once, in each of the three ways to train."""
    if how == "fully_shard" and not NEW_ENOUGH:
        pytest.skip("fully_shard trains on CPUs from torch 2.9 on")
    in_two_processes(
        f"""
        import time
        from ranks import END
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        together()
        model, group = network(), {{}}
        called = model
        if {how!r} == "fully_shard":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        elif {how!r} == "process_group":
            group = {{"process_group": torch.distributed.group.WORLD}}
        else:
            called = DDP(model)
        optimizer = mukron.KFAC(called, lr=0.05, **group)
        train(called, optimizer, 2, half)
        if rank:
            print(END, flush=True)
            os._exit(0)
        time.sleep(1)
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            train(called, optimizer, 1, half)
        assert time.monotonic() - begin < 60
        """,
        tmp_path,
    )


def test_one_rank_that_fails_or_has_no_number_is_heard_of_in_each_way(tmp_path):
    """A loss that is not finite, and an input that was changed in place: on one rank alone."""
    in_two_processes(
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        together()
        new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
        for how in ("own", "sharded") if new else ("own",):
            for make in (mukron.KFAC, mukron.Shampoo):
                model = network()
                if how == "sharded":
                    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
                group = {"process_group": torch.distributed.group.WORLD} if how == "own" else {}
                optimizer = make(model, lr=0.05, **group)
                train(model, optimizer, 2, half)
                before = [p.detach().clone() for p in model.parameters()]
                x, y = batch(9)
                optimizer.zero_grad()
                (F.cross_entropy(model(x[half]), y[half]) * (float("nan") if rank else 1.0)).backward()
                optimizer.step()
                assert optimizer.skipped == 1, (how, make)
                assert all(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True))
                train(model, optimizer, 1, half)
                assert optimizer.steps == 3
        model = network()
        optimizer = mukron.KFAC(model, lr=0.05, process_group=torch.distributed.group.WORLD)
        train(model, optimizer, 1, half)
        import mukron.optim.exchange as exchange
        plain = exchange.by_kind
        def fails(passes):
            raise ValueError("made to fail")
        exchange.by_kind = fails if rank else plain
        match = "made to fail" if rank else "rank 1 could not take this step, so none does: ValueError: made to fail"
        with pytest.raises(ValueError if rank else RuntimeError, match=match):
            train(model, optimizer, 1, half)
        exchange.by_kind = plain
        train(model, optimizer, 1, half)
        assert optimizer.steps == 2
        """,
        tmp_path,
    )


def test_other_kinds_of_sharding_are_refused_by_name(monkeypatch):
    class FullyShardedDataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

    shapes = mukron.base_shapes(lambda width: torch.nn.Linear(3, width), 1)
    with monkeypatch.context() as patched:
        import torch.distributed.fsdp as fsdp

        patched.setattr(fsdp, "FullyShardedDataParallel", FullyShardedDataParallel)
        with pytest.raises(ValueError, match="FSDP1"):
            mukron.Shampoo(FullyShardedDataParallel())
        with pytest.raises(ValueError, match=r"FSDP1.*shard it by torch.distributed.fsdp.fully_shard"):
            mukron.parametrize(FullyShardedDataParallel(), shapes)
    model = torch.nn.Linear(3, 3)
    model.weight.ds_id = 0
    with pytest.raises(ValueError, match="DeepSpeed's ZeRO"):
        mukron.Shampoo(model)
    with pytest.raises(ValueError, match="DeepSpeed's ZeRO"):
        mukron.parametrize(model, shapes)


def test_processes_that_do_not_know_of_each_other_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = torch.nn.Linear(3, 2)
    optimizer = mukron.Shampoo(model, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.warns(UserWarning, match="4 processes were started .* torch.distributed is not initialized"):
        optimizer.step()
    optimizer.step()  # once
