"""In muP, features of the models of others change alike at two widths; where that is plainly not so, a test fails."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    BASE_WIDTH,
    HF_MODELS,
    LANGUAGE,
    METHODS,
    ROLES,
    TIMM_MODELS,
    cross_entropy,
    options_of,
    pictures,
    samples,
)
from torch.nn import functional as F

from mukron.diagnose import coordinate_check
from mukron.integrations import build_optimizer

CHECKED = ("AdamW", "K-FAC")


def cells(models, frameworks):
    return [
        pytest.param(name, method, marks=pytest.mark.cell(f"coordinate_check, {frameworks}", name, method))
        for name in models
        for method in CHECKED
    ]


def check(factory, name, method, batch, loss, **options):
    kind, lr = METHODS[method]

    def optimizer(model, plan):
        return build_optimizer(kind, model, plan, lr / 10, **options)

    found = coordinate_check(
        *(factory, optimizer, batch),
        base_width=BASE_WIDTH,
        widths=(64, 128),
        seeds=3,
        steps=2,
        loss=loss,
        roles=ROLES.get(factory),
    )
    assert found.ok or found.unclear, str(found.table())
    assert sum(verdict.ok for verdict in found.features) > 0.5 * len(found.features), str(found.table())


@pytest.mark.parametrize(("name", "method"), cells(HF_MODELS, "transformers"))
def test_models_of_transformers(name, method):
    pytest.importorskip("transformers")
    data = samples(name)
    inputs = {key: torch.stack([one[key] for one in data]) for key in data[0] if key != "labels"}
    targets = torch.stack([one["labels"] for one in data])
    batch = inputs, targets.roll(-1, 1) if name in LANGUAGE else targets
    check(HF_MODELS[name], name, method, batch, cross_entropy, **options_of(method, name))


@pytest.mark.parametrize(("name", "method"), cells(TIMM_MODELS, "timm"))
def test_models_of_timm(name, method):
    pytest.importorskip("timm")
    check(TIMM_MODELS[name], name, method, pictures(), F.cross_entropy)
