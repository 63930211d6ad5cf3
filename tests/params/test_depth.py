"""Residual blocks are found by comparing depths, and networks of any depth are parametrized from one base."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from torch import nn

from mukron import base_shapes, parametrize
from mukron.models import GPT, ResidualMLP
from mukron.params import BaseShapes, Parametrization, ParametrizationError
from mukron.params.depth import BlockStack

INPUTS, CLASSES = 6, 3


def mlp(width: int, depth: int) -> nn.Module:
    return ResidualMLP(width, INPUTS, CLASSES, depth, base_depth=2)


def plan_of_mlp(width: int = 8, depth: int = 8) -> Parametrization:
    return parametrize(mlp(width, depth), base_shapes(mlp, width=8, depth=2))


class Linears(nn.Module):
    """One of the small networks below; none of them is ever called."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Single(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.only = nn.Linear(width, width)


def pairs(width: int, number: int) -> list[nn.Module]:
    return [Pair(width) for _ in range(number)]


def refused(factory, *patterns: str, depth: int = 2):
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(factory, width=8, depth=depth)
    for pattern in patterns:
        assert pattern in str(caught.value)


# Laws.


def test_parameters_inside_of_blocks_get_the_depth_law_and_no_others():
    plan = plan_of_mlp(width=16, depth=8)
    inside = {name for name, entry in plan.parameters.items() if entry.growth.L is not None}
    assert inside == {name for name in plan.parameters if name.startswith("blocks.")}
    assert {plan.parameters[name].growth.L for name in inside} == {Fraction(4)}
    kfac, sgd = plan.scales("kfac"), plan.scales("sgd")
    assert kfac["blocks.7.up.weight"].lr == 1 / 4
    assert kfac["blocks.7.up.weight"].damping == {"A": 2, "B": 1 / 2 / 16}
    assert kfac["head.weight"].damping == {"A": 2, "B": 1}
    assert sgd["blocks.7.up.weight"].lr == 4
    assert sgd["blocks.7.norm.weight"].lr == 2 * 4, "a vector: r_out L"
    assert sgd["stem.weight"].lr == 2
    groups = plan.param_groups("sgd", lr=1.0, model=mlp(16, 8))
    assert {group["lr"] for group in groups} == {4, 8, 2, 1 / 2}


def test_at_the_base_depth_nothing_changes():
    with_depth = plan_of_mlp(16, depth=2)
    without = parametrize(mlp(16, 2), base_shapes(lambda width: mlp(width, 2), width=8))
    for method in ("sgd", "kfac", "shampoo", "adamw"):
        assert with_depth.scales(method) == without.scales(method)


def test_a_network_may_be_shallower_than_the_base():
    plan = parametrize(mlp(8, 1), base_shapes(mlp, width=8, depth=4))
    assert Fraction(1, 4) == plan.parameters["blocks.0.up.weight"].growth.L
    assert plan.scales("gauss-newton")["blocks.0.up.weight"].lr == 4


def test_sp_has_no_depth_law():
    plan = parametrize(mlp(8, 8), base_shapes(mlp, width=8, depth=2), "sp")
    assert plan.scales("sgd")["blocks.0.up.weight"].lr == 1


# Initial weights.


def test_an_initializer_that_depends_on_the_depth_is_undone():
    """GPT-2's (2 depth)^-1/2: with branches multiplied by 1/L, weights in blocks start alike at every depth."""

    def gpt(width: int, depth: int) -> nn.Module:
        return GPT(width, depth, vocabulary=16, context=8)

    shapes = base_shapes(gpt, width=16, depth=2)
    assert shapes.parameters["blocks.0.mlp.out.weight"].depth_exponent == Fraction(1, 2)
    assert shapes.parameters["blocks.0.mlp.up.weight"].depth_exponent == 0
    torch.manual_seed(0)
    drawn = gpt(32, 8)
    torch.manual_seed(0)
    model = gpt(32, 8)
    parametrize(model, shapes)
    ratio = model.blocks[5].mlp.out.weight / drawn.blocks[5].mlp.out.weight
    assert torch.allclose(ratio, torch.full_like(ratio, 2.0)), "L^1/2, exactly; fan-in is the scheme's own law"
    assert torch.equal(model.blocks[5].mlp.up.weight, drawn.blocks[5].mlp.up.weight)
    assert torch.allclose(model.head.weight * 2**0.5, drawn.head.weight), "outside of blocks: the width's law alone"


def test_blocks_that_the_base_does_not_have_are_rescaled_too():
    def constant(width: int, depth: int) -> nn.Module:
        model = mlp(width, depth)
        for block in model.blocks:
            nn.init.normal_(block.up.weight, std=0.02)
        return model

    torch.manual_seed(0)
    model = constant(32, 6)
    drawn = model.blocks[5].up.weight.detach().clone()
    parametrize(model, base_shapes(constant, width=8, depth=2))
    assert torch.allclose(model.blocks[5].up.weight, drawn / 2), "r_in^-1/2"


# Containers.


def test_several_containers_each_have_their_own_growth():
    def network(width: int, depth: int) -> nn.Module:
        encoder, decoder = nn.ModuleList(pairs(width, depth)), nn.ModuleList(pairs(width, depth + 1))
        return Linears(encoder=encoder, decoder=decoder, head=nn.Linear(width, CLASSES))

    shapes = base_shapes(network, width=8, depth=2)
    assert shapes.stacks == (BlockStack("encoder", (0, 1)), BlockStack("decoder", (0, 1, 2)))
    plan = parametrize(network(8, 5), shapes)
    assert Fraction(5, 2) == plan.parameters["encoder.4.up.weight"].growth.L
    assert plan.parameters["decoder.5.up.bias"].growth.L == 2


def test_containers_inside_of_blocks_and_around_them():
    def network(width: int, depth: int) -> nn.Module:
        stages = [nn.Sequential(*(nn.Sequential(*pairs(width, 2)) for _ in range(depth))) for _ in range(3)]
        return Linears(stages=nn.ModuleList(stages), head=nn.Linear(width, CLASSES))

    shapes = base_shapes(network, width=8, depth=2)
    assert [stack.container for stack in shapes.stacks] == ["stages.0", "stages.1", "stages.2"]
    assert parametrize(network(8, 4), shapes).parameters["stages.1.3.1.up.weight"].growth.L == 2


def test_an_embedding_before_the_blocks_is_no_block():
    def network(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(10, width), *pairs(width, depth))

    shapes = base_shapes(network, width=8, depth=2)
    assert shapes.stacks == (BlockStack("", (1, 2), others=(0,)),)
    plan = parametrize(network(8, 6), shapes)
    assert plan.parameters["0.weight"].growth.L is None
    assert {plan.parameters[f"{number}.up.weight"].growth.L for number in range(1, 7)} == {Fraction(3)}


def test_kinds_of_blocks_that_alternate():
    def network(width: int, depth: int) -> nn.Module:
        blocks = [Pair(width) if number % 2 else Single(width) for number in range(depth)]
        return Linears(blocks=nn.ModuleList(blocks), head=nn.Linear(width, CLASSES))

    plan = parametrize(network(8, 7), base_shapes(network, width=8, depth=2))
    assert plan.parameters["blocks.6.only.weight"].base_shape == (8, 8)
    assert plan.parameters["blocks.5.up.weight"].base_shape == (16, 8)
    assert Fraction(7, 2) == plan.parameters["blocks.5.up.weight"].growth.L


def test_a_first_block_that_has_more_than_the_others():
    def network(width: int, depth: int) -> nn.Module:
        blocks = nn.ModuleList(pairs(width, depth))
        blocks[0].shared = nn.Embedding(4, width)
        return Linears(blocks=blocks, head=nn.Linear(width, CLASSES))

    plan = parametrize(network(8, 4), base_shapes(network, width=8, depth=2))
    assert plan.parameters["blocks.0.shared.weight"].growth.L == 2
    assert plan.parameters["blocks.2.up.weight"].growth.L == 2, "it is like block 1, not like block 0"


def test_declared_roles_hold_for_every_block():
    class Gated(Pair):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.gain = nn.Parameter(torch.ones(width))
            self.mukron_roles = {"gain": "vector"}

    def network(width: int, depth: int) -> nn.Module:
        return Linears(blocks=nn.ModuleList(Gated(width) for _ in range(depth)), head=nn.Linear(width, CLASSES))

    plan = parametrize(network(16, 4), base_shapes(network, width=8, depth=2))
    assert plan.scales("sgd")["blocks.3.gain"].lr == 2 * 2


# What is refused.


def test_other_depths_need_depth():
    shapes = base_shapes(lambda width: mlp(width, 2), width=8)
    with pytest.raises(
        ParametrizationError, match=r'"blocks.2.norm.weight.* base_shapes\(factory, width=64, depth=4\)'
    ):
        parametrize(mlp(8, 4), shapes)


def test_a_tail_behind_the_blocks_is_refused():
    refused(
        lambda width, depth: nn.Sequential(*pairs(width, depth), nn.Linear(width, CLASSES)),
        '"2.weight", "2.bias" exists at depth 2 but not at depth 4',
        "of their own, with nothing after them",
    )
    refused(
        lambda width, depth: nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, CLASSES)),
        '"2.weight", "2.bias" has the shape [3, 8] at depth 2 and [8, 8] at depth 4',
    )


def test_entries_that_may_or_may_not_be_blocks_are_refused():
    refused(
        lambda width, depth: nn.Sequential(nn.Linear(INPUTS, width), *(nn.Linear(width, width) for _ in range(depth))),
        'its "0" at depth 2 does not have the parameters of the added ones',
    )


def test_layers_that_are_not_numbered_are_refused():
    refused(
        lambda width, depth: Linears(**{f"fc{number}": nn.Linear(width, width) for number in range(depth)}),
        'parameter "fc2.weight" exists at depth 4 but not at depth 2, and is in no new entry of a numbered container',
    )


def test_containers_that_grow_within_containers_that_grow_are_refused():
    refused(
        lambda width, depth: nn.ModuleList(nn.ModuleList(pairs(width, depth)) for _ in range(depth)),
        'containers "" and "0" within it both have more entries',
    )


def test_blocks_in_one_tensor_are_refused():
    class Stacked(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.Parameter(torch.randn(depth, width, width))
            self.mukron_roles = {"blocks": "hidden"}

    refused(Stacked, 'parameter "blocks" has the shape [2, 8, 8] at depth 2 and [4, 8, 8] at depth 4')


def test_weights_that_blocks_share_are_refused():
    def network(width: int, depth: int) -> nn.Module:
        blocks = nn.ModuleList(pairs(width, depth))
        for block in blocks:
            block.up.weight = blocks[0].up.weight
        return Linears(blocks=blocks, head=nn.Linear(width, CLASSES))

    refused(network, '"blocks.0.up.weight" is also blocks.1.up.weight', "no single law of depth")


def test_factories_that_do_not_take_a_depth():
    refused(lambda width: mlp(width, 2), "depth=2: the factory has no parameter called depth, only width")
    refused(lambda width, depth: mlp(width, 2), "the same parameters at depth 2 and at depth 4")
    refused(lambda size, other, depth: mlp(size, depth), "which parameter of the factory is its width: size, other?")
    refused(mlp, "must be a whole number of at least 1, got 0", depth=0)
    with pytest.raises(ParametrizationError, match="one network does not show what depth adds"):
        base_shapes(mlp(8, 2), depth=2)
    assert base_shapes(lambda size, depth: mlp(size, depth=depth), width=8, depth=2).depth == 2


def test_a_block_of_another_kind_is_refused():
    def network(width: int, depth: int, odd: bool = False) -> nn.Module:
        blocks = nn.ModuleList([*pairs(width, depth - 1), Single(width) if odd else Pair(width)])
        return Linears(blocks=blocks, head=nn.Linear(width, CLASSES))

    shapes = base_shapes(network, width=8, depth=2)
    with pytest.raises(ParametrizationError, match=r'block "blocks.3" has the parameters only.bias, only.weight'):
        parametrize(network(8, 4, odd=True), shapes)


# Files and tables.


def test_files(tmp_path):
    shapes, plan = base_shapes(mlp, width=8, depth=2), plan_of_mlp()
    shapes.save(tmp_path / "shapes.json")
    plan.save(tmp_path / "plan.json")
    assert BaseShapes.load(tmp_path / "shapes.json") == shapes
    assert Parametrization.load(tmp_path / "plan.json") == plan
    assert parametrize(mlp(8, 8), BaseShapes.load(tmp_path / "shapes.json")).scales("kfac") == plan.scales("kfac")


def test_plans_of_the_version_before_depth_are_read():
    plan = parametrize(mlp(16, 2), base_shapes(lambda width: mlp(width, 2), width=8))
    data = json.loads(json.dumps(plan.to_dict()))
    for entry in data["parameters"].values():
        del entry["L"]
    assert Parametrization.from_dict({**data, "version": 1}) == plan


def test_a_saved_plan_of_another_base_depth_is_refused():
    with pytest.raises(ParametrizationError, match=r"as vector, L = 2, this one .* as vector, L = 4; .* the same"):
        plan_of_mlp().check(parametrize(mlp(8, 8), base_shapes(mlp, width=8, depth=4)))


def test_explain_has_a_column_for_depth_where_it_was_asked_for():
    table = plan_of_mlp().explain("kfac", trust=None)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    up, head = rows["blocks.0-7.{up,out}.weight"], rows["head.weight"]
    assert (up["L"], up["lr x"], up["rho_B x"], head["L"], head["lr x"]) == ("4", "0.25", "0.0625", "-", "1")
    assert up["why"].endswith("in a residual block, where it would move like L")
    assert any("multiply what each block adds by 1/L" in note for note in table.notes)
    without = parametrize(mlp(16, 2), base_shapes(lambda width: mlp(width, 2), width=8)).explain("kfac")
    assert "L" not in without.columns
