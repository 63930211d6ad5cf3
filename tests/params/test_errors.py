"""Every way in which two networks, or a network and a plan, do not fit: an error that names what and the way out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mukron.params import BaseShapes, ParametrizationError, base_shapes, parametrize
from networks import INPUTS, Net


def refused(*words: str):
    """The message must hold these words in this order."""
    return pytest.raises(ParametrizationError, match="(?s)" + ".*".join(map(re.escape, words)))


class Deeper(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.extra = nn.Linear(width, width)


class Bare(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(rows, columns))


def test_a_parameter_in_one_model_and_not_in_the_other():
    with refused('"extra.weight", "extra.bias" exists in this network but not in the base shapes', "same depth"):
        parametrize(Deeper(16), base_shapes(Net, width=8))
    with refused('"extra.weight", "extra.bias" exists in the base shapes but not in this network'):
        parametrize(Net(16), base_shapes(Deeper, width=8))
    with refused('"extra.weight", "extra.bias" exists at width 16 but not at width 8'):
        base_shapes(lambda width: (Deeper if width > 8 else Net)(width), width=8)


def test_a_plan_of_a_part_of_the_network_names_the_part():
    """As of a LightningModule, which has the network as an attribute."""
    shapes = base_shapes(Net, width=8)
    plan = parametrize(Net(16), shapes)
    whole = nn.ModuleDict({"metric": nn.Linear(2, 2), "network": Net(16)})
    for refused_call in (lambda: plan.param_groups("sgd", lr=0.1, model=whole), lambda: parametrize(whole, shapes)):
        with refused('a part of this network, "network": pass that part, model.get_submodule("network"), instead'):
            refused_call()
    twice = nn.ModuleDict({"student": Net(16), "teacher": Net(16)})
    with refused("exists in the base shapes but not in this network"):
        parametrize(twice, shapes)  # which of the two is not known


def test_a_dimension_that_shrinks():
    with refused('"first.weight", dimension 0: shrinks from 8', "to 4", "choose a smaller base width"):
        parametrize(Net(4), base_shapes(Net, width=8))
    with refused("dimension 1: shrinks from 64", "to 32"):
        base_shapes(lambda width: nn.Linear(512 // width, width), width=8)


def test_a_finite_dimension_that_differs():
    def other_inputs(width):
        return nn.Sequential(nn.Linear(2 * INPUTS, width), nn.Linear(width, 3))

    def factory(width):
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Linear(width, 3))

    with refused('"0.weight", dimension 1: 24 here and 12 at the base width, but it does not grow', "same input size"):
        parametrize(other_inputs(16), base_shapes(factory, width=8))


def test_another_number_of_dimensions():
    with refused('"weight": 4 dimensions here, 2 at the base width'):
        parametrize(nn.Conv2d(8, 8, 3), base_shapes(lambda width: nn.Linear(width, width), width=4))


def test_two_dimensions_that_grow_by_different_ratios_where_one_is_needed():
    shapes = base_shapes(lambda width: Bare(width, 2 * width), width=4, roles={"matrix": "hidden"})
    assert parametrize(Bare(8, 16), shapes).parameters["matrix"].growth.r_in == 2
    with refused('"matrix": declared hidden', "needs one ratio", "dimension 0 by 2, dimension 1 by 4", "register"):
        parametrize(Bare(8, 32), shapes)


def test_nothing_to_compare():
    with refused("the network has the base width itself", "base_shapes(factory, width=...)"):
        parametrize(Net(8), base_shapes(Net(8)))
    with refused("no parameter's shape differs between widths 8 and 16", "does the factory use its width?"):
        base_shapes(lambda width: Net(32), width=8)


def test_one_model_as_the_base_is_compared_with_the_network():
    from_model = parametrize(Net(16), base_shapes(Net(8)))
    from_factory = parametrize(Net(16), base_shapes(Net, width=8))
    assert {name: entry.growth for name, entry in from_model.parameters.items()} == {
        name: entry.growth for name, entry in from_factory.parameters.items()
    }


def test_a_parameter_with_no_known_owner():
    with refused('"matrix" [4, 8]: its owner Bare is not a known module', "dimension 1 grows: input, output or vector"):
        base_shapes(lambda width: Bare(4, width), width=4)


def test_a_parameter_that_does_not_grow_is_a_scalar_whoever_owns_it():
    class Temperature(Net):
        def __init__(self, width):
            super().__init__(width)
            self.temperature = nn.Parameter(torch.tensor(2.0))
            self.offset = nn.Parameter(torch.randn(3))

    plan = parametrize(Temperature(16), base_shapes(Temperature, width=8))
    assert plan.parameters["temperature"].role.value == plan.parameters["offset"].role.value == "scalar"


def test_width_multipliers_and_numpy_widths():
    def factory(width):
        return Net(int(32 * width))

    assert parametrize(factory(1.0), base_shapes(factory, width=0.25)).parameters["hidden.weight"].growth.r_in == 4
    shapes = base_shapes(Net, width=np.int64(8))
    assert type(shapes.width) is int


def test_a_width_that_is_rounded():
    def rounded(width, step):
        return max(step, width // step * step)

    def factory(width):  # at 4 and at 8 the inner layer rounds to 8
        return nn.Sequential(nn.Linear(3, width), nn.Linear(width, rounded(width, 8)), nn.Linear(rounded(width, 8), 2))

    with refused('"1.weight", dimension 0: 32 here and 8 at the base width', "if it is a width that is rounded"):
        parametrize(factory(32), base_shapes(factory, width=4))


def test_tied_uses_must_agree_on_how_much_they_grew():
    class Tied(nn.Module):  # hidden in both places, but one of them stands after a second width
        def __init__(self, width):
            super().__init__()
            self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
            self.two.weight = self.one.weight

    base = base_shapes(Tied, width=4)
    data = base.to_dict()
    data["parameters"]["one.weight"]["base"]["uses"]["two.weight"][0] = 2
    with refused("is tied and its uses disagree"):
        parametrize(Tied(8), BaseShapes.from_dict(data))


def test_declared_scalar_is_never_scaled():
    shapes = base_shapes(lambda width: Bare(4, width), width=4, roles={"matrix": "scalar"})
    plan = parametrize(Bare(4, 64), shapes)
    assert plan.scales("sgd")["matrix"].lr == 1.0


def test_declared_hidden_must_grow_on_both_sides():
    with refused('"matrix" [10, 8]: declared hidden, which grows on both sides, but only dimension 1 grows'):
        base_shapes(lambda width: Bare(10, width), width=4, roles={"matrix": "hidden"})


def test_layers_that_grow_apart_are_told():
    class Two(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, first), nn.Linear(first, second), nn.Linear(second, 2)

    shapes = base_shapes(lambda width: Two(width, width), width=8)
    with pytest.warns(UserWarning, match=r'different ratios: "b.bias" by 2 and "b.weight" by 8|by 2 and .* by 8'):
        parametrize(Two(64, 16), shapes)


def test_memory_shared_without_tying():
    class Shared(Net):
        def __init__(self, width):
            super().__init__(width)
            self.again = nn.Linear(width, width)
            self.again.weight = nn.Parameter(self.hidden.weight.data)

    with refused('parameters "hidden.weight" and "again.weight" share their memory'):
        parametrize(Shared(16), base_shapes(Shared, width=8))


def test_half_on_the_meta_device_and_complex():
    model = Net(16)
    model.head = nn.Linear(16, 5, device="meta")
    with refused('"head.weight" is on the meta device and others are not'):
        parametrize(model, base_shapes(Net, width=8))
    with refused("the base model is on the meta device"):
        base_shapes(nn.Linear(3, 4, device="meta"))
    with refused('"weight" is complex'):
        base_shapes(lambda width: nn.Linear(3, width, dtype=torch.complex64), width=4)


def test_equal_here_but_varied_at_the_base():
    model = Net(16)
    nn.init.zeros_(model.hidden.weight)
    with refused('"hidden.weight": its values are all equal here but vary at the base width'):
        parametrize(model, base_shapes(Net, width=8))


def test_one_unit_at_the_base_width_is_no_constant():
    def squeeze(width):
        return nn.Sequential(nn.Linear(3, width // 16), nn.Linear(width // 16, 3))

    plan = parametrize(squeeze(64), base_shapes(squeeze, width=16))
    assert plan.parameters["0.bias"].base_std > 0
    assert base_shapes(nn.Linear(3, 1)).parameters["bias"].spread.numbers == 1


def test_wrong_declarations():
    with refused('"matrix": unknown role', "'input', 'hidden', 'output', 'vector', 'scalar'"):
        base_shapes(lambda width: Bare(4, width), width=4, roles={"matrix": "inptu"})
    with refused('no parameter "matrx"'):
        base_shapes(lambda width: Bare(4, width), width=4, roles={"matrx": "input"})
    with refused("roles must be given by name"):
        base_shapes(lambda width: Bare(4, width), width=4, roles=["matrix"])
    with refused('"0.bias"', "declared vector, but none of its dimensions grows"):
        make = lambda width: nn.Sequential(nn.Linear(width, 3))  # noqa: E731
        base_shapes(make, width=4, roles={"0.bias": "vector"})


def test_a_declared_alias_of_a_tied_weight():
    class Tied(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, width), nn.Linear(width, 9, bias=False)
            self.head.weight = self.embedding.weight

    with refused('no parameter "head.weight"; it is tied to "embedding.weight": declare that'):
        base_shapes(Tied, width=4, roles={"head.weight": "input"})


@pytest.mark.parametrize("width", [0, -1, float("nan"), True, "64"])
def test_wrong_base_widths(width):
    with refused("the base width must be a positive number"):
        base_shapes(Net, width=width)


def test_no_base_width_and_no_module():
    with refused("needs the base width: base_shapes(factory, width=64)"):
        base_shapes(Net)
    with refused("expected a function that builds the network for a width, or a module, got 'mlp'"):
        base_shapes("mlp", width=4)
    with refused("the factory takes no arguments, expected one for the width", "base_shapes(lambda width: "):
        base_shapes(lambda: Net(8), width=8)
    with refused("which parameter of the factory is its width: classes, hidden?", "lambda width"):
        base_shapes(lambda classes, hidden=32: Net(hidden), width=4)
    with refused("expected the network's base shapes, mukron.base_shapes(...), got None"):
        parametrize(Net(8), None)
    for file in ("shapes.json", Path("shapes.json")):
        with refused("to read them from a file: mukron.BaseShapes.load('shapes.json')"):
            parametrize(Net(8), file)
    with refused("width=16: this Net is built already, with a width of its own", "base_shapes(network)"):
        base_shapes(Net(8), width=16)
    with refused("Sequential has no parameters"):
        parametrize(nn.Sequential(), base_shapes(Net, width=4))
    with refused("the factory returned a dict, expected an nn.Module"):
        base_shapes(lambda width: {}, width=4)


def test_an_error_in_the_factory_is_the_users_to_see():
    def factory(width):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        base_shapes(factory, width=4)


def test_a_checkpoint_with_other_base_shapes(tmp_path):
    model = Net(32)
    plan = parametrize(model, base_shapes(Net, width=8))
    checkpoint = {"model": model.state_dict(), "plan": plan.to_dict()}
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)

    same = parametrize(Net(32), base_shapes(Net, width=8))
    same.check(loaded["plan"])
    other = parametrize(Net(32), base_shapes(Net, width=16))
    with refused(
        '"first.weight": the saved plan has base shape [8, 12] as input, this one [16, 12]', "same base shapes"
    ):
        other.check(loaded["plan"])
    wider = parametrize(Net(64), base_shapes(Net, width=8))
    with refused('"first.weight": [64, 12] here, [32, 12] in the saved plan'):
        wider.check(loaded["plan"])
    lazy = parametrize(Net(32), base_shapes(Net, width=8), "ntk")
    with refused("the saved plan has scheme mup, this one ntk"):
        lazy.check(loaded["plan"])
    with refused('"extra.weight", "extra.bias" exists in this network but not in the saved plan'):
        parametrize(Deeper(32), base_shapes(Deeper, width=8)).check(plan)
