"""The laws of depth, tested as laws: fitted exponents of the change that one step makes inside of residual blocks.

``update`` is what the law is about: dW h, the part of the change of a layer's output that its own weight makes.
``features`` is the whole change, to which the residual stream brings what all other layers have changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional as F

import mukron
from mukron.diagnose import depth_check
from mukron.models import GPT, ResidualMLP

DEPTHS, DEEPER, SEEDS, BASE_WIDTH, BASE_DEPTH = (2, 4, 8, 16, 32), (16, 32, 64, 128), 2, 64, 2
DATA = torch.Generator().manual_seed(1)
BATCH = torch.randn(16, 16, generator=DATA), torch.randint(4, (16,), generator=DATA)
TOKENS = torch.randint(32, (4, 17), generator=DATA)

# The slope without the law, and how each optimizer is made. Steps are small even without the law at depth 128. Where
# B or its like is divided by, there is as much damping as is needed for a plain power law: see the last but one test.
METHODS = {
    "sgd": (-1, lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.05))),
    "foof": (-1, lambda model, plan: mukron.FOOF(model, plan, lr=0.05, trust=None)),
    "adamw": (0, lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=0.002), eps=1e-12)),
    "shampoo": (0, lambda model, plan: mukron.Shampoo(model, plan, lr=0.005, trust=None)),
    "shampoo:1": (1, lambda model, plan: mukron.Shampoo(model, plan, lr=1e-6, e=1, damping=0.1, trust=None)),
    "soap": (0, lambda model, plan: mukron.SOAP(model, plan, lr=0.002, trust=None)),
    "muon": (0, lambda model, plan: mukron.Muon(model, plan, lr=0.01)),
    "kfac": (1, lambda model, plan: mukron.KFAC(model, plan, lr=1e-3, damping=10.0, trust=None)),
    "gauss-newton": (1, lambda model, plan: mukron.GaussNewton(model, plan, lr=3e-4, trust=None)),
}


def network(width: int, depth: int) -> ResidualMLP:
    return ResidualMLP(width, inputs=16, classes=4, depth=depth, base_depth=BASE_DEPTH, norm=False)


def without_law(optimizer):
    """The same optimizer with a plan that knows of no blocks."""

    def make(model, plan):
        parameters = {
            name: replace(entry, growth=replace(entry.growth, L=None)) for name, entry in plan.parameters.items()
        }
        return optimizer(model, replace(plan, parameters=parameters).bind(model))

    return make


def check(optimizer, depths=DEPTHS, make=network, batch=BATCH, seeds=SEEDS, **options):
    sizes = {"base_width": BASE_WIDTH, "base_depth": BASE_DEPTH, "depths": depths, "seeds": seeds}
    return depth_check(make, optimizer, batch, **{**sizes, **options})


@cache
def with_law(method: str):
    return check(METHODS[method][1])


def slopes(found) -> dict[str, float]:
    return {name: round(exponent.slope, 3) for name, exponent in found.items()}


@pytest.mark.parametrize("method", METHODS)
def test_without_the_law_a_blocks_own_update_has_the_predicted_slope(method):
    predicted, optimizer = METHODS[method]
    updates = slopes(check(without_law(optimizer)).in_blocks("update"))
    assert set(updates) == {"blocks.*.up.weight", "blocks.*.out.weight"}
    assert all(abs(slope - predicted) < 0.25 for slope in updates.values()), updates


@pytest.mark.parametrize("method", ["foof", "kfac", "gauss-newton"])
def test_the_unpublished_laws_hold_to_within_a_tenth_in_deep_networks(method):
    predicted, optimizer = METHODS[method]
    updates = slopes(check(without_law(optimizer), DEEPER, seeds=1).in_blocks("update"))
    assert all(abs(slope - predicted) < 0.1 for slope in updates.values()), updates


@pytest.mark.parametrize("method", METHODS)
def test_with_the_law_features_inside_of_blocks_change_alike_at_every_depth(method):
    found = with_law(method)
    for quantity in ("update", "features"):
        measured = slopes(found.in_blocks(quantity))
        assert len(measured) == 2
        assert all(abs(slope) < 0.12 for slope in measured.values()), (quantity, measured)


@pytest.mark.parametrize("method", METHODS)
def test_with_the_law_the_residual_stream_and_the_output_move_alike(method):
    found = slopes(with_law(method).exponents)
    assert abs(found["stream/blocks"]) < 0.15, found  # at depth 2 a block still adds to a stream of its own size
    assert abs(found["output"]) < 0.12, found


@pytest.mark.parametrize("method", METHODS)
def test_depth_and_width_together(method):
    sizes = {"depths": (4, 8, 16, 32), "widths": (64, 128, 256, 512)}
    if method.startswith(("shampoo", "soap", "muon")):  # roots and orthogonalizations take long
        sizes["widths"] = (32, 64, 128, 256)
    found = check(METHODS[method][1], base_width=sizes["widths"][0] // 2, **sizes)
    measured = {**slopes(found.in_blocks("features")), "output": found.exponents["output"].slope}
    assert all(abs(slope) < 0.12 for slope in measured.values()), measured


def test_kfac_with_little_damping_approaches_the_law_slowly():
    """Where delta is that of the residual stream, B is of low rank but for a rest that depth takes away.

    The rest comes from the branches' random weights and is of relative size L^-1/2. Little damping amplifies it, so the
    update of a layer that writes to the stream falls until the rest is gone. Layers inside of the branch are not
    affected, and neither is the whole change of features.
    """
    found = check(lambda model, plan: mukron.KFAC(model, plan, lr=0.01, damping=1.0, fisher="exact", trust=None))
    updates = slopes(found.in_blocks("update"))
    assert abs(updates["blocks.*.up.weight"]) < 0.12
    assert -0.35 < updates["blocks.*.out.weight"] < -0.12
    assert all(abs(slope) < 0.12 for slope in slopes(found.in_blocks("features")).values())


BOUNDS = {"spectral": 0.01, "kl:1e-6": 0.01, "graft:adam": 0.001, "graft:sgd": 0.05}  # with learning rates


@pytest.mark.parametrize(("trust", "lr"), BOUNDS.items())
@pytest.mark.parametrize("method", [mukron.KFAC, mukron.GaussNewton])
def test_bounds_of_a_step_are_the_same_at_every_depth(method, trust, lr):
    """A bound acts on the move after its factor of L; a graft has the other rule's factor instead."""
    found = check(lambda model, plan: method(model, plan, lr=lr, trust=trust))
    assert abs(found.exponents["update/blocks.*.up.weight"].slope) < 0.12
    assert all(abs(slope) < 0.15 for slope in slopes(found.in_blocks("features")).values())


OF_TEXT = {
    **{name: METHODS[name][1] for name in ("sgd", "adamw", "muon", "soap", "shampoo", "foof")},
    "kfac": lambda model, plan: mukron.KFAC(model, plan, lr=1e-3, damping=10.0, class_dim=-1, trust=None),
    "gauss-newton": lambda model, plan: mukron.GaussNewton(model, plan, lr=1e-4),
}


@pytest.mark.parametrize("method", OF_TEXT)
def test_a_gpt(method):
    vocabulary = 4 if method == "gauss-newton" else 32  # one backward pass per output

    def gpt(width: int, depth: int) -> GPT:
        return GPT(width, depth, vocabulary=vocabulary, context=16, base_depth=BASE_DEPTH)

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    tokens = TOKENS % vocabulary
    batch = tokens[:, :-1], tokens[:, 1:]
    found = check(OF_TEXT[method], (2, 4, 8, 16), gpt, batch, base_width=32, loss=loss)
    ends = {name: slope for name, slope in slopes(found.in_blocks("features")).items() if name.endswith(".out")}
    assert len(ends) == 2
    assert all(abs(slope) < 0.15 for slope in ends.values()), ends
