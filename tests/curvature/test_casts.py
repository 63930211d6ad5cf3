"""Losses that a model computes inside of itself, with outputs that a wrapper casts afterwards (Accelerate does so)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from alone import run_with_a_process_group
from mukron import KFAC
from scored import METHODS, Scored, X, Y, cast_after, trained


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Scored()


CASTS = {
    "bfloat16 to float32": (True, [torch.float32]),
    "bfloat16 to float64 to float32": (True, [torch.float64, torch.float32]),
    "float32 to float64": (False, [torch.float64]),
    "float32 to bfloat16 to float32": (False, [torch.bfloat16, torch.float32]),
    "none": (False, [torch.float32]),
}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_inside_the_model_is_heard_behind_casts(model, method, cast, micro):
    """The weights are those of the same model without casts, under the same autocast, and with the loss outside."""
    autocast, dtypes = CASTS[cast]
    plain = cast_after(copy.deepcopy(model), autocast=autocast, dtypes=[])
    _, expected = trained(plain, METHODS[method], inside=False, micro=micro)
    _, found = trained(cast_after(model, autocast=autocast, dtypes=dtypes), METHODS[method], inside=True, micro=micro)
    lossy = "bfloat16 to float32" in cast and not autocast  # signals are drawn at rounded outputs
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 if lossy else 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_outside_of_a_model_whose_outputs_are_cast(model, method):
    plain = cast_after(copy.deepcopy(model), autocast=True, dtypes=[])
    _, expected = trained(plain, METHODS[method], inside=False)
    _, found = trained(cast_after(model, autocast=True, dtypes=[torch.float32]), METHODS[method], inside=False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_derivatives_inside_and_outside_of_the_model_add_up(model):
    """One term of the loss uses the logits before the cast, the other one those after it."""
    cast_after(model, autocast=True, dtypes=[torch.float32])
    optimizer = KFAC(model, fisher="empirical", output=lambda returned: returned["logits"])
    returned = model(X, Y)
    (returned["loss"] + F.cross_entropy(returned["logits"], Y)).backward()
    (one,) = optimizer.capture.passes
    p = returned["logits"].detach().softmax(-1) - F.one_hot(Y, 4)
    torch.testing.assert_close(one.errors, 2 * p / len(X), rtol=2e-2, atol=1e-4)


@pytest.mark.slow
def test_the_casts_of_a_model_inside_of_ddp():
    run_with_a_process_group(
        """
        import copy
        from torch.nn.parallel import DistributedDataParallel
        from scored import METHODS, Scored, cast_after, trained

        for name, method in METHODS.items():
            if name == "kfac fused":  # DDP's wrapper waits for gradients that are never formed
                continue
            torch.manual_seed(0)
            model = Scored()
            plain = cast_after(copy.deepcopy(model), autocast=True, dtypes=[])
            _, expected = trained(plain, method, inside=False, micro=2)
            cast_after(model, autocast=True, dtypes=[torch.float32])
            called = DistributedDataParallel(model)
            _, found = trained(model, method, called, inside=True, micro=2)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")
        """
    )
