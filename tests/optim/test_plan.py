"""The table of what is preconditioned: forms, memory, work, and every block."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, SOAP, GaussNewton, Rescaled, Shampoo, base_shapes, parametrize
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def test_plan_tells_form_memory_and_work():
    model = Net(64)
    optimizer = KFAC(model, lr=0.05, trust=None)
    assert "after the first step" in str(optimizer.plan())
    backward(model)
    optimizer.step()
    rows = {row[0]: row for row in optimizer.plan(whole=True).rows}
    assert rows["hidden"][1] == "64 x 64"
    assert rows["hidden"][2] == "A: sample space, 10 rows of 64, B: sample space, 10 rows of 64"
    assert "matrix 12" in rows["first"][2]
    assert "norm.weight, norm.bias" in str(optimizer.plan(whole=True))


@pytest.mark.parametrize("method", [Shampoo, GaussNewton])
def test_the_plan_shows_every_block(method):
    """Weights and biases have factors of their own: neither hides the other's."""
    model = Net(8)
    optimizer = method(model, lr=0.05, trust=None)
    backward(model)
    optimizer.step()
    rows = [" ".join(row) for row in optimizer.plan(whole=True).rows]
    for layer in ("first", "hidden", "head"):
        own = " ".join(row for row in rows if row.startswith(layer))
        assert "weight" in own
        assert "bias" in own
        if method is Shampoo:  # L and R of the weight, L of the bias
            assert len(re.findall(r"\bL\b", own)) >= 2
            assert len(re.findall(r"\bR\b", own)) >= 1


@pytest.mark.parametrize(("columns", "rank"), [(1, "1.0"), (4, "4.0")])
def test_the_plan_shows_effective_ranks(columns, rank):
    layer = torch.nn.Linear(8, 3, bias=False)
    optimizer = KFAC(layer, lr=0.05)
    x = torch.eye(8)[torch.arange(16) % columns]  # equally many rows along so many axes
    F.cross_entropy(layer(x), torch.arange(16) % 3).backward()
    assert "rank" not in optimizer.plan().columns
    optimizer.step()
    assert optimizer.plan(whole=True).rows[0][3].startswith(f"A: {rank} of 8, B: ")
    assert "MeanEigenvalue" in str(optimizer.plan())


def rows_shown(optimizer, model, x, steps=1):
    """The column of rows by layer, after some steps on the same inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        F.cross_entropy(output.flatten(0, -2), torch.arange(output.shape[:-1].numel()) % output.shape[-1]).backward()
        optimizer.step()
    column = optimizer.plan().columns.index("rows")
    return {row[0]: row[column] for row in optimizer.plan(whole=True).rows}


def notes_on_damping(optimizer):
    """Which of the two notes on rows the plan has."""
    notes = " ".join(optimizer.plan().notes)
    return "fewer (<)" in notes, "more (>=), ranks decide" in notes and "Damping and the number of rows" in notes


@pytest.mark.parametrize(
    ("options", "steps", "number", "of_b"),
    [
        ({}, 2, 6, "6"),
        ({"fisher": "mc:3"}, 1, 6, "18"),
        ({"fisher": "empirical"}, 1, 6, "6"),
        ({"fisher": "exact"}, 1, 6, None),
        ({"sharing": "reduce"}, 1, 2, "2"),
        ({"memory": "ema:0.5"}, 1, 6, "6"),
        ({"memory": "ema:0.5"}, 2, 9, "9"),
        ({"memory": "ema:0.5"}, 9, 12, "12"),
        ({"memory": "sum"}, 3, 18, "18"),
        ({"memory": "window:2"}, 1, 6, "6"),
        ({"memory": "window:2"}, 5, 12, "12"),
        ({"trust": "spectral"}, 2, 12, "12"),
    ],
)
def test_the_plan_counts_the_rows_of_each_factor(options, steps, number, of_b):
    """Samples x positions, times draws for B, times the batches that are remembered: whichever form factors have."""
    layer = torch.nn.Linear(8, 16)
    optimizer = KFAC(layer, lr=1e-6, class_dim=-1, **{"trust": None, **options})
    torch.manual_seed(0)
    shown = rows_shown(optimizer, layer, torch.randn(2, 3, 8), steps)[""]
    expected = "6 for each output" if of_b is None else f"{of_b} {'<' if int(of_b) < 16 else '>='} 16"
    assert shown == f"A: {number} {'<' if number < 8 else '>='} 8, B: {expected}"
    assert notes_on_damping(optimizer) == ("<" in shown, ">=" in shown)


def test_rows_are_of_this_memory_at_this_place():
    """FOOF has no B, an embedding's A is a diagonal; methods whose factors are made of gradients show no rows."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 16), torch.nn.Linear(16, 5))
    x = torch.arange(4)[None]
    assert rows_shown(FOOF(model, lr=1e-6, exclude=()), model, x) == {"0": "", "1": "A: 4 < 16"}
    assert rows_shown(KFAC(model, lr=1e-6, class_dim=-1, exclude=()), model, x) == {
        "0": "B: 4 < 16",
        "1": "A: 4 < 16, B: 4 < 5",
    }
    for make in (partial(Shampoo, damping=Rescaled(1e-3)), Shampoo, SOAP, GaussNewton):
        net = Net(8)
        optimizer = make(net, lr=1e-6)
        backward(net)
        optimizer.step()
        assert "rows" not in optimizer.plan().columns
        assert notes_on_damping(optimizer) == (False, False)
        by_ranks = "where ranks do not grow" in str(
            optimizer.plan()
        )  # whose rule has a size in it, and whose ranks show
        assert by_ranks == isinstance(make, partial)


def test_with_a_plan_rows_stand_beside_the_sizes_that_grow_with_the_width():
    model = Net(64)
    optimizer = KFAC(model, parametrize(model, base_shapes(Net, width=16)), lr=1e-6, trust=None)
    shown = rows_shown(optimizer, model, X)
    assert shown == {"first": "B: 10 < 64", "hidden": "A: 10 < 64, B: 10 < 64", "head": "A: 10 < 64"}
    assert notes_on_damping(optimizer) == (True, False)


def test_rows_that_do_not_count_are_left_out_and_a_saved_state_has_them():
    layer = torch.nn.Linear(8, 16, bias=False)
    optimizer, x = KFAC(layer, lr=1e-6, class_dim=-1), torch.randn(2, 3, 8)
    targets = torch.tensor([[1, -100, -100], [2, 3, -100]])
    F.cross_entropy(layer(x).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    optimizer.step()
    assert optimizer.plan(whole=True).rows[0][optimizer.plan().columns.index("rows")] == "A: 3 < 8, B: 3 < 16"
    copy = KFAC(layer, lr=1e-6, class_dim=-1)
    copy.load_state_dict(optimizer.state_dict())
    assert copy.plan(whole=True).rows == optimizer.plan(whole=True).rows


class Deep(nn.Module):
    """Four blocks that are alike, with a norm that the fallback rule trains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("method", [KFAC, Shampoo, mukron.Muon])
@pytest.mark.parametrize("steps", [0, 1])
def test_layers_that_are_alike_share_a_row(method, steps):
    torch.manual_seed(0)
    model = Deep()
    optimizer = method(model)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(16, 8)), torch.arange(16) % 3).backward()
        optimizer.step()
    short, whole = optimizer.plan(), optimizer.plan(whole=True)
    merged, single = (sorted(row[0] for row in table.rows if "blocks" in row[0]) for table in (short, whole))
    assert merged
    assert all(re.fullmatch(r"blocks\.0-3\.0\S* x 4", name) for name in merged)
    assert single == sorted(f"blocks.{block}.0{name[12:-4]}" for name in merged for block in range(4))
    notes = {table: next(note for note in table.notes if "fallback rule" in note) for table in (short, whole)}
    assert "blocks.0-3.1." in notes[short]
    assert "blocks.2" not in notes[short]
    assert all(f"blocks.{block}.1.bias" in notes[whole] for block in range(4))
    assert max(map(len, str(short).splitlines())) <= 120


def test_a_row_of_several_layers_shows_the_range_of_their_ranks():
    torch.manual_seed(0)
    model = Deep()
    optimizer = KFAC(model, memory=mukron.EMA(0.9))
    F.cross_entropy(model(torch.randn(64, 8)), torch.arange(64) % 3).backward()
    optimizer.step()
    short, whole = optimizer.plan(), optimizer.plan(whole=True)
    rank = short.columns.index("rank")
    first = [float(row[rank].partition(": ")[2].partition(" of")[0]) for row in whole.rows if row[0] != "head"]
    low, high = short.rows[0][rank].partition(": ")[2].partition(" of")[0].split("-")
    assert (float(low), float(high)) == (min(first), max(first))
    assert low != high
