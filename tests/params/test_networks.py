"""Roles and growth on whole networks: the paper's, and a GPT with tied embeddings."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mukron.models import CBOW, CNN, MLP, VGG19, ResNet18
from mukron.params import ParametrizationError, base_shapes, parametrize
from mukron.theory import Role
from networks import GPT, GPT_ROLES, LENGTH, VOCABULARY, Net


def plan_of(factory, base_width, width, **options):
    return parametrize(factory(width), base_shapes(factory, width=base_width, **options))


def roles(plan):
    return {name: parameter.role.value for name, parameter in plan.parameters.items()}


def test_mlp():
    assert roles(plan_of(MLP, 8, 32)) == {"fc1.weight": "input", "fc2.weight": "hidden", "fc3.weight": "output"}


def test_cnn_with_a_flatten():
    plan = plan_of(CNN, 2, 8)
    assert roles(plan) == {
        **{"conv1.weight": "input", "conv1.bias": "vector", "conv2.weight": "hidden", "conv2.bias": "vector"},
        **{"head.weight": "output", "head.bias": "scalar"},
    }
    head = plan.parameters["head.weight"]
    assert head.shape == (10, 16 * 49)  # channels x positions
    assert head.growth.r_in == 4


def test_resnet():
    plan = plan_of(ResNet18, 1, 2)
    found = roles(plan)
    assert found["stem.weight"] == "input"
    assert found["blocks.2.shortcut.0.weight"] == "hidden"  # strided
    assert {found[name] for name in found if "bn" in name or "shortcut.1" in name} == {"vector"}
    assert (found["head.weight"], found["head.bias"]) == ("output", "scalar")
    assert Counter(found.values()) == {"input": 1, "hidden": 19, "vector": 40, "output": 1, "scalar": 1}
    assert {plan.parameters[name].growth.r_in for name in found if found[name] == "hidden"} == {2}
    strides = {name: m.stride[0] for name, m in ResNet18(1).named_modules() if name.endswith("shortcut.0")}
    assert strides == {"blocks.2.shortcut.0": 2, "blocks.4.shortcut.0": 2, "blocks.6.shortcut.0": 2}


def test_vgg():
    found = roles(plan_of(VGG19, 1, 2))
    assert Counter(found.values()) == {"input": 1, "hidden": 15, "vector": 32, "output": 1, "scalar": 1}


def test_cbow():
    assert roles(plan_of(CBOW, 8, 32)) == {"embedding.weight": "input", "head.weight": "output"}


def test_gpt_untied():
    found = roles(plan_of(lambda width: GPT(width, tied=False), 16, 32, roles={"position": "input"}))
    assert (found["token.weight"], found["head.weight"]) == ("input", "output")


def test_gpt_tied_is_found_once_and_must_be_declared():
    with pytest.raises(ParametrizationError) as caught:
        base_shapes(GPT, width=16, roles={"position": "input"})
    assert 'input as "token.weight", output as "head.weight"' in str(caught.value)
    assert 'roles={"token.weight": "input"}' in str(caught.value)

    plan = plan_of(GPT, 16, 64, roles=GPT_ROLES)
    found = roles(plan)
    assert "head.weight" not in found
    assert plan.parameters["token.weight"].tied == ("head.weight",)
    assert found["position"] == found["token.weight"] == "input"
    for name in ("attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight"):
        assert found[f"blocks.0.{name}"] == "hidden"
    for name in ("attention.in_proj_bias", "attention.out_proj.bias", "norm1.weight", "up.bias", "down.bias"):
        assert found[f"blocks.1.{name}"] == "vector"
    assert {parameter.growth.r_out for parameter in plan.parameters.values()} == {4}


def test_a_step_moves_a_tied_gpts_logits_alike_at_every_width():
    """Declared as an input weight, with the division in its forward pass, the tied head moves by one size."""
    sizes = []
    for width in (16, 64, 256):
        torch.manual_seed(0)
        model = GPT(width)
        plan = parametrize(model, base_shapes(GPT, width=16, roles=GPT_ROLES))
        optimizer = torch.optim.AdamW(plan.param_groups("adamw", lr=0.01))
        tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
        before = model(tokens)
        torch.nn.functional.cross_entropy(before.flatten(0, 1), tokens.roll(-1).flatten()).backward()
        optimizer.step()
        sizes.append(float((model(tokens) - before).detach().std()))
    assert max(sizes) < 2 * min(sizes)


def test_tied_weights_that_agree_need_no_declaration():
    class Twice(Net):
        def __init__(self, width):
            super().__init__(width)
            self.again = torch.nn.Linear(width, width)
            self.again.weight = self.hidden.weight

    plan = plan_of(Twice, 4, 8)
    assert plan.parameters["hidden.weight"].role is Role.HIDDEN
    assert plan.parameters["hidden.weight"].tied == ("again.weight",)


def test_base_width_has_no_effect_at_the_base_width():
    """With a factory the network may be as narrow as the base: everything is as drawn."""
    torch.manual_seed(0)
    model = Net(8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = parametrize(model, base_shapes(Net, width=8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {scale.lr for scale in plan.scales("sgd").values()} == {1.0}


def test_huge_widths_need_no_memory():
    """Base shapes build at twice the base without memory, and a model on the meta device gets its plan."""
    with torch.device("meta"):
        model = MLP(2**20)
    plan = parametrize(model, base_shapes(MLP, width=64))
    assert plan.parameters["fc2.weight"].growth.r_in == 2**14
    assert plan.parameters["fc2.weight"].std == pytest.approx(plan.parameters["fc2.weight"].base_std / 2**7)


def devices_of_builds(width):
    """At which widths and on which devices ``base_shapes`` builds a network."""
    seen = set()

    def factory(width):
        model = Net(width)
        seen.add((width, model.hidden.weight.device.type))
        return model

    base_shapes(factory, width=width)
    return seen


def test_a_large_wider_network_is_built_on_the_meta_device_only():
    assert devices_of_builds(1024) == {(1024, "cpu"), (2048, "meta")}


def test_a_small_wider_network_is_also_drawn():
    assert devices_of_builds(4) == {(4, "cpu"), (8, "meta"), (8, "cpu")}


def test_a_factory_that_needs_numbers_is_built_with_numbers():
    def factory(width):
        model = Net(width)
        float(model.hidden.weight.detach().sum())  # fails on the meta device
        return model

    assert parametrize(Net(16), base_shapes(factory, width=4)).parameters["hidden.weight"].role is Role.HIDDEN


def test_base_shapes_leave_the_random_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = base_shapes(Net, width=4)
    assert torch.equal(torch.rand(4), expected)
    assert base_shapes(Net, width=4) == first  # and do not depend on it
