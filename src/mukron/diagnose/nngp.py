"""NNGP: the kernel of a network's last features, and how far training is from kernel regression with it.

    H [n, d]                               the last features: what the output layer reads of n samples
    K = H H^T / d                          their kernel; in an infinitely wide network, E[h(x) h(y)] of one unit
    f*(x) = K(x, .) (K + ridge I)^-1 Y     kernel regression to the targets Y [n, C]

**Why K-FAC lands there** (Section 4.3 of the paper). From output weights at zero, the squared error's gradient by them
is G = -Y^T H / n, and with A = H^T H / n the first step makes

    W = lr (B + rho_B)^-1 Y^T H (A + rho_A)^-1 / n,    f(x) = lr K(x, .) (K + n rho_A / d I)^-1 Y (B + rho_B)^-1.

That is f* itself, up to rounding, if B acts on the targets as a number: lr = B + rho_B, ridge = n rho_A / d. With
``Rescaled`` damping these are ``one_step_rate`` and ``one_step_ridge``. B is a number if it is exact
(``fisher="exact"``); made of draws ("mc") it strays, and the outputs with it, by ((C + 1) / n)^1/2 / (1 + rho) of their
size. FOOF has no B: its rate is 1. The signals of all other layers come through the output weights, so these layers
stay where they are. SGD's first step makes f ~ K Y: nothing is solved.

All of this needs output weights of zero, ``output_exponent="zero"``, or so small that their squares vanish in their
precision: an exponent of 64 does that in float32 from 3 times the base width on, in float64 from 512 times. Weights
that are merely small are another thing: the first step divides a hidden layer's signals, which are like W, by their own
square and its damping, which is too. It grows like 1 / W and throws the features off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mukron.params.inventory import unwrap
from mukron.table import Table
from mukron.train.probes import untouched

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
    """E[h(x) h(y)] of the last hidden layer of an infinitely wide MLP without biases, in closed form, in float64.

    x, y: samples [n, ...] and [m, ...]; without y, x against itself.
    variances: fan-in times the variance of the weights, one a hidden layer, the input layer's first: 2 is He's for
        ReLU, 1/3 is how torch draws a Linear. ``variances_of(model)`` reads them off a network.
    activation: "relu", "erf" or "identity".

    The weights may follow any law in layers behind wide ones; in the input layer, whose fan-in is finite, the formula
    is exact for normal weights.
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
    """Fan-in times the mean square of the weights of an MLP's hidden layers, as ``mlp_kernel`` takes them.

    Read them off the network as it was drawn, before training.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    own = {id(weight) for weight in weights}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in own]
    if others:
        raise ValueError(
            f"the closed form is that of an MLP without biases, but {type(model).__name__} also has "
            f"{', '.join(others[:4])}; compare with feature_kernel of a wider network instead"
        )
    if len(weights) < 2:
        raise ValueError(f"an MLP has a hidden and an output layer; {type(model).__name__} has {len(weights)} Linear")
    return [weight.shape[1] * float(weight.detach().square().mean(dtype=torch.float64)) for weight in weights[:-1]]


# The kernel of a network at hand.


def feature_kernel(model: nn.Module, x: Tensor, y: Tensor | None = None, *, layer: str | None = None) -> Tensor:
    """h(x) . h(y) / d of what the output layer reads, d numbers a sample, in float64. For any network.

    layer: the layer whose input is meant, by name; without it, the last Linear that runs.

    The model runs in the mode it is in (batch norm uses the batch while training, dropout draws: call ``eval`` first if
    that is not meant). It is left as it was, running averages included.
    """
    H = _features(model, x, layer)
    return H @ (H if y is None else _features(model, y, layer)).T / H.shape[1]


def _features(model: nn.Module, x: Tensor, layer: str | None) -> Tensor:
    """The input [n, d] of that layer, or of the last Linear that ran."""
    model = unwrap(model)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if layer is None:
        heard: dict[str, nn.Module] = {**linear}
    elif layer in (modules := dict(model.named_modules())):
        heard = {layer: modules[layer]}
    else:
        raise ValueError(f'the network has no layer "{layer}"; its Linear layers: {", ".join(linear) or "none"}')
    read: list[tuple[str, Tensor]] = []

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        h = args[0] if args else next(iter(kwargs.values()))
        read[:] = [(name, h.to(torch.float64, copy=True))]  # a copy: what follows may change it in place

    handles = [module.register_forward_hook(partial(keep, name), with_kwargs=True) for name, module in heard.items()]
    try:
        with untouched(model):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    if not read:
        raise ValueError(
            f'layer "{layer}" did not run' if layer else "no Linear layer ran; name the output layer: layer=..."
        )
    name, h = read[0]
    if h.shape[0] != x.shape[0]:
        raise ValueError(
            f'layer "{name}" read {h.shape[0]} rows for {x.shape[0]} samples; name a layer that keeps samples apart'
        )
    return h.flatten(1)


# Kernel regression, and the step that lands on it.


def kernel_regression(K_train: Tensor, targets: Tensor, K_test: Tensor | None = None, *, ridge: float) -> Tensor:
    """K_test (K_train + ridge I)^-1 targets, in float64; without K_test, at the training samples themselves.

    K_train: [n, n]. targets: [n] or [n, C]. K_test: [m, n], test samples against training samples.
    ridge: as it stands. K-FAC's damping rho_A of A = H^T H / n, with K = H H^T / d, is a ridge of n rho_A / d; for
        ``Rescaled`` damping that is ``one_step_ridge``.
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
    """The ridge that ``Rescaled(damping)`` means at the output layer: damping tr(K) / base_size.

    base_size: the output layer's fan-in at the base width (an MLP's base width); its own fan-in if not parametrized.
    """
    # n rho_A / d,  rho_A = damping tr(A) / base_size,  tr(A) = d tr(K) / n
    return damping * float(K_train.trace()) / base_size


def one_step_rate(*, damping: float, classes: int, likelihood: str = "gaussian") -> float:
    """The learning rate at which K-FAC's first step from a zero output layer goes all the way to kernel regression.

    damping: of ``Rescaled``. classes: outputs of the network. likelihood: K-FAC's, with ``fisher="exact"``.

    Gaussian: B = I. Categorical: B = (I - 1 1^T / C) / C at outputs of zero, which is 1 / C on targets that sum to zero
    over the classes, as one-hot minus 1/C does. It holds for cross-entropy too, whose gradient there is the same.
    """
    if likelihood == "gaussian":
        return 1 + damping
    if likelihood == "categorical":
        return 1 / classes + damping * (classes - 1) / classes**2  # eigenvalue + damping tr(B) / C
    raise ValueError(f"unknown likelihood {likelihood!r}; known: 'gaussian', 'categorical'")


# How near a network is, and how it gets there.


class Agreement(NamedTuple):
    """How near outputs f are to a solution f*."""

    correlation: float  # over all numbers of both; 0 where one does not vary, as before the first step
    distance: float  # |f - f*| / |f*|
    size: float  # |f| / |f*|: at a correlation of 1, how much of the way was gone


def agreement(outputs: Tensor, solution: Tensor) -> Agreement:
    """Compare outputs with a solution of the same shape."""
    if outputs.shape != solution.shape:
        raise ValueError(f"outputs are {list(outputs.shape)}, the solution is {list(solution.shape)}")
    f, best = outputs.detach().double().flatten(), solution.detach().double().flatten()
    length = float(best.norm())
    if not length:
        raise ValueError("the solution is zero everywhere: nothing is near it or far from it")
    a, b = f - f.mean(), best - best.mean()
    spread = float(a.norm() * b.norm())
    return Agreement(
        correlation=float(a @ b) / spread if spread else 0.0,
        distance=float((f - best).norm()) / length,
        size=float(f.norm()) / length,
    )


class Moment(NamedTuple):
    """Where a run stands after so many steps."""

    step: int
    loss: float
    correlation: float
    distance: float
    size: float


@dataclass(frozen=True)
class Approach:
    """The way of a network's outputs towards kernel regression on its first features."""

    rows: tuple[Moment, ...]  # the first: before any step
    ridge: float
    trouble: str = ""  # why the run ended early, if it did

    def table(self) -> Table:
        cells = tuple((str(step), *(f"{number:.4g}" for number in numbers)) for step, *numbers in self.rows)
        notes = (
            f"f: change of the outputs; f*: kernel regression on the first features, ridge {self.ridge:.4g}",
            "correlation: of f and f*; distance: |f - f*| / |f*|; size: |f| / |f*|",
            *([self.trouble] if self.trouble else []),
        )
        return Table("Towards kernel regression", Moment._fields, cells, notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"ridge": self.ridge, "trouble": self.trouble, "rows": [row._asdict() for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Approach:
        return cls(tuple(Moment(**row) for row in data["rows"]), data["ridge"], data["trouble"])


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the sum of squares over the outputs, averaged over samples."""
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
    """Train on the full batch and follow the change of the outputs towards kernel regression on the first features.

    targets: of the outputs' shape; for classes, one-hot minus 1/C.
    ridge: of the regression; for K-FAC ``one_step_ridge(feature_kernel(model, x), ...)``.
    loss: of outputs and targets, a mean over samples.
    layer: the output layer by name; without it, the last Linear that runs.

    The regression is to what the outputs lack at the start, targets - f_0. A run that breaks keeps what came before.
    """
    if steps < 1:
        raise ValueError(f"steps counts steps: at least 1, got {steps}")
    K = feature_kernel(model, x, layer=layer)
    rows: list[Moment] = []
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
        rows.append(Moment(step, float(error.detach()), *agreement(outputs - start, solution)))
        if step < steps:
            torch.autograd.backward(error)
            optimizer.step()
        if getattr(optimizer, "skipped", 0) > skipped:
            trouble = f"step {step + 1} was skipped: gradients or curvature were not finite"
            break
    return Approach(tuple(rows), ridge, trouble)
