"""Roles that modules declare themselves, in ``mukron_roles``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mukron import ParametrizationError, base_shapes, parametrize
from mukron.models import GPT
from mukron.params import BaseShapes
from mukron.theory import Role


class Positions(nn.Module):
    """Declares its own role once, on the class."""

    mukron_roles = {"table": "input"}  # noqa: RUF012

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, width))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.positions, self.head = Positions(width), nn.Linear(width, 3)


def refused(*parts: str):
    return pytest.raises(ParametrizationError, match=".*".join(parts))


def test_a_module_declares_its_roles_once():
    plan = parametrize(Net(32), base_shapes(Net, width=8))
    assert plan.parameters["positions.table"].role is Role.INPUT
    wrapped = torch.nn.DataParallel(Net(32))
    assert parametrize(wrapped, base_shapes(Net, width=8)).parameters["positions.table"].role is Role.INPUT


def test_networks_without_a_factory():
    assert parametrize(Net(32), base_shapes(Net(8))).parameters["positions.table"].role is Role.INPUT


def test_base_shapes_from_a_file_that_does_not_know_the_role(tmp_path):
    base = Net(8)
    base.positions.mukron_roles = {}
    base_shapes(base).save(tmp_path / "shapes.json")
    plan = parametrize(Net(32), BaseShapes.load(tmp_path / "shapes.json"))
    assert plan.parameters["positions.table"].role is Role.INPUT


def test_roles_of_the_call_win_and_then_those_of_outer_modules():
    def outer(width):
        model = Net(width)
        model.mukron_roles = {"positions.table": "output"}
        return model

    assert parametrize(outer(32), base_shapes(outer, width=8)).parameters["positions.table"].role is Role.OUTPUT
    shapes = base_shapes(outer, width=8, roles={"positions.table": "vector"})
    assert parametrize(outer(32), shapes).parameters["positions.table"].role is Role.VECTOR


@pytest.mark.parametrize("source", ["factory", "model"])
def test_a_tied_gpt_needs_no_declaration(source):
    def make(width):
        return GPT(width, depth=1, vocabulary=11, context=4, tied=True)

    shapes = base_shapes(make, width=16) if source == "factory" else base_shapes(make(16))
    plan = parametrize(make(32), shapes)
    assert plan.parameters["tokens.weight"].role is Role.INPUT
    assert plan.parameters["tokens.weight"].tied == ("head.weight",)


def test_an_alias_of_a_tied_parameter_is_known():
    def make(width):
        model = GPT(width, depth=1, vocabulary=11, context=4, tied=True)
        model.mukron_roles = {"head.weight": "input"}
        return model

    assert parametrize(make(32), base_shapes(make, width=16)).parameters["tokens.weight"].role is Role.INPUT


def test_wrong_declarations_name_the_module():
    def declaring(roles):
        def make(width):
            model = Net(width)
            model.positions.mukron_roles = roles
            return model

        return make

    with refused('mukron_roles of Positions "positions": it has no parameter "tabel", "other"'):
        base_shapes(declaring({"tabel": "input", "other": "input"}), width=8)
    with refused("mukron_roles of Positions \"positions\", parameter \"table\": unknown role 'inptu'; known: 'input'"):
        base_shapes(declaring({"table": "inptu"}), width=8)
    with refused('mukron_roles of Positions "positions" must be roles by parameter name'):
        base_shapes(declaring(["table"]), width=8)
    with refused('mukron_roles of Positions "positions": it has no parameter "tabel"'):
        parametrize(declaring({"tabel": "input"})(32), base_shapes(Net(8)))
    whole = Net(8)
    whole.mukron_roles = {"x": "input"}
    with refused('mukron_roles of Net: it has no parameter "x"'):
        base_shapes(whole)
