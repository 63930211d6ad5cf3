"""What can be read off a network while it trains. A probe is made before the first step and remembers how things began.

features   features/LAYER  |h_t - h_0|, the size (root mean square) of the change of a layer's output
           update/NAME     |(W_t - W_0) h_t|, what a parameter's own change makes of its layer's input
           output          the change of the network's output
distance   distance/NAME   |W_t - W_0| / |W_0| of a parameter
spectra    largest/LAYER.X, mean/LAYER.X   eigenvalues of the curvature factor X
           damping/LAYER.X                 what is added to them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from mukron.linalg import Factor, MatrixFactor
from mukron.optim.base import SecondOrder
from mukron.optim.slots import WEIGHT
from mukron.params.inventory import clean_name, unwrap

DENSE = 512  # up to this size all eigenvalues are computed, above it the largest is iterated for


class Probe(Protocol):
    """Reads numbers off a network and its optimizer."""

    def read(self) -> dict[str, float]: ...


class Features:
    """How far each layer's output has moved on a fixed batch, and what of it is each parameter's own doing."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.model, self.x = unwrap(model), x
        self.layers = {clean_name(name): module for name, module in owners(self.model)}
        self.initial = {
            name: {key: value.detach().clone() for key, value in module.named_parameters(recurse=False)}
            for name, module in self.layers.items()
        }
        self.before, self.output, _ = self._pass()

    def read(self) -> dict[str, float]:
        now, output, updates = self._pass(updates=True)
        changes = {f"features/{name}": rms(now[name], self.before[name]) for name in now if name in self.before}
        return {**changes, **updates, "output": rms(output, self.output)}

    def _pass(self, updates: bool = False) -> tuple[dict[str, list[Tensor]], list[Tensor], dict[str, float]]:
        """A forward pass that leaves no trace: every layer's outputs, the network's own, the sizes of dW h."""
        outputs: dict[str, list[Tensor]] = {}
        final: list[Tensor] = []
        squares: dict[str, list[tuple[float, int]]] = {}  # of dW h: their sum, and how many
        inside = False

        def hook(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                nonlocal inside
                if inside or (found := first_tensor(output)) is None:
                    return
                outputs.setdefault(name, []).append(found.clone())
                if not updates:
                    return
                inside = True
                for key, before in self.initial[name].items():  # the same layer once more, as this parameter began
                    buffers = {other: value.clone() for other, value in module.named_buffers()}
                    old = first_tensor(functional_call(module, {key: before, **buffers}, args, kwargs))
                    assert old is not None
                    squares.setdefault(f"{name}.{key}".lstrip("."), []).append(difference(found, old))
                inside = False

            return keep

        def keep_final(module: nn.Module, args: Any, output: Any) -> None:
            if not inside and (found := first_tensor(output)) is not None:
                final.append(found.clone())

        handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in self.layers.items()]
        handles.append(self.model.register_forward_hook(keep_final))
        try:
            with untouched(self.model):
                call(self.model, self.x)
        finally:
            for handle in handles:
                handle.remove()
        return outputs, final, {f"update/{name}": root_mean(found) for name, found in squares.items()}


class Distance:
    """How far each parameter is from where it began, relative to that. One that began at zero is left out."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.model = unwrap(model)
        self.initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        found = {}
        for name, value in self.model.named_parameters():
            size = float(self.initial[name].double().norm())
            if size > 0:
                found[f"distance/{clean_name(name)}"] = float((value - self.initial[name]).double().norm()) / size
        return found


class Spectra:
    """The largest and the mean eigenvalue of every curvature factor, and its damping, as of the last inverse made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.seen: dict[str, tuple[Factor, Tensor]] = {}
        if isinstance(optimizer, SecondOrder):
            optimizer.watch(self._keep)

    def _keep(self, layer: str, block: str, factors: Mapping[str, Factor], rho: Mapping[str, Tensor]) -> None:
        if block == WEIGHT:
            self.seen.update({f"{layer}.{name}": (factor, rho[name]) for name, factor in factors.items()})

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        found = {}
        for name, (factor, rho) in self.seen.items():
            found[f"largest/{name}"] = largest_eigenvalue(factor)
            found[f"mean/{name}"] = float((factor.trace() / factor.d).mean())
            found[f"damping/{name}"] = float(rho.mean())
        return found


PROBES: dict[str, Callable[[nn.Module, Optimizer | None, Any], Probe]] = {
    "features": Features,
    "distance": Distance,
    "spectra": Spectra,
}


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers: every module but the network itself that holds parameters of its own."""
    for name, module in model.named_modules():
        if name and any(True for _ in module.parameters(recurse=False)):
            yield name, module
    if not any(True for _ in model.children()):
        yield "", model


def call(model: nn.Module, x: Any) -> Any:
    """Inputs as they come in a batch: one, a tuple of them, or by name."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A pass in the model's own mode, without gradients, that changes neither its buffers nor any random stream."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)  # the same dropout each time
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


def first_tensor(output: Any) -> Tensor | None:
    """Of whatever a module returns, the first tensor of real numbers."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((found for value in values if (found := first_tensor(value)) is not None), None)


def rms(now: list[Tensor], before: list[Tensor]) -> float:
    """The root mean square of the difference, over all calls of a layer."""
    return root_mean([difference(a, b) for a, b in zip(now, before, strict=True)])


def difference(now: Tensor, before: Tensor) -> tuple[float, int]:
    """The sum of squares, and of how many numbers."""
    return float((now.double() - before.double()).square().sum()), now.numel()


def root_mean(squares: list[tuple[float, int]]) -> float:
    return math.sqrt(sum(each for each, _ in squares) / sum(count for _, count in squares))


def largest_eigenvalue(factor: Factor) -> float:
    """The mean over groups; a large matrix is iterated on, not decomposed."""
    if isinstance(factor, MatrixFactor) and factor.d > DENSE and "eigh" not in factor.__dict__:
        start = torch.randn(factor.d, 1, generator=torch.Generator().manual_seed(0)).to(factor.M)
        return float(torch.stack([torch.lobpcg(M, X=start, niter=100)[0][0] for M in factor.M]).mean())
    return float(factor.largest_eigenvalue().mean())
