"""The first update of every method, computed directly in float64, as a reference for the fast implementations.

Symbols: H [samples, positions, d_in] is the input of a layer, D [samples, positions, d_out] the derivative of the
summed log-likelihood with respect to its output; n is the number of samples, G the gradient of the mean loss.

    A = H^T H / n,  B = D^T D / (n positions)       K-FAC, FOOF:  (B + rho_B)^-1 G (A + rho_A)^-1
    G = U s V^T                                     Shampoo:      U s (s^2 + rho)^-1/2 V^T
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COMPARISON_LR = 2.0**10  # large, so that rounding of the weights is small next to the update read from them
ADAMW_EPS, ADAMW_DECAY = 1e-8, 1e-2  # the defaults of torch.optim.AdamW

Updates = dict[str, Tensor]  # by parameter: what is subtracted from it, divided by the learning rate
DampingFunction = Callable[[Tensor], Tensor | float]  # from a factor to the number added to its diagonal


@dataclass
class CapturedLayer:
    """The input and output of a linear or convolutional layer in one forward pass.

    Attributes:
        module: The layer.
        H: Its input, [samples, positions, d_in].
        u: Its output, as the layer returned it.
    """

    module: nn.Linear | nn.Conv2d
    H: Tensor
    u: Tensor

    def rows(self, delta: Tensor) -> Tensor:
        """Reshapes a derivative with respect to ``u``.

        Args:
            delta: The derivative, in the shape of ``u``.

        Returns:
            The same numbers as [samples, positions, d_out].
        """
        if isinstance(self.module, nn.Linear):
            return delta.reshape(delta.shape[0], -1, delta.shape[-1])
        return delta.flatten(2).mT


class Reference:
    """A forward and backward pass of a model in float64, with the input and output of every layer.

    Args:
        model: The network; it is copied, not changed.
        x: A batch of inputs.
        y: Its class labels.

    Example:
        >>> import torch
        >>> reference = Reference(torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.randn(4, 3), torch.zeros(4).long())
        >>> reference.layers["0"].H.shape, reference.G["0.weight"].dtype
        (torch.Size([4, 1, 3]), torch.float64)
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            f = copy.deepcopy(model)(x)
        # An optimizer draws Monte Carlo targets in the model's precision, float32 at least; the draws depend on it.
        self.sampling_probabilities = f.to(torch.promote_types(f.dtype, torch.float32)).softmax(1)
        self.model, self.y = copy.deepcopy(model).double(), y
        self.layers: dict[str, CapturedLayer] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(self._capture_hook(name))
        self.f: Tensor = self.model(x.double())
        parameters = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(F.cross_entropy(self.f, y), list(parameters.values()), retain_graph=True)
        self.weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self.G = dict(zip(parameters, gradients, strict=True))

    def _capture_hook(self, name: str) -> Callable[..., None]:
        def capture(module: nn.Linear | nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
            x = inputs[0].detach()
            if isinstance(module, nn.Linear):
                H = x.reshape(x.shape[0], -1, x.shape[-1])
            else:
                H = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
            self.layers[name] = CapturedLayer(module, H, output)

        return capture

    @cached_property
    def p(self) -> Tensor:
        """The predicted class probabilities, [samples, classes]."""
        return self.f.detach().softmax(1)

    def signals(self, fisher: str) -> dict[str, Tensor]:
        """Computes D of every layer.

        Args:
            fisher: "mc" for targets drawn from the model, with the optimizer's seed; "empirical" for the labels.

        Returns:
            By layer name, D as [samples, positions, d_out].
        """
        y = self.y
        if fisher == "mc":
            generator = torch.Generator(y.device).manual_seed(0)
            y = torch.multinomial(self.sampling_probabilities, 1, generator=generator).squeeze(1)
        v = F.one_hot(y, self.p.shape[1]) - self.p
        outputs = [layer.u for layer in self.layers.values()]
        deltas = torch.autograd.grad(self.f, outputs, v, retain_graph=True)
        return {name: layer.rows(delta) for (name, layer), delta in zip(self.layers.items(), deltas, strict=True)}


ReferenceUpdate = Callable[[Reference], Updates]


def sgd_update(reference: Reference) -> Updates:
    """Computes the first update of SGD: the gradient.

    Args:
        reference: The batch in float64.

    Returns:
        The update of every parameter.

    Example:
        >>> reference = Reference(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3), torch.zeros(4).long())
        >>> sgd_update(reference)["0.weight"].shape
        torch.Size([2, 3])
    """
    return reference.G


def adamw_update(reference: Reference) -> Updates:
    """Computes the first update of AdamW with torch's defaults.

    Args:
        reference: The batch in float64.

    Returns:
        The update of every parameter.

    Example:
        >>> reference = Reference(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3), torch.zeros(4).long())
        >>> adamw_update(reference)["0.weight"].shape
        torch.Size([2, 3])
    """
    return {name: G / (G.abs() + ADAMW_EPS) + ADAMW_DECAY * reference.weights[name] for name, G in reference.G.items()}


def mean_eigenvalue(M: Tensor) -> Tensor:
    """Returns the mean eigenvalue of a factor, which is this library's default damping of K-FAC (rho = 1).

    Args:
        M: A square matrix.

    Returns:
        Its trace divided by its size.

    Example:
        >>> import torch
        >>> float(mean_eigenvalue(torch.diag(torch.tensor([1.0, 3.0]))))
        2.0
    """
    return M.trace() / len(M)


def kfac_update(fisher: str | None, rho: DampingFunction = mean_eigenvalue) -> ReferenceUpdate:
    """Returns the reference update of K-FAC.

    Biases are preconditioned by B only. Parameters outside linear and convolutional layers take their gradient.

    Args:
        fisher: Where the targets of B come from, "mc" or "empirical"; None leaves B out, which gives FOOF.
        rho: The damping of a factor.

    Returns:
        A function from a batch in float64 to the update of every parameter.

    Example:
        >>> reference = Reference(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3), torch.zeros(4).long())
        >>> kfac_update("empirical")(reference)["0.weight"].shape
        torch.Size([2, 3])
    """

    def compute(reference: Reference) -> Updates:
        updates = dict(reference.G)
        signals = {} if fisher is None else reference.signals(fisher)
        for name, layer in reference.layers.items():
            n, positions, _ = layer.H.shape
            H = layer.H.flatten(0, 1)
            G = reference.G[f"{name}.weight"]
            update, A = G.flatten(1), H.mT @ H / n
            update = torch.linalg.solve(_damped(A, rho), update.mT).mT
            if name in signals:
                D = signals[name].flatten(0, 1)
                B = _damped(D.mT @ D / (n * positions), rho)
                update = torch.linalg.solve(B, update)
                if f"{name}.bias" in updates:
                    updates[f"{name}.bias"] = torch.linalg.solve(B, reference.G[f"{name}.bias"]) / positions
            updates[f"{name}.weight"] = update.reshape(G.shape)
        return updates

    return compute


foof_update = kfac_update(None)


def shampoo_update(rho: Callable[[Tensor], Tensor | float]) -> ReferenceUpdate:
    """Returns the reference update of Shampoo with L = G G^T and R = G^T G, from the singular values of G.

    Args:
        rho: The damping, from the singular values s of G.

    Returns:
        A function from a batch in float64 to the update of every parameter.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2, bias=False))
        >>> reference = Reference(model, torch.randn(4, 3), torch.zeros(4).long())
        >>> shampoo_update(lambda s: 1e-6 * s[0] ** 2)(reference)["0.weight"].shape
        torch.Size([2, 3])
    """

    def compute(reference: Reference) -> Updates:
        updates = {}
        for name, G in reference.G.items():
            U, s, Vh = torch.linalg.svd(G.flatten(1), full_matrices=False)
            updates[name] = ((U * (s / (s.square() + rho(s)).sqrt())) @ Vh).reshape(G.shape)
        return updates

    return compute


def _damped(M: Tensor, rho: DampingFunction) -> Tensor:
    return M + rho(M) * torch.eye(len(M), dtype=M.dtype, device=M.device)


def relative_difference(before: Updates, after: Updates, lr: float, expected: Updates) -> float:
    """Returns |update - expected| / |expected| of the parameter where it is largest.

    Args:
        before: The parameters before the step.
        after: The parameters after the step.
        lr: The learning rate of the step.
        expected: The reference update of every parameter.

    Returns:
        The largest relative difference.

    Example:
        >>> import torch
        >>> relative_difference({"w": torch.ones(2)}, {"w": torch.zeros(2)}, 0.5, {"w": torch.ones(2).double()})
        1.0
    """
    errors = []
    for name, target in expected.items():
        update = (before[name].double() - after[name].double()) / lr
        errors.append((update - target).norm() / target.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return float(torch.stack(errors).max())
