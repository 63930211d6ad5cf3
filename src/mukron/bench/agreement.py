"""The first update of every method, written out plainly in float64, to compare the quick one with.

Rows: H [samples, positions, d_in] go into a layer, D [samples, positions, d_out] are the derivatives of the summed
log-likelihood by what comes out of it; n samples, G the gradient of the mean loss.

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

LARGE_LR = 2.0**10  # so that an update is large beside the rounding of the weights that it is read from
EPS, DECAY = 1e-8, 1e-2  # AdamW's own

Moves = dict[str, Tensor]  # by parameter: what is subtracted from it, over the learning rate
Damping = Callable[[Tensor], Tensor | float]


@dataclass
class Layer:
    """A linear or convolutional layer: its module, the rows that came in, and what came out."""

    module: nn.Linear | nn.Conv2d
    H: Tensor
    u: Tensor

    def rows(self, delta: Tensor) -> Tensor:
        """[samples, positions, d_out] of a derivative by ``u``."""
        if isinstance(self.module, nn.Linear):
            return delta.reshape(delta.shape[0], -1, delta.shape[-1])
        return delta.flatten(2).mT


class Reference:
    """One batch in float64, seen by every layer."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():  # who draws targets draws them from these
            self.drawn_from = copy.deepcopy(model)(x).float().softmax(1)
        self.model, self.y = copy.deepcopy(model).double(), y
        self.layers: dict[str, Layer] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(self._seer(name))
        self.f: Tensor = self.model(x.double())
        parameters = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(F.cross_entropy(self.f, y), list(parameters.values()), retain_graph=True)
        self.weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self.G = dict(zip(parameters, gradients, strict=True))

    def _seer(self, name: str) -> Callable[..., None]:
        def see(module: nn.Linear | nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
            x = inputs[0].detach()
            if isinstance(module, nn.Linear):
                H = x.reshape(x.shape[0], -1, x.shape[-1])
            else:
                H = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
            self.layers[name] = Layer(module, H, output)

        return see

    @cached_property
    def p(self) -> Tensor:
        return self.f.detach().softmax(1)

    def signals(self, fisher: str) -> dict[str, Tensor]:
        """D of every layer. Drawn targets: the same draws as the optimizer's, by a generator of the same seed."""
        y = self.y
        if fisher == "mc":
            generator = torch.Generator(y.device).manual_seed(0)
            y = torch.multinomial(self.drawn_from, 1, generator=generator).squeeze(1)
        v = F.one_hot(y, self.p.shape[1]) - self.p
        outputs = [layer.u for layer in self.layers.values()]
        deltas = torch.autograd.grad(self.f, outputs, v, retain_graph=True)
        return {name: layer.rows(delta) for (name, layer), delta in zip(self.layers.items(), deltas, strict=True)}


Truth = Callable[[Reference], Moves]


def sgd(reference: Reference) -> Moves:
    return reference.G


def adamw(reference: Reference) -> Moves:
    return {name: G / (G.abs() + EPS) + DECAY * reference.weights[name] for name, G in reference.G.items()}


def rescaled(M: Tensor) -> Tensor:
    """This library's own damping of K-FAC at rho = 1: the mean eigenvalue."""
    return M.trace() / len(M)


def kfac(fisher: str | None, rho: Damping = rescaled) -> Truth:
    """Biases by B alone; what is neither a linear nor a convolutional layer's takes its gradient."""

    def truth(reference: Reference) -> Moves:
        moves = dict(reference.G)
        signals = {} if fisher is None else reference.signals(fisher)
        for name, layer in reference.layers.items():
            n, positions, _ = layer.H.shape
            H = layer.H.flatten(0, 1)
            G = reference.G[f"{name}.weight"]
            move, A = G.flatten(1), H.mT @ H / n
            move = torch.linalg.solve(_damped(A, rho), move.mT).mT
            if name in signals:
                D = signals[name].flatten(0, 1)
                B = _damped(D.mT @ D / (n * positions), rho)
                move = torch.linalg.solve(B, move)
                if f"{name}.bias" in moves:
                    moves[f"{name}.bias"] = torch.linalg.solve(B, reference.G[f"{name}.bias"]) / positions
            moves[f"{name}.weight"] = move.reshape(G.shape)
        return moves

    return truth


foof = kfac(None)


def shampoo(rho: Callable[[Tensor], Tensor | float]) -> Truth:
    """rho: the damping, from the singular values s of G. With L = G G^T and R = G^T G all is said by these."""

    def truth(reference: Reference) -> Moves:
        moves = {}
        for name, G in reference.G.items():
            U, s, Vh = torch.linalg.svd(G.flatten(1), full_matrices=False)
            moves[name] = ((U * (s / (s.square() + rho(s)).sqrt())) @ Vh).reshape(G.shape)
        return moves

    return truth


def _damped(M: Tensor, rho: Damping) -> Tensor:
    return M + rho(M) * torch.eye(len(M), dtype=M.dtype, device=M.device)


def difference(before: Moves, after: Moves, lr: float, expected: Moves) -> float:
    """|update - truth| / |truth|, of the layer where it is largest."""
    off = []
    for name, truth in expected.items():
        move = (before[name].double() - after[name].double()) / lr
        off.append((move - truth).norm() / truth.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return float(torch.stack(off).max())
