"""What a run in many processes is predicted to cost: shapes, owners, memory, and the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mukron.models import GPT, ResNet18
from mukron.optim.communication import BY_FACTORS, BY_ROWS, Communication, sgd_numbers
from mukron.optim.prediction import predict
from mukron.optim.prediction_tables import prediction_tables
from mukron.optim.ranked_run import DDP, FSDP, PLAIN, RANKED_SHARDINGS, RankedRun
from mukron.optim.shapes import LayerShape, NetworkShapes, alike, known_shapes, shapes_of
from mukron.optim.spec import spec_of

LLAMA = known_shapes("llama-7b")
KFAC = spec_of("kfac")
NO_HEAD = {"exclude": ["head"]}


class Llama(nn.Module):
    """The layers of LLaMA 7B as torch's own, without what they compute."""

    def __init__(self, width, depth=32, mlp=11008, vocabulary=32000):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Block(width, mlp) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)


class Block(nn.Module):
    def __init__(self, width, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, width, bias=False)


def run(**fields):
    return RankedRun(**{"ranks": 64, "batch": 512, "positions": 2048, **fields})


def test_llama_on_the_meta_device_is_the_table_of_its_shapes():
    with torch.device("meta"):
        model = Llama(4096)
    shapes = shapes_of(model, KFAC, KFAC.all_options({}))
    assert shapes.numbers == LLAMA.numbers == 6_738_415_616
    assert (shapes.others, shapes.first) == (LLAMA.others, LLAMA.first)
    ours, known = predict(shapes, run()), predict(LLAMA, run())
    assert ours.total == known.total
    assert ours.state_of_one == known.state_of_one
    assert ours.work_of_one == pytest.approx(known.work_of_one)
    assert [shape.count for shape in shapes.layers] == [32] * 7 + [1]


def test_known_shapes_have_as_many_parameters_as_they_are_named_for():
    for name, billions in (("llama-13b", 13.0), ("llama-70b", 69.0)):
        assert known_shapes(name).numbers / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_factors_are_spread_over_ranks(ranks):
    plan = predict(LLAMA, run(ranks=ranks, options=NO_HEAD))
    network = LLAMA.without(("head",))
    plan = predict(network, run(ranks=ranks))
    assert sum(plan.state) == plan.state_of_one
    assert plan.state_of_one / ranks <= plan.state_of_heaviest < 1.3 * plan.state_of_one / ranks
    assert sum(plan.work) == pytest.approx(plan.work_of_one)
    assert 1 <= plan.balance < 1.3
    assert sum(map(len, plan.owners)) == 32 * 7


def test_rows_keep_all_factors_on_every_rank():
    plan = predict(LLAMA, run(communication=Communication(BY_ROWS)))
    assert plan.state == [plan.state_of_one] * 64
    assert plan.balance == 1
    assert plan.exchanged.moves == 0


@pytest.mark.parametrize("sharding", RANKED_SHARDINGS)
def test_what_arrives_on_ranks_adds_up(sharding):
    plan = predict(LLAMA, run(sharding=sharding))
    assert sum(plan.arrivals) == pytest.approx(plan.total)
    assert plan.sgd == sgd_numbers(LLAMA.numbers, 64, sharding == FSDP)


def test_weights_are_whole_or_in_parts():
    whole, parts = (predict(LLAMA, run(sharding=sharding)) for sharding in (DDP, FSDP))
    assert parts.weights_of_rank == whole.weights_of_rank / 64
    assert whole.weights_of_rank == whole.weights_of_one >= 2 * LLAMA.numbers


def test_momentum_on_the_gradient_is_with_owners_and_on_the_update_everywhere():
    on_gradient, on_update = predict(LLAMA, run()), predict(LLAMA, run(options={"trust": "none"}, momentum=0.9))
    none = predict(LLAMA, run(options={"trust": "none"}, momentum=0.0))
    of_layers = LLAMA.numbers - LLAMA.others
    assert on_update.weights_of_one - none.weights_of_one == LLAMA.numbers
    without = predict(LLAMA, run(momentum=0.0))
    assert on_gradient.state_of_one - without.state_of_one == of_layers


def test_fsdp_gathers_weights_again_for_fisher_signals():
    drawn, own = (predict(LLAMA, run(sharding=FSDP, options={"fisher": fisher})) for fisher in ("mc:2", "empirical"))
    assert drawn.gathered_again == 2 * 63 * (LLAMA.numbers - LLAMA.first)
    assert own.gathered_again == 0


def test_positions_follow_from_a_sample():
    with torch.device("meta"):
        model = ResNet18(1)
    options = KFAC.all_options({})
    with pytest.raises(ValueError, match=r"positions layer .* shape of a sample"):
        shapes_of(model, KFAC, options)
    shapes = shapes_of(model, KFAC, options, sample=(3, 32, 32)).layers
    assert (shapes[0].positions, shapes[-1].positions) == (32 * 32, 1)
    with torch.device("meta"):
        gpt = GPT(64, depth=2)
    assert {layer.positions for layer in shapes_of(gpt, KFAC, options, sample=(17,)).layers} == {17}


def test_layers_that_differ_in_numbers_alone_are_one_row():
    names = ["blocks.0.up", "blocks.1.up", "blocks.1.down", "up2"]
    merged = list(alike([LayerShape(name, 4, 2, positions=len(name) // 20) for name in names]))
    assert [(shape.name, shape.count) for shape in merged] == [("blocks.*.up", 2), ("blocks.1.down", 1), ("up2", 1)]


def test_excluded_layers_take_the_fallback_rule():
    network = LLAMA.without(("head",))
    assert network.numbers == LLAMA.numbers
    assert network.others == LLAMA.others + 32000 * 4096
    with pytest.raises(ValueError, match='no layer "tail" is preconditioned'):
        LLAMA.without(("tail",))


@pytest.mark.parametrize("sharding", RANKED_SHARDINGS)
def test_tables_fit_the_page_and_say_what_was_computed(sharding):
    plan = predict(LLAMA, run(sharding=sharding, options={"factor_every": 10}))
    layers, cost = prediction_tables(plan)
    assert max(len(line) for table in (layers, cost) for line in str(table).splitlines()) <= 120
    assert [row[0] for row in layers.rows][:5] == [
        f"{load.shape.name} x {load.shape.count}" if load.shape.count > 1 else "head" for load in plan.loads
    ]
    assert {row[2] for row in layers.rows[:5]} == {BY_FACTORS}
    (total,) = (row for row in layers.rows if row[0] == "all")
    assert total[-1] == f"{plan.total / plan.sgd:.2f}"
    assert any("head alone is" in note for note in cost.notes)  # 32000^3 multiplications


def test_few_samples_travel_as_rows_and_cost_less_than_sgd():
    network = NetworkShapes("wide", (LayerShape("up", 4096, 4096, count=8),))
    plan = predict(network, run(ranks=4, batch=64, positions=1, sharding=PLAIN))
    assert plan.total < plan.sgd / 2
    assert predict(network, replace(plan.run, sharding=DDP)).total > plan.sgd


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ranks": 1}, "at least 2"),
        ({"batch": 63}, "a sample each"),
        ({"positions": 0}, "at least 1"),
        ({"options": {"fused": True}}, "gradients that are never formed"),
        ({"sharding": "zero"}, "known: ddp, fsdp, plain"),
        ({"method": "adamw"}, "no layers with owners"),
        ({"method": "shampoo", "options": {"fused": True}, "sharding": PLAIN}, "leave out fused"),
    ],
)
def test_other_runs_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        run(**fields)
