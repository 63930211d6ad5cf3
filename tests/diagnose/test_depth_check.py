"""The coordinate check of depth; the laws themselves are tested in tests/optim/test_depth_laws.py."""

from __future__ import annotations

import pytest
import torch

from mukron.diagnose import depth_check
from mukron.models import ResidualMLP

DATA = torch.Generator().manual_seed(0)
BATCH = torch.randn(8, 6, generator=DATA), torch.randint(3, (8,), generator=DATA)


def network(width: int, depth: int) -> ResidualMLP:
    return ResidualMLP(width, 6, 3, depth, base_depth=2)


def sgd(model, plan):
    return torch.optim.SGD(plan.param_groups("sgd", lr=0.05))


def check(optimizer=sgd, **options):
    return depth_check(network, optimizer, BATCH, **{"base_width": 32, "base_depth": 2, **options})


def test_blocks_are_one_row_and_the_rest_has_its_own():
    result = check(depths=(2, 4, 8), seeds=1)
    assert set(result.in_blocks("features")) == {"blocks.*.norm", "blocks.*.up", "blocks.*.out"}
    assert {"features/stem", "update/head.weight", "stream/blocks", "output"} <= set(result.exponents)
    assert ("update", "blocks.*.up.weight") in {row[:2] for row in result.table().rows}
    assert result.table().title == "Change against depth 2, 4, 8"


def test_a_wrong_law_fails():
    """K-FAC's factor 1/L instead of SGD's L: features inside of blocks change like L^-2."""

    def wrong(model, plan):
        groups = plan.param_groups("sgd", lr=0.05)
        rates = {id(p): g["lr"] for g in groups for p in g["params"]}
        L = len(model.blocks) / 2
        inside = {id(p) for p in model.blocks.parameters()}
        return torch.optim.SGD(
            [{"params": [p], "lr": rates[id(p)] / (L**2 if id(p) in inside else 1)} for p in model.parameters()], lr=1.0
        )

    assert check(seeds=2).ok
    result = check(wrong, seeds=2)
    assert result.in_blocks("update")["blocks.*.up.weight"].slope == pytest.approx(-2, abs=0.3)
    assert not result.ok


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="at least two depths"):
        check(depths=(2,))
    with pytest.raises(ValueError, match="a width for each"):
        check(depths=(2, 4), widths=(32,))


@pytest.mark.parametrize("lr", [0.0, 1e30])
def test_networks_that_stand_still_or_blow_up_do_not_pass(lr):
    torch.manual_seed(0)
    found = depth_check(
        lambda width, depth: ResidualMLP(width, inputs=10, classes=4, depth=depth, base_depth=2),
        lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=lr)),
        (torch.randn(32, 10), torch.randint(4, (32,))),
        base_width=16,
        base_depth=2,
        depths=(2, 4, 8),
        seeds=1,
        steps=3,
    )
    assert not found.ok
    assert "stood still, or is no finite number" in str(found.table())
