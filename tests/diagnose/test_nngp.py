"""Kernels against their closed forms, and the step with which K-FAC lands on kernel regression."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, Fixed
from mukron.diagnose.nngp import (
    agreement,
    approach,
    feature_kernel,
    half_squares,
    kernel_regression,
    mlp_kernel,
    one_step_rate,
    one_step_ridge,
    variances_of,
)
from mukron.models import CNN, MLP
from networks import Net

BASE, CLASSES, SAMPLES, SEEDS = 64, 10, 256, range(3)


def digits(samples=SAMPLES, skip=0, dtype=torch.float32):
    images, labels = load_digits(return_X_y=True)
    chosen = slice(skip, skip + samples)
    y = F.one_hot(torch.tensor(labels[chosen]), CLASSES).to(dtype) - 1 / CLASSES
    return torch.tensor(images[chosen] / 16, dtype=dtype), y


def start(width=256, seed=0, dtype=torch.float32, output_exponent: float | str = 64):
    def make(width):
        return MLP(width, inputs=64, classes=CLASSES).to(dtype)

    torch.manual_seed(seed)
    model = make(width)
    return model, mukron.parametrize(model, mukron.base_shapes(make, width=BASE), output_exponent=output_exponent)


def kfac(model, plan, rho=1.0, likelihood="gaussian", fisher="exact", seed=0):
    lr = one_step_rate(damping=rho, classes=CLASSES, likelihood=likelihood)
    with pytest.warns(UserWarning, match="kernel-regression"):
        return KFAC(model, plan, lr=lr, damping=rho, likelihood=likelihood, fisher=fisher, seed=seed, trust=None)


def foof(model, plan, rho=1.0):
    with pytest.warns(UserWarning, match="kernel-regression"):
        return FOOF(model, plan, lr=1.0, damping=rho, trust=None)


def ridge_of(model, x, rho=1.0):
    return one_step_ridge(feature_kernel(model, x), damping=rho, base_size=BASE)


def hidden(model):
    return [weight.detach().clone() for weight in list(model.parameters())[:-1]]


# The closed form.


def quadrature(activation, p, q, c):
    """E[phi(u) phi(v)] for variances p, q and correlation c, by brute force."""
    if activation == "relu":  # in polar coordinates: half a turn at most, times E[r^2] = 2
        angle = (np.arange(200_000) + 0.5) * 2 * np.pi / 200_000
        both = np.maximum(np.cos(angle), 0) * np.maximum(np.cos(angle - np.arccos(c)), 0)
        return 2 * np.sqrt(p * q) * both.mean()
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    u, v = np.meshgrid(nodes, nodes, indexing="ij")
    phi = {"erf": np.vectorize(math.erf), "identity": lambda x: x}[activation]
    values = phi(np.sqrt(p) * u) * phi(np.sqrt(q) * (c * u + np.sqrt(1 - c**2) * v))
    return weights @ values @ weights / (2 * np.pi)


@pytest.mark.parametrize("activation", ["relu", "erf", "identity"])
def test_one_layer_is_the_gaussian_expectation(activation):
    x, y = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([[0.5, 1.0, 2.0]])
    p, q, c = 0.7 * 6 / 3, 0.7 * 5.25 / 3, 0.5 / math.sqrt(6 * 5.25)
    found = mlp_kernel(x, y, variances=[0.7], activation=activation)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(quadrature(activation, p, q, c), rel=1e-7)


def test_equal_opposite_and_zero_samples_are_safe():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, 3 * x, -x, torch.zeros(1, 7, dtype=torch.float64)])
    K = mlp_kernel(x, variances=[2.0])
    torch.testing.assert_close(K.diagonal(), x.square().mean(1))  # He's variance keeps the size
    torch.testing.assert_close(K[:5, 5:10].diagonal(), 3 * K[:5, :5].diagonal())
    assert float(K[:5, 10:15].diagonal().abs().max()) < 1e-12  # no unit sees both x and -x
    assert not K[-1].any()
    for activation in ("relu", "erf"):
        kernel = partial(mlp_kernel, variances=[2.0, 1.0, 0.5], activation=activation)
        K = kernel(x)
        torch.testing.assert_close(K, K.T)
        assert float(torch.linalg.eigvalsh(K).min()) > -1e-12
        torch.testing.assert_close(K[:4, 3:9], kernel(x[:4], x[3:9]))


def test_what_has_no_closed_form_is_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="no closed form for activation 'gelu'; known: relu, erf, identity"):
        mlp_kernel(x, variances=[1.0], activation="gelu")
    with pytest.raises(ValueError, match="one number a hidden layer"):
        mlp_kernel(x, variances=[])
    with pytest.raises(ValueError, match="none of them negative"):
        mlp_kernel(x, variances=[1.0, -1.0])
    with pytest.raises(ValueError, match="x has 3 inputs a sample and y has 4"):
        mlp_kernel(x, torch.ones(2, 4), variances=[1.0])
    with pytest.raises(ValueError, match=r"without biases, but Net also has first\.bias"):
        variances_of(Net(8))
    with pytest.raises(ValueError, match="has 1 Linear"):
        variances_of(nn.Linear(3, 2, bias=False))


# Networks of finite width against it, within their own sampling error.


def z_score(kernels, closed):
    """The root mean square, over all pairs of samples, of the mean's distance in standard errors: about 1 if equal."""
    off = torch.stack(kernels) - closed
    z = off.mean(0) / (off.std(0) / len(kernels) ** 0.5)
    return float(z.square().mean().sqrt())


def normal_input(model):
    """The formula wants normal weights where the fan-in is finite; torch draws uniform ones."""
    nn.init.normal_(model.fc1.weight, std=(2 / model.fc1.in_features) ** 0.5)


@pytest.fixture(scope="module")
def wide_networks():
    """Twelve networks of width 4096, the kernels of each with both activations, and their weights' variances.

    Their mean strays like that of six networks of width 8192, which cost twice as much.
    """
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(5))
    kernels, variances = {"relu": [], "erf": []}, []
    for seed in range(12):
        torch.manual_seed(seed)
        relu = MLP(4096, inputs=16)
        normal_input(relu)
        with torch.device("meta"):
            erf = MLP(4096, inputs=16, activation="erf")
        erf.fc1, erf.fc2, erf.fc3 = relu.fc1, relu.fc2, relu.fc3
        kernels["relu"].append(feature_kernel(relu, x))
        kernels["erf"].append(feature_kernel(erf, x))
        variances.append(variances_of(relu))
    return x, kernels, variances


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_wide_networks_have_the_closed_form_kernel(wide_networks, activation):
    x, kernels, _ = wide_networks
    closed = mlp_kernel(x, variances=[2, 1 / 3], activation=activation)
    assert z_score(kernels[activation], closed) < 2  # measured: 1.05 for both
    assert all(float((K - closed).norm() / closed.norm()) < 0.1 for K in kernels[activation])
    wrong = mlp_kernel(x, variances=[2, 1.1 / 3], activation=activation)
    assert z_score(kernels[activation], wrong) > 4  # the test sees a tenth: 9.7 and 5.1


def test_variances_are_those_that_were_drawn(wide_networks):
    _, _, variances = wide_networks
    np.testing.assert_allclose(variances, [[2, 1 / 3]] * 12, rtol=0.02)


@pytest.mark.parametrize("hidden_layers", [2, 4])
@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_deeper_networks_have_it_too(activation, hidden_layers):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    kernels = []
    for seed in range(40):
        torch.manual_seed(seed)
        model = MLP(768, inputs=16, depth=hidden_layers + 1, activation=activation).double()
        normal_input(model)
        kernels.append(feature_kernel(model, x))
    variances = [2.0, *[1 / 3] * (hidden_layers - 1)]
    assert z_score(kernels, mlp_kernel(x, variances=variances, activation=activation)) < 2
    variances[-1] *= 1.2
    assert z_score(kernels, mlp_kernel(x, variances=variances, activation=activation)) > 4


def test_regression_with_features_nears_the_infinite_width_one_like_the_root_of_the_width():
    x, y = digits()
    widths, distances = (256, 1024, 4096), []
    for width in widths:
        model, _ = start(width)
        kernels = feature_kernel(model, x), mlp_kernel(x, variances=variances_of(model))
        finite, infinite = (
            kernel_regression(K, y, ridge=one_step_ridge(K, damping=1.0, base_size=BASE)) for K in kernels
        )
        distances.append(agreement(finite, infinite).distance)
    slope = np.polyfit(np.log(widths), np.log(distances), 1)[0]
    assert slope == pytest.approx(-1 / 2, abs=0.1), distances
    assert distances[-1] < 0.1


# The kernel of any network.


def test_the_kernel_is_of_what_the_output_layer_reads():
    torch.manual_seed(0)
    model, x, y = Net(16), torch.randn(6, 12), torch.randn(4, 12)

    def h(x):
        return F.relu(model.norm(model.hidden(F.relu(model.first(x))))).double()

    torch.testing.assert_close(feature_kernel(model, x), (h(x) @ h(x).T / 16).detach())
    torch.testing.assert_close(feature_kernel(model, x, y), (h(x) @ h(y).T / 16).detach())
    by_name = feature_kernel(model, x, layer="first")
    torch.testing.assert_close(by_name, (x @ x.T / 12).double(), rtol=1e-6, atol=1e-6)
    assert not feature_kernel(model, x).requires_grad


def test_a_convolutional_network_has_one_too():
    torch.manual_seed(0)
    model = CNN(4)
    K = feature_kernel(model, torch.randn(5, 1, 28, 28))
    assert K.shape == (5, 5)
    assert float(torch.linalg.eigvalsh(K).min()) > 0


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head, self.spare = (
            *(nn.Linear(3, 8), nn.BatchNorm1d(8)),
            *(nn.Linear(8, 2), nn.Linear(8, 2)),
        )

    def forward(self, x):
        return self.head(input=self.norm(self.first(x)))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    torch.manual_seed(0)
    model, x = Normed().train(training), torch.randn(16, 3) + 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    K = feature_kernel(model, x)
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    # while training, features are those of the batch's own statistics: their mean square is 1
    assert (abs(float(K.trace()) / 16 - 1) < 1e-3) is training


def test_hooks_leave_a_model_that_fails_too():
    model = Normed()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        feature_kernel(model, torch.randn(4, 5))
    assert not any(module._forward_hooks for module in model.modules())


def test_looking_at_features_does_not_change_a_step_of_kfac():
    x, y = digits(32)
    outcomes = []
    for look in (False, True):
        torch.manual_seed(0)
        model = MLP(32, inputs=64)
        optimizer = KFAC(model, lr=0.01, likelihood="gaussian", trust=None)
        half_squares(model(x), y).backward()
        if look:
            feature_kernel(model, x)
        optimizer.step()
        outcomes.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(*outcomes)


def test_a_layer_that_cannot_be_meant_is_refused():
    model, x = Normed(), torch.randn(4, 3)
    with pytest.raises(ValueError, match='no layer "tail"; its Linear layers: first, head, spare'):
        feature_kernel(model, x, layer="tail")
    with pytest.raises(ValueError, match='"spare" did not run'):
        feature_kernel(model, x, layer="spare")
    with pytest.raises(ValueError, match=r"no Linear layer ran; name the output layer: layer=\.\.\."):
        feature_kernel(nn.Conv1d(1, 1, 1), torch.randn(2, 1, 3))
    folded = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2))
    with pytest.raises(ValueError, match='"1" read 8 rows for 4 samples'):
        feature_kernel(folded, torch.randn(4, 2, 3))


# Kernel regression.


def test_kernel_regression_solves_its_equation():
    draw = torch.Generator().manual_seed(0)
    H, T = torch.randn(12, 20, generator=draw), torch.randn(5, 20, generator=draw)
    y = torch.randn(12, 3, generator=draw)
    K, K_test = (H @ H.T / 20).double(), (T @ H.T / 20).double()
    expected = K @ torch.linalg.inv(K + 0.1 * torch.eye(12)) @ y.double()
    torch.testing.assert_close(kernel_regression(K, y, ridge=0.1), expected)
    torch.testing.assert_close(kernel_regression(K, y, ridge=0.0), y.double())
    # ridge regression of the features, whose weights are damped by rho_A:  W = (A + rho_A)^-1 H^T y / n
    rho_A = 0.1 * 20 / 12
    W = torch.linalg.solve(H.T @ H / 12 + rho_A * torch.eye(20), H.T @ y / 12)
    torch.testing.assert_close(kernel_regression(K, y, K_test, ridge=0.1), (T @ W).double(), rtol=1e-4, atol=1e-4)
    column = kernel_regression(K, y[:, 0], K_test, ridge=0.1)
    assert column.shape == (5,)
    torch.testing.assert_close(column, kernel_regression(K, y, K_test, ridge=0.1)[:, 0])


def test_regressions_that_make_no_sense_are_refused():
    K, y = torch.eye(4), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"expected a kernel \[n, n\] and n targets, got \[4, 4\] and \[3, 2\]"):
        kernel_regression(K, y[:3], ridge=1.0)
    with pytest.raises(ValueError, match="against the 4 training samples"):
        kernel_regression(K, y, torch.ones(2, 3), ridge=1.0)
    with pytest.raises(ValueError, match="ridge must not be negative"):
        kernel_regression(K, y, ridge=-1.0)
    with pytest.raises(ValueError, match="not positive definite; raise the ridge"):
        kernel_regression(torch.zeros(4, 4), y, ridge=0.0)


def test_agreement_tells_direction_from_size():
    best = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    near = agreement(0.25 * best, best)
    assert near == pytest.approx((1.0, 0.75, 0.25))
    assert agreement(-best, best) == pytest.approx((-1.0, 2.0, 1.0))
    assert agreement(torch.zeros(2, 2), best) == (0.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"outputs are \[2, 1\], the solution is \[2, 2\]"):
        agreement(best[:, :1], best)
    with pytest.raises(ValueError, match="zero everywhere"):
        agreement(best, 0 * best)


# The step that lands on it.


@pytest.mark.parametrize("seed", SEEDS)
def test_one_step_of_kfac_lands_on_kernel_regression(seed):
    (x, y), (x_test, _) = digits(), digits(100, skip=1000)
    model, plan = start(seed=seed)
    K, K_test = feature_kernel(model, x), feature_kernel(model, x_test, x)
    ridge, before = ridge_of(model, x), hidden(model)
    optimizer = kfac(model, plan)
    first, landed = approach(model, optimizer, x, y, steps=1, ridge=ridge).rows
    assert (first.correlation, first.distance, first.size) == (0.0, 1.0, 0.0)
    assert landed.correlation > 0.999
    assert landed.distance < 3e-5  # float32; measured: 2e-6 to 4e-6
    assert landed.loss == pytest.approx(float(half_squares(kernel_regression(K, y, ridge=ridge), y)), rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(hidden(model), before, strict=True))
    # and so it predicts as kernel regression does where it has not been trained
    assert agreement(model(x_test), kernel_regression(K, y, K_test, ridge=ridge)).distance < 3e-5


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets + 1 / CLASSES)


@pytest.mark.parametrize("rho", [1.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "make"),
    [
        (half_squares, kfac),
        (half_squares, lambda *args: kfac(*args, likelihood="categorical")),
        (cross_entropy, lambda *args: kfac(*args, likelihood="categorical")),
        (half_squares, foof),
    ],
    ids=["squares", "squares, categorical", "cross-entropy", "FOOF"],
)
def test_in_float64_from_zero_it_is_exact(loss, make, rho):
    x, y = digits(dtype=torch.float64)
    model, plan = start(dtype=torch.float64, output_exponent="zero")
    ridge = ridge_of(model, x, rho)
    landed = approach(model, make(model, plan, rho), x, y, steps=1, ridge=ridge, loss=loss).rows[1]
    assert landed.distance < 1e-11, landed


def test_any_other_damping_is_a_ridge_too():
    """n rho_A / d, here with a fixed rho_A, which muP scales by r_in; B = 1 and its own damping make the rate."""
    x, y = digits(dtype=torch.float64)
    model, plan = start(dtype=torch.float64, output_exponent="zero")
    with pytest.warns(UserWarning, match="kernel-regression"):
        optimizer = KFAC(
            model, plan, lr=1.5, damping=Fixed(a=0.2, b=0.5), fisher="exact", likelihood="gaussian", trust=None
        )
    ridge = SAMPLES * (0.2 * 256 / BASE) / 256
    assert approach(model, optimizer, x, y, steps=1, ridge=ridge).rows[1].distance < 1e-11


def test_a_step_of_another_size_goes_part_of_the_way():
    x, y = digits()
    model, plan = start()
    optimizer = kfac(model, plan)
    optimizer.param_groups[0]["lr"] /= 10
    landed = approach(model, optimizer, x, y, steps=1, ridge=ridge_of(model, x)).rows[1]
    assert landed[2:] == pytest.approx((1.0, 0.9, 0.1), rel=1e-4)


@pytest.mark.parametrize("samples", [64, 1024])
def test_drawn_targets_stray_like_the_root_of_the_samples(samples):
    x, y = digits(samples)
    distances = []
    for seed in range(4):
        model, plan = start(seed=seed)
        optimizer = kfac(model, plan, fisher="mc", seed=seed)
        distances.append(approach(model, optimizer, x, y, steps=1, ridge=ridge_of(model, x)).rows[1].distance)
    expected = ((CLASSES + 1) / samples) ** 0.5 / 2
    assert np.mean(distances) == pytest.approx(expected, rel=0.25)  # 0.21 and 0.052


@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_sgd_does_not_land_there(lr):
    x, y = digits()
    for seed in SEEDS:
        model, plan = start(seed=seed)
        optimizer = torch.optim.SGD(plan.param_groups("sgd", lr=lr))
        way = approach(model, optimizer, x, y, steps=20, ridge=ridge_of(model, x))
        assert not way.trouble
        assert way.rows[1].correlation < 0.8  # measured: 0.62 to 0.70
        assert max(row.correlation for row in way.rows) < 0.97  # 0.89 to 0.93
        assert min(row.distance for row in way.rows) > 0.2  # 0.36 to 0.86


def test_small_output_weights_are_not_zero_ones():
    """K-FAC's step in hidden layers grows like one over the output weights, until their squares vanish."""
    x, y = digits(dtype=torch.float64)
    moves = []
    for exponent in (2, 3):
        model, plan = start(dtype=torch.float64, output_exponent=exponent)
        before = hidden(model)
        optimizer = KFAC(model, plan, lr=1.0, fisher="exact", likelihood="gaussian", trust=None)
        half_squares(model(x), y).backward()
        optimizer.step()
        moves.append([float((a - b).norm()) for a, b in zip(hidden(model), before, strict=True)])
    np.testing.assert_allclose(np.divide(*reversed(moves)), 256 / BASE, rtol=0.05)


def test_from_other_outputs_the_regression_is_to_what_they_lack():
    """With the hidden layers held, every step of K-FAC is the same regression to what is left."""
    x, y = digits(dtype=torch.float64)
    model, plan = start(dtype=torch.float64, output_exponent=1)
    for weight in list(model.parameters())[:-1]:
        weight.requires_grad_(False)
    optimizer = KFAC(
        model, plan, lr=2.0, fisher="exact", likelihood="gaussian", params=[model.fc3.weight], trust=None
    )  # damping 1: rate 2
    ridge, start_outputs = ridge_of(model, x), model(x).detach()
    _, first, second = approach(model, optimizer, x, y, steps=2, ridge=ridge).rows
    assert float(start_outputs.norm()) > 0.1
    assert first.distance < 1e-11
    K = feature_kernel(model, x)
    once = kernel_regression(K, y - start_outputs, ridge=ridge)
    twice = once + kernel_regression(K, y - start_outputs - once, ridge=ridge)
    assert second[2:] == pytest.approx(tuple(agreement(twice, once)), rel=1e-9)


# What is kept of a run.


def test_an_approach_reads_as_a_table_and_as_plain_data():
    x, y = digits(32)
    model, plan = start()
    way = approach(model, torch.optim.SGD(plan.param_groups("sgd", lr=1.0)), x, y, steps=3, ridge=0.5)
    assert [row.step for row in way.rows] == [0, 1, 2, 3]
    losses = [row.loss for row in way.rows]
    assert losses == sorted(losses, reverse=True)
    table = way.table()
    assert table.columns == ("step", "loss", "correlation", "distance", "size")
    assert table.rows[0] == ("0", "0.45", "0", "1", "0")
    assert "ridge 0.5" in str(table)
    data = json.loads(json.dumps(way.to_dict(), allow_nan=False))
    assert data["ridge"] == 0.5
    assert data["rows"][3] == {**way.rows[3]._asdict()}


def test_a_run_that_diverges_keeps_what_came_before():
    x, y = digits()
    model, plan = start()
    way = approach(model, torch.optim.SGD(plan.param_groups("sgd", lr=10.0)), x, y, steps=20, ridge=0.5)
    assert 1 < len(way.rows) < 21
    assert way.trouble in str(way.table())
    assert way.trouble.startswith("the loss is ")
    assert all(math.isfinite(number) for row in way.rows for number in row)


def test_a_step_that_is_skipped_is_told():
    def undifferentiable(outputs, targets):  # a finite loss whose gradient is not
        return half_squares(outputs, targets) + (0 * outputs).abs().sqrt().sum()

    x, y = digits(32)
    model, plan = start()
    way = approach(model, kfac(model, plan), x, y, steps=3, ridge=0.5, loss=undifferentiable)
    assert [row.step for row in way.rows] == [0]
    assert way.trouble == "step 1 was skipped: gradients or curvature were not finite"
    assert way.trouble in str(way.table())


def test_runs_that_make_no_sense_are_refused():
    x, y = digits(8)
    model, plan = start()
    optimizer = torch.optim.SGD(plan.param_groups("sgd", lr=1.0))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        approach(model, optimizer, x, y, steps=0, ridge=0.5)
    with pytest.raises(ValueError, match=r"targets are \[8\], the model's outputs \[8, 10\]"):
        approach(model, optimizer, x, y[:, 0], steps=1, ridge=0.5)
    with pytest.raises(ValueError, match="unknown likelihood 'poisson'; known: 'gaussian', 'categorical'"):
        one_step_rate(damping=1.0, classes=10, likelihood="poisson")
