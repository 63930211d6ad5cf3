"""The float64 truths: right where the optimizers run in float64 themselves, and telling where an update is wrong."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from mukron.bench.agreement import COMPARISON_LR, Reference, kfac_update, relative_difference, shampoo_update
from mukron.bench.conv import conv_bench
from mukron.bench.kfac_step import KFAC_STEP
from mukron.bench.methods import BenchMethod
from mukron.bench.shampoo_step import SHAMPOO_STEP
from mukron.bench.tasks import Task, mlp_task, resnet_task


def first_update(method: BenchMethod, task: Task, width: int, samples: int) -> float:
    """How far it is from its truth, all in float64."""
    model = task.build(width, "cpu").double()
    x, y = task.pool(samples, "cpu")[0]
    x = x.double()
    assert method.reference_update is not None
    expected = method.reference_update(Reference(model, x, y))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method.make(model, COMPARISON_LR)(x, y)
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return relative_difference(before, after, COMPARISON_LR, expected)


def told(methods):
    return [pytest.param(method, id=method.name) for method in methods if method.reference_update is not None]


@pytest.mark.parametrize("method", told([*KFAC_STEP.methods, *SHAMPOO_STEP.methods[2:]]))
def test_our_updates_are_the_truth(method):
    assert first_update(method, mlp_task(), 24, 16) < (1e-4 if "newton" in method.name else 1e-8)


@pytest.mark.parametrize("method", told(conv_bench().methods))
def test_our_updates_of_a_residual_network_are_the_truth(method):
    assert first_update(method, resnet_task(), 1, 4) < 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", told([*KFAC_STEP.peers, *SHAMPOO_STEP.peers]))
def test_the_updates_of_peers_are_the_truth(method):
    try:
        version(method.package)
    except PackageNotFoundError:
        pytest.skip(f"{method.package} is not installed")
    assert first_update(method, mlp_task(), 24, 16) < 1e-8


@pytest.mark.parametrize(
    ("method", "reference_update"),
    [
        ("K-FAC (mc)", kfac_update("empirical")),
        ("K-FAC (empirical)", kfac_update("empirical", rho=lambda M: 1.01 * M.trace() / len(M))),
        ("FOOF", kfac_update("empirical")),
    ],
)
def test_another_truth_is_told_apart(method, reference_update):
    assert first_update(replace(KFAC_STEP.method(method), reference_update=reference_update), mlp_task(), 24, 16) > 1e-3


def test_shampoos_truth_is_that_of_dense_roots():
    """(L + rho)^-1/4 G (R + rho)^-1/4 with both sides written out."""

    def root(M, rho):
        values, vectors = torch.linalg.eigh(M + rho * torch.eye(len(M)))
        return (vectors * values.pow(-0.25)) @ vectors.T

    reference = Reference(mlp_task().build(6, "cpu"), *mlp_task().pool(8, "cpu")[0])
    updates = shampoo_update(lambda s: 1e-3)(reference)
    for name, G in reference.G.items():
        dense = root(G @ G.T, 1e-3) @ G @ root(G.T @ G, 1e-3)
        assert torch.allclose(updates[name], dense, rtol=1e-6, atol=1e-9), name
