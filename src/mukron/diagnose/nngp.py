"""NNGP: the kernel of a network's last features, and how far training is from kernel regression with it.

    H [n, d]                               the last features: the input of the output layer for n samples
    K = H H^T / d                          their kernel; in an infinitely wide network, E[h(x) h(y)] of one unit
    f*(x) = K(x, .) (K + ridge I)^-1 Y     kernel regression to the targets Y [n, C]

**Why K-FAC's first step arrives there** (Section 4.3 of the paper). At output weights of zero, the gradient of the
squared error by them is G = -Y^T H / n, and with A = H^T H / n the first step gives

    W = lr (B + rho_B)^-1 Y^T H (A + rho_A)^-1 / n,    f(x) = lr K(x, .) (K + n rho_A / d I)^-1 Y (B + rho_B)^-1.

This is f* itself, up to rounding, if B acts on the targets as a number: lr = B + rho_B, ridge = n rho_A / d. With
``Rescaled`` damping these are ``one_step_rate`` and ``one_step_ridge``. B is a number if it is exact
(``fisher="exact"``); if it is estimated from drawn targets ("mc"), B and the outputs are noisy: the outputs deviate by
((C + 1) / n)^1/2 / (1 + rho) of their size. FOOF has no B: its rate is 1. The gradients of all other layers pass
through the output weights, so these layers do not change. SGD's first step gives f ~ K Y, which solves nothing.

All of this needs output weights of zero, ``output_exponent="zero"``, or so small that their squares underflow: with an
exponent of 64 they do so in float32 from 3 times the base width on, in float64 from 512 times. Weights that are small
but do not underflow behave differently: the first step divides a hidden layer's gradient, which is proportional to W,
by a factor and a damping that are proportional to W^2. The step grows like 1 / W and destroys the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mukron.diagnose.nngp_record import Approach, ApproachStep, agreement
from mukron.params.inventory import unwrap
from mukron.train.calls import untouched

# The kernel of the infinitely wide network.


def _relu(k: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The arc-cosine kernel of order 1 (Cho and Saul 2009)."""
    size = p.sqrt() * q.sqrt()
    c = (k / size.clamp_min(torch.finfo(k.dtype).tiny)).clamp(-1, 1)
    return size / (2 * math.pi) * ((1 - c.square()).sqrt() + c * (math.pi - c.arccos()))


def _erf(k: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The arcsine kernel (Williams 1997)."""
    return 2 / math.pi * (2 * k / ((1 + 2 * p) * (1 + 2 * q)).sqrt()).clamp(-1, 1).arcsin()


# E[phi(u) phi(v)] for normal u, v of covariance k and variances p, q.
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": _relu,
    "erf": _erf,
    "identity": lambda k, p, q: k,
}


def mlp_kernel(x: Tensor, y: Tensor | None = None, *, variances: Sequence[float], activation: str = "relu") -> Tensor:
    """Compute the kernel E[h(x) h(y)] of an infinitely wide MLP without biases, in closed form and in float64.

    h is the last hidden layer. In layers behind wide ones the weights may have any distribution; in the input layer,
    whose fan-in is finite, the formula is exact for normal weights.

    Args:
        x: Samples [n, ...].
        y: Samples [m, ...]; by default those of ``x``.
        variances: The fan-in times the variance of the weights of every hidden layer, beginning with the input layer.
            He's rule for ReLU has 2, torch draws a ``Linear`` with 1/3. ``variances_of`` computes them for a network.
        activation: ``"relu"``, ``"erf"`` or ``"identity"``.

    Returns:
        The kernel [n, m].

    Raises:
        ValueError: The activation has no closed form, a variance is negative or none is given, or x and y differ in
            their number of inputs.

    Example:
        >>> import torch
        >>> from mukron.diagnose import mlp_kernel
        >>> mlp_kernel(torch.eye(2), variances=[2.0], activation="identity")
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    if activation not in KERNELS:
        raise ValueError(f"no closed form for activation {activation!r}; known: {', '.join(KERNELS)}")
    if not variances or not all(variance >= 0 for variance in variances):
        raise ValueError(f"variances are one number a hidden layer, none of them negative, got {list(variances)}")
    x = x.flatten(1).double()
    y = x if y is None else y.flatten(1).double()
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} inputs a sample and y has {y.shape[1]}; one network takes both")
    phi = KERNELS[activation]
    k, p, q = x @ y.T / x.shape[1], x.square().mean(1)[:, None], y.square().mean(1)[None, :]
    for variance in variances:
        k, p, q = variance * k, variance * p, variance * q
        k, p, q = phi(k, p, q), phi(p, p, p), phi(q, q, q)
    return k


def variances_of(model: nn.Module) -> list[float]:
    """Compute the variances of an MLP's hidden layers, as ``mlp_kernel`` takes them.

    Args:
        model: An MLP without biases, before training.

    Returns:
        The fan-in times the mean square of the weights, for every hidden layer.

    Raises:
        ValueError: The model has other parameters than the weights of linear layers, or no hidden layer.

    Example:
        >>> from mukron.diagnose import variances_of
        >>> from mukron.models import MLP
        >>> len(variances_of(MLP(16, inputs=8, depth=3)))
        2
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = {id(weight) for weight in weights}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if others:
        raise ValueError(
            f"the closed form is that of an MLP without biases, but {type(model).__name__} also has "
            f"{', '.join(others[:4])}; compare with feature_kernel of a wider network instead"
        )
    if len(weights) < 2:
        raise ValueError(f"an MLP has a hidden and an output layer; {type(model).__name__} has {len(weights)} Linear")
    return [weight.shape[1] * float(weight.detach().square().mean(dtype=torch.float64)) for weight in weights[:-1]]


# The kernel of a given network.


def feature_kernel(model: nn.Module, x: Tensor, y: Tensor | None = None, *, layer: str | None = None) -> Tensor:
    """Compute the kernel h(x) . h(y) / d of a network's last features, in float64.

    h(x) is the input of the output layer, d numbers per sample. The model runs in the mode that it is in: in training
    mode batch norm uses the statistics of the batch, and dropout is active. The model is not changed, nor are its
    running averages.

    Args:
        model: Any network.
        x: Samples [n, ...].
        y: Samples [m, ...]; by default those of ``x``.
        layer: The name of the output layer; by default the last ``Linear`` that runs.

    Returns:
        The kernel [n, m].

    Raises:
        ValueError: There is no such layer, it does not run, or it does not keep samples apart.

    Example:
        >>> import torch
        >>> from mukron.diagnose import feature_kernel
        >>> from mukron.models import MLP
        >>> feature_kernel(MLP(16, inputs=4), torch.randn(3, 4)).shape
        torch.Size([3, 3])
    """
    H = _features(model, x, layer)
    return H @ (H if y is None else _features(model, y, layer)).T / H.shape[1]


def _features(model: nn.Module, x: Tensor, layer: str | None) -> Tensor:
    """Return the input [n, d] of a layer; by default of the last Linear that runs."""
    model = unwrap(model)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if layer is None:
        watched: dict[str, nn.Module] = {**linear}
    elif layer in (modules := dict(model.named_modules())):
        watched = {layer: modules[layer]}
    else:
        raise ValueError(f'the network has no layer "{layer}"; its Linear layers: {", ".join(linear) or "none"}')
    last_input: list[tuple[str, Tensor]] = []  # at most one

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        h = args[0] if args else next(iter(kwargs.values()))
        last_input[:] = [(name, h.to(torch.float64, copy=True))]  # a copy, since later layers may change it in place

    handles = [module.register_forward_hook(partial(keep, name), with_kwargs=True) for name, module in watched.items()]
    try:
        with untouched(model):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    if not last_input:
        raise ValueError(
            f'layer "{layer}" did not run' if layer else "no Linear layer ran; name the output layer: layer=..."
        )
    name, h = last_input[0]
    if h.shape[0] != x.shape[0]:
        raise ValueError(
            f'layer "{name}" read {h.shape[0]} rows for {x.shape[0]} samples; name a layer that keeps samples apart'
        )
    return h.flatten(1)


# Kernel regression, and the step that arrives at its solution.


def kernel_regression(K_train: Tensor, targets: Tensor, K_test: Tensor | None = None, *, ridge: float) -> Tensor:
    """Compute the solution of kernel regression, K_test (K_train + ridge I)^-1 targets, in float64.

    Args:
        K_train: The kernel of the training samples [n, n].
        targets: The targets of the training samples, [n] or [n, C].
        K_test: The kernel of test samples against training samples [m, n]; by default ``K_train``.
        ridge: The number added to the diagonal. K-FAC's damping rho_A of A = H^T H / n, with K = H H^T / d, amounts to
            a ridge of n rho_A / d; for ``Rescaled`` damping that is ``one_step_ridge``.

    Returns:
        The outputs at the test samples, [m] or [m, C].

    Raises:
        ValueError: The shapes do not match, the ridge is negative, or the kernel with the ridge is not positive
            definite.

    Example:
        >>> import torch
        >>> from mukron.diagnose import kernel_regression
        >>> kernel_regression(torch.eye(2), torch.tensor([1.0, 2.0]), ridge=1.0)
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    n = K_train.shape[0]
    if K_train.shape != (n, n) or targets.shape[0] != n:
        raise ValueError(f"expected a kernel [n, n] and n targets, got {list(K_train.shape)} and {list(targets.shape)}")
    if K_test is not None and K_test.shape[-1] != n:
        raise ValueError(f"K_test is {list(K_test.shape)}; expected test samples against the {n} training samples")
    if not ridge >= 0:
        raise ValueError(f"ridge must not be negative, got {ridge}")
    K, Y = K_train.double(), targets.detach().double().reshape(n, -1)
    lower, info = torch.linalg.cholesky_ex(K + ridge * torch.eye(n, dtype=K.dtype, device=K.device))
    if bool(info):
        raise ValueError(f"the kernel with a ridge of {ridge} is not positive definite; raise the ridge")
    solution = (K if K_test is None else K_test.double()) @ torch.cholesky_solve(Y, lower)
    return solution.reshape(-1, *targets.shape[1:])


def one_step_ridge(K_train: Tensor, *, damping: float, base_size: int) -> float:
    """Compute the ridge that ``Rescaled(damping)`` amounts to at the output layer: damping tr(K) / base_size.

    Args:
        K_train: The kernel of the training samples [n, n].
        damping: The damping of ``Rescaled``.
        base_size: The output layer's fan-in at the base width (for an MLP, the base width); without a parametrization
            its actual fan-in.

    Returns:
        The ridge.

    Example:
        >>> import torch
        >>> from mukron.diagnose import one_step_ridge
        >>> one_step_ridge(torch.eye(4), damping=1.0, base_size=64)
        0.0625
    """
    # n rho_A / d,  rho_A = damping tr(A) / base_size,  tr(A) = d tr(K) / n
    return damping * float(K_train.trace()) / base_size


def one_step_rate(*, damping: float, classes: int, likelihood: str = "gaussian") -> float:
    """Compute the learning rate at which K-FAC's first step from a zero output layer arrives at kernel regression.

    Gaussian: B = I. Categorical: B = (I - 1 1^T / C) / C at outputs of zero, which acts as 1 / C on targets that sum to
    zero over the classes, as one-hot targets minus 1/C do. It holds for cross-entropy too, whose gradient at outputs of
    zero is the same.

    Args:
        damping: The damping of ``Rescaled``.
        classes: The number of outputs of the network.
        likelihood: The likelihood of K-FAC, which must use ``fisher="exact"``: ``"gaussian"`` or ``"categorical"``.

    Returns:
        The learning rate.

    Raises:
        ValueError: The likelihood is unknown.

    Example:
        >>> from mukron.diagnose import one_step_rate
        >>> one_step_rate(damping=1.0, classes=10)
        2.0
    """
    if likelihood == "gaussian":
        return 1 + damping
    if likelihood == "categorical":
        return 1 / classes + damping * (classes - 1) / classes**2  # eigenvalue + damping tr(B) / C
    raise ValueError(f"unknown likelihood {likelihood!r}; known: 'gaussian', 'categorical'")


# How close a network is to kernel regression during training.


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the sum of squares over the outputs, averaged over samples."""
    return (outputs - targets).square().sum() / (2 * len(outputs))


def approach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    targets: Tensor,
    *,
    steps: int,
    ridge: float,
    loss: Callable[[Tensor, Tensor], Tensor] = half_squares,
    layer: str | None = None,
) -> Approach:
    """Train on the full batch, and compare the change of the outputs with kernel regression on the initial features.

    The regression is to the difference between targets and initial outputs. If a number of a run is not finite, the run
    ends early and keeps the steps before.

    Args:
        model: The network.
        optimizer: The optimizer of its parameters.
        x: The training samples.
        targets: The targets, of the shape of the outputs; for classes, one-hot targets minus 1/C.
        steps: The number of steps.
        ridge: The ridge of the regression; for K-FAC ``one_step_ridge(feature_kernel(model, x), ...)``.
        loss: The loss of outputs and targets, a mean over samples.
        layer: The name of the output layer; by default the last ``Linear`` that runs.

    Returns:
        The run, step by step.

    Raises:
        ValueError: There is no step, or the targets do not have the shape of the outputs.

    Example:
        >>> import torch
        >>> from mukron.diagnose import approach
        >>> from mukron.models import MLP
        >>> model = MLP(16, inputs=4, classes=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = approach(model, optimizer, torch.randn(8, 4), torch.randn(8, 2), steps=2, ridge=0.1)
        >>> [row.step for row in run.rows]
        [0, 1, 2]
    """
    if steps < 1:
        raise ValueError(f"steps counts steps: at least 1, got {steps}")
    K = feature_kernel(model, x, layer=layer)
    rows: list[ApproachStep] = []
    trouble, skipped = "", getattr(optimizer, "skipped", 0)
    for step in range(steps + 1):
        optimizer.zero_grad()
        with torch.set_grad_enabled(step < steps):
            outputs = model(x)
            if outputs.shape != targets.shape:
                raise ValueError(f"targets are {list(targets.shape)}, the model's outputs {list(outputs.shape)}")
            error = loss(outputs, targets)
        if not bool(error.isfinite()):
            trouble = f"the loss is {float(error.detach())} after {step} steps"
            break
        if step == 0:
            start = outputs.detach().clone()
            solution = kernel_regression(K, targets - start, ridge=ridge)
        rows.append(ApproachStep(step, float(error.detach()), *agreement(outputs - start, solution)))
        if step < steps:
            torch.autograd.backward(error)
            optimizer.step()
        if getattr(optimizer, "skipped", 0) > skipped:
            trouble = f"step {step + 1} was skipped: gradients or curvature were not finite"
            break
    return Approach(tuple(rows), ridge, trouble)
