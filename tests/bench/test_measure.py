"""Turns, and what happens to a method that breaks, runs out of memory or is slow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from mukron.bench import memory
from mukron.bench.conv import conv_bench
from mukron.bench.kfac_step import KFAC_STEP
from mukron.bench.measure import (
    SLOW_ROUNDS,
    WARM_UP_TURNS,
    MethodTiming,
    Options,
    product_precision,
    take_turns,
    time_turn,
    warm_up,
)
from mukron.bench.methods import TORCH_SGD, BenchMethod, Trainer
from mukron.bench.peers import choose_peers
from mukron.bench.shampoo_step import SHAMPOO_STEP
from mukron.bench.steps import Bench, StepsRun
from mukron.bench.tasks import POOL_SIZE, Task, mlp_task


def quiet(work, description):
    return work


def rows_of(bench: Bench, **options):
    chosen = Options(**{"widths": (8,), "batch": 4, "rounds": 5, "against": "all", "memory": False, **options})
    (rows,) = StepsRun(bench, chosen, "").rows(quiet, quiet)
    return {row.method: row for row in rows}


@dataclass
class Counting(Trainer):
    """Notes which batches it saw; breaks at a step of choice."""

    seen: list | None = None
    breaks: Exception | None = None
    at: int = 0

    def __call__(self, x, y):
        self.seen.append(float(x.sum()))
        if self.breaks is not None and len(self.seen) > self.at:
            raise self.breaks
        return super().__call__(x, y)


def counting(seen, breaks=None, at=0, package="torch", period=1) -> BenchMethod:
    def make(model, lr):
        return Counting(model, torch.optim.SGD(model.parameters(), lr), seen, breaks, at)

    return BenchMethod("other", make, package=package, period=period)


def bench(*peers: BenchMethod) -> Bench:
    return Bench("small", mlp_task(), (TORCH_SGD,), peers)


def test_every_step_has_the_next_batch_of_the_pool():
    seen = []
    row = rows_of(bench(counting(seen, period=10)))["other"]
    assert len(row.milliseconds) == 5
    assert len(seen) == 10 * (WARM_UP_TURNS + 5)
    assert len(set(seen)) == POOL_SIZE
    assert seen[:POOL_SIZE] == seen[POOL_SIZE : 2 * POOL_SIZE]


@pytest.mark.parametrize("at", [0, WARM_UP_TURNS, WARM_UP_TURNS + 2])
def test_a_peer_that_breaks_is_listed_and_the_others_go_on(at):
    rows = rows_of(bench(counting([], ValueError("no such thing\nand more"), at)))
    assert rows["other"].failed == "ValueError: no such thing"
    assert rows["other"].milliseconds == ()
    assert len(rows["SGD"].milliseconds) == 5


def test_our_own_method_must_not_break():
    ours = Bench("small", mlp_task(), (TORCH_SGD, counting([], ValueError("no such thing"), package=None)))
    with pytest.raises(RuntimeError, match="other: no such thing"):
        rows_of(ours)


def test_out_of_memory_is_listed_for_our_own_too():
    ours = Bench(
        "small", mlp_task(), (TORCH_SGD, counting([], torch.OutOfMemoryError("tried to allocate"), package=None))
    )
    assert rows_of(ours)["other"].failed == "out of memory"


def test_a_loss_that_is_not_finite_is_no_time():
    def make(model, lr):
        return Trainer(model, torch.optim.SGD(model.parameters(), lr=1e38))

    rows = rows_of(bench(BenchMethod("other", make, package="torch")))
    assert "no longer finite" in rows["other"].failed


def test_a_slow_method_is_measured_for_fewer_rounds():
    rows = rows_of(bench(), patience=0.0)
    assert len(rows["SGD"].milliseconds) == SLOW_ROUNDS


def test_all_take_their_turns_in_an_order_that_changes():
    order = []

    @dataclass
    class Noting(Trainer):
        name: str = ""

        def __call__(self, x, y):
            order.append(self.name)
            return torch.zeros(())

    timings = []
    for name in "abcd":
        method = replace(TORCH_SGD, name=name)
        trainer = Noting(None, None, name)
        timings.append(MethodTiming(method, trainer, iter([(0, 0)] * 9), rounds=6))
    take_turns(timings, range(6), "cpu")
    rounds = ["".join(order[start : start + 4]) for start in range(0, 24, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len(set(rounds)) > 1


def test_labels_learn_from_the_teacher():
    """Labels say something about inputs: a linear fit to half of the pool does well on the other half."""
    pool = Task("", torch.nn.Identity, (6,), 4, (1, 1)).pool(256, "cpu")
    x, y = (torch.cat(parts) for parts in zip(*pool, strict=True))
    fit = torch.linalg.lstsq(x[:2048], torch.nn.functional.one_hot(y[:2048], 4).float()).solution
    right = ((x[2048:] @ fit).argmax(1) == y[2048:]).float().mean()
    assert 0.6 < float(right) < 1


def test_profile_says_where_the_time_goes():
    parts = rows_of(replace(KFAC_STEP, methods=KFAC_STEP.methods[:3], peers=()), profile=True)
    assert parts["SGD"].parts is None
    found = parts["K-FAC (mc), fused"].parts
    assert {"forward", "backward", "step"} <= set(found)
    assert all(spent > 0 for spent in found.values())


def test_memory_of_kfac_holds_no_matrix_of_a_layers_size():
    width, batch = 2048, 32
    found = {}
    for name in ("SGD", "K-FAC (mc)"):
        found[name] = memory.peak_in_subprocess("kfac-step", name, width, batch)
    parameters = (784 * width + width**2 + width * 10) * 4 / 2**20
    assert 2 * parameters < found["SGD"]  # weights and gradients, and momentum
    assert found["K-FAC (mc)"] < found["SGD"] + width**2 * 4 / 2**20


def test_memory_of_a_process_that_breaks_is_not_known():
    assert memory.peak_in_subprocess("kfac-step", "no such method", 8, 4) is None


@pytest.mark.parametrize("name", ["float32", "tf32"])
def test_precision_is_put_back(name):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with product_precision(name):
        assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"widths": ()}, "expected whole numbers from 1 on"),
        ({"widths": (0,)}, "expected whole numbers from 1 on"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose cpu or cuda"),
        ({"precision": "float8"}, "unknown precision 'float8'; choose float32 or tf32"),
        ({"precision": "tf32"}, "is of GPUs"),
    ],
)
def test_wrong_options_are_refused_with_a_way_out(options, said):
    with pytest.raises(ValueError, match=said):
        Options(**{"widths": (8,), **options})


def test_peers_are_chosen_by_their_names():
    here = BenchMethod("here", TORCH_SGD.make, package="torch")
    missing = BenchMethod("missing", TORCH_SGD.make, package="no-such-package")
    assert choose_peers([here, missing], "all") == ((here,), ("no-such-package",))
    assert choose_peers([here, missing], "none") == ((), ())
    assert choose_peers([here, missing], "torch") == ((here,), ())
    with pytest.raises(ValueError, match=r"unknown peer 'jax'; this benchmark knows torch, no-such-package"):
        choose_peers([here, missing], "torch,jax")
    with pytest.raises(ValueError, match=r"not installed: pip install 'mukron\[peers\]'"):
        choose_peers([here, missing], "no-such-package")


def test_missing_peers_are_named_in_a_note():
    run = StepsRun(bench(BenchMethod("missing", TORCH_SGD.make, package="no-such-package")), Options((8,)), "")
    assert any("not measured: no-such-package" in note for note in run.result.notes)


@pytest.mark.parametrize(
    ("bench", "name"),
    [(KFAC_STEP, "K-FAC, defaults"), (conv_bench(), "K-FAC, defaults"), (SHAMPOO_STEP, "Shampoo, defaults")],
)
def test_the_defaults_are_a_users_own_and_every_timed_turn_refreshes_once(bench, name):
    method, task, pool = bench.method(name), mlp_task(), mlp_task().pool(8, "cpu")
    timing, refreshes = MethodTiming(method), []
    warm_up(timing, task.build(8, "cpu"), pool, Options((8,)))
    optimizer = timing.trainer.optimizer
    given = type(optimizer)(task.build(8, "cpu"))
    assert optimizer.options == given.options
    assert optimizer.defaults == given.defaults
    optimizer.watch(lambda layer, *_: refreshes.append((optimizer.steps, layer)))
    for _ in range(2):
        before = len({step for step, _ in refreshes})
        time_turn(timing, "cpu")
        assert len({step for step, _ in refreshes}) == before + 1


def test_notes_say_which_step_is_timed():
    assert any("trust=None" in note for note in StepsRun(KFAC_STEP, Options((8,), against="none"), "").result.notes)
