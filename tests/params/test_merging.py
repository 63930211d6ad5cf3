"""Rows of alike parameters become one, whose name stands for exactly theirs."""

from __future__ import annotations

import itertools
import re

import pytest
from torch import nn

from mukron import base_shapes, parametrize
from mukron.models import GPT, MODELS
from mukron.params import build_without_memory
from mukron.params.merging import ParameterRow, merged


def names_in(text: str) -> list[str]:
    """All names that a merged one stands for."""

    def words(choice: str) -> list[str]:
        if (run := re.fullmatch(r"([0-9]+)-([0-9]+)", choice)) is None:
            return [choice]
        return [str(number) for number in range(int(run[1]), int(run[2]) + 1)]

    parts = re.split(r"(\{[^}]*\}|(?<![^.])[0-9]+-[0-9]+(?![^.]))", text)
    choices = [
        [word for choice in part.strip("{}").split(",") for word in words(choice)] if number % 2 else [part]
        for number, part in enumerate(parts)
    ]
    return ["".join(words) for words in itertools.product(*choices)]


def names(*given: str, cells=None, stds=None, numbers: int = 4096) -> list[str]:
    rows = [
        ParameterRow(name, (cells or {}).get(name, ()), (stds or {}).get(name, 0.0), numbers)
        for name in itertools.chain.from_iterable(map(names_in, given))
    ]
    return [row.name for row in merged(rows)]


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0-3.attention.{query,key,value}.weight",
        "blocks.0-3.norm{1,2}.{weight,bias}",
        "layers.{0-2,5,7-8}.weight",
        "fc{2-4}.weight",
        "a.0-1.b.0-2.c",
        "0-1.weight",
        "plain",
    ],
)
def test_what_a_name_stands_for_is_merged_into_it(name):
    assert names(name) == [name]


def test_only_equal_rows_are_merged():
    cells = {"blocks.2.up.weight": ("other",)}
    assert names("blocks.0-3.up.weight", cells=cells) == ["blocks.{0-1,3}.up.weight", "blocks.2.up.weight"]
    assert names("blocks.0.a", "blocks.0.b", "blocks.1.a") == ["blocks.0-1.a", "blocks.0.b"]
    assert names("norm.weight", "blocks.0.norm.weight") == ["norm.weight", "blocks.0.norm.weight"]


def test_names_that_look_merged_are_left_alone():
    given = ["a-b.0.w", "a-b.1.w", "x{1}.w", "x{2}.w", "0-3.w"]
    rows = [ParameterRow(name, (), 0.0, 8) for name in given]
    assert [row.name for row in merged(rows)] == given


def test_numbers_with_leading_zeros_are_words():
    assert names("x.01.w", "x.1.w", "x.2.w") == ["x.01.w", "x.1-2.w"]


def test_siblings_whose_names_take_too_much_room_stay_apart():
    assert len(names(*(f"x.{letter * 12}.w" for letter in "abcdefghij"))) > 1


def test_measured_stds_are_equal_within_their_sampling_error():
    near, far = {"x.0.w": 0.100, "x.1.w": 0.103}, {"x.0.w": 0.100, "x.1.w": 0.120}
    assert names(*near, stds=near) == ["x.0-1.w"]
    assert names(*near, stds=near, numbers=10**6) == list(near)
    assert names(*far, stds=far) == list(far)
    assert names(*far, stds=far, numbers=4) == list(far)  # few numbers do not make everything equal
    assert names("x.0.w", "x.1.w", stds={"x.1.w": 0.1}) == ["x.0.w", "x.1.w"]  # a constant one
    (row,) = merged([ParameterRow("x.0.w", (), 3.0, 100), ParameterRow("x.1.w", (), 3.2, 300)])
    assert row.std == pytest.approx(((9 + 3 * 3.2**2) / 4) ** 0.5)


def plan_of(factory, width):
    return parametrize(build_without_memory(factory, 4 * width), base_shapes(factory, width=width))


@pytest.mark.parametrize("model", ["mlp", "resnet18", "vgg19", "gpt"])
def test_every_parameter_of_a_network_is_in_one_row(model):
    entry = MODELS[model]
    plan = plan_of(entry.factory, entry.base_width)
    whole, short = plan.explain("kfac", whole=True), plan.explain("kfac")
    listed = [name for row in short.rows for name in names_in(row[0])]
    assert sorted(listed) == sorted(plan.parameters)
    assert [row[0] for row in whole.rows] == list(plan.parameters)
    std = short.columns.index("initial std")
    cells = {row[0]: row[1:std] + row[std + 1 :] for row in whole.rows}
    for row in short.rows:
        assert all(cells[name] == row[1:std] + row[std + 1 :] for name in names_in(row[0])), row[0]
    assert all(len(row[-1]) <= 85 for row in short.rows)


def test_a_gpt_in_a_few_lines():
    table = plan_of(lambda width: GPT(width, depth=3, norm="rms", mlp="swiglu"), 16).explain("kfac")
    assert [row[0] for row in table.rows] == [
        "tokens.weight",
        "positions.weight",
        "blocks.0-2.norm{1,2}.weight",
        "blocks.0-2.attention.{query,key,value}.weight",
        "blocks.0-2.attention.out.weight",
        "blocks.0-2.mlp.{gate,up}.weight",
        "blocks.0-2.mlp.out.weight",
        "norm.weight",
        "head.weight",
    ]
    stds = [row[table.columns.index("initial std")] for row in table.rows]
    assert stds[2] == "constant"
    assert float(stds[3]) == pytest.approx(1 / 8, rel=0.03)


def test_a_sequence_of_layers():
    table = plan_of(
        lambda width: nn.Sequential(nn.Linear(4, width), *(nn.Linear(width, width, bias=False) for _ in range(3))), 32
    ).explain("sgd")
    assert [row[0] for row in table.rows] == ["0.weight", "0.bias", "1-3.weight"]
