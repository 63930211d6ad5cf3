"""What can be read off a network while it trains. A probe is made before the first step and remembers how things began.

features   features/LAYER  |h_t - h_0|, the size (root mean square) of the change of a layer's output
           update/NAME     |(W_t - W_0) h_t|, what a parameter's own change makes of its layer's input
           output          the change of the network's output
distance   distance/NAME   |W_t - W_0| / |W_0| of a parameter
spectra    largest/LAYER.X, mean/LAYER.X   eigenvalues of the curvature factor X
           damping/LAYER.X                 what is added to them
rates      rate/NAME       |W_t+1 - W_t| / |G|, a parameter's step over its gradient: of plain SGD, the learning rate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mukron.linalg import Factor, FactorizationError, MatrixFactor
from mukron.optim.base import SecondOrder
from mukron.optim.slots import WEIGHT
from mukron.params.inventory import clean_name, unwrap

DENSE = 512  # up to this size all eigenvalues are computed, above it the largest is iterated for


class Probe(Protocol):
    """Reads numbers off a network and its optimizer."""

    def read(self) -> dict[str, float]: ...


class Features:
    """How far each layer's output has moved on a fixed batch, and what of it is each parameter's own doing.

    A layer is a module that holds parameters of its own and runs. A parameter whose module does not run as such (an
    attention's output projection, a bare parameter of the network) is seen in what the nearest module around it makes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.model, self.x = unwrap(model), x
        self.modules = dict(self.model.named_modules())
        self.initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.members: dict[str, list[str]] = _members(self.model, self._that_run())
        self.before = self._pass()

    @property
    def indirect(self) -> set[str]:
        """Parameters that are seen in the output of a module around their own."""
        return {
            clean_name(name)
            for owner, names in self.members.items()
            for name in names
            if name.rpartition(".")[0] != owner or (not owner and len(self.modules) > 1)
        }

    def read(self) -> dict[str, float]:
        """A layer whose output has another shape than at first (experts with other samples) is left out."""
        squares: dict[str, list[tuple[float, int]]] = {}
        now = self._pass(squares)
        found = {
            f"features/{clean_name(name)}": rms(now[name], before)
            for name, before in self.before.items()
            if name in now and name in self.members and _alike(now[name], before) and (name or len(self.before) == 1)
        }
        found |= {f"update/{clean_name(name)}": root_mean(each) for name, each in squares.items()}
        return {**found, "output": rms(now[""], self.before[""])}

    def _that_run(self) -> set[str]:
        ran: set[str] = set()
        hooks = [
            module.register_forward_hook(lambda *_, name=name: ran.add(name)) for name, module in self.modules.items()
        ]
        self._call(hooks)
        return ran

    def _pass(self, squares: dict[str, list[tuple[float, int]]] | None = None) -> dict[str, list[Tensor]]:
        """A forward pass that leaves no trace: the outputs of layers and network; into ``squares``, those of dW h."""
        outputs: dict[str, list[Tensor]] = {}
        found_by: list[list[Tensor]] = []  # the random streams as each layer under way found them
        inside = False

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not inside:
                found_by.append(self._random())

        def leave(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                nonlocal inside
                if inside:
                    return
                drawn = found_by.pop()
                if (found := first_tensor(output)) is None:
                    return
                outputs.setdefault(name, []).append(found.clone())
                if squares is None:
                    return
                inside, after = True, self._random()
                for parameter in self.members.get(name, ()):  # the same layer once more, as this parameter began
                    own = parameter[len(name) + 1 :] if name else parameter
                    buffers = {key: value.clone() for key, value in module.named_buffers()}
                    self._random(drawn)
                    old = first_tensor(functional_call(module, {own: self.initial[parameter], **buffers}, args, kwargs))
                    assert old is not None
                    squares.setdefault(parameter, []).append(difference(found, old))
                inside = False
                self._random(after)

            return keep

        hooks = []
        for name, module in self.modules.items():
            if name in self.members or not name:
                hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                hooks.append(module.register_forward_hook(leave(name), with_kwargs=True))
        self._call(hooks)
        if "" not in outputs:
            raise ValueError(f"{type(self.model).__name__} returns no tensor of real numbers, alone or in a container")
        return outputs

    def _call(self, hooks: list[RemovableHandle]) -> None:
        try:
            with untouched(self.model):
                call(self.model, self.x)
        finally:
            for hook in hooks:
                hook.remove()

    def _random(self, states: list[Tensor] | None = None) -> list[Tensor]:
        """The random streams that layers draw from; or set them."""
        devices = _gpus(self.model)
        if states is None:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], devices, strict=True):
            torch.cuda.set_rng_state(state, device)
        return states


def _members(model: nn.Module, ran: set[str]) -> dict[str, list[str]]:
    """By module that runs: the parameters that are seen in its output, its own and those of parts that do not run."""
    members: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in ran:
            owner = owner.rpartition(".")[0]
        members.setdefault(owner, []).append(name)
    return members


def _alike(now: list[Tensor], before: list[Tensor]) -> bool:
    return [each.shape for each in now] == [each.shape for each in before]


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
        self.loaded: dict[str, float] = {}
        if isinstance(optimizer, SecondOrder):
            optimizer.watch(self._keep)

    def _keep(self, layer: str, block: str, factors: Mapping[str, Factor], rho: Mapping[str, Tensor]) -> None:
        if block == WEIGHT:
            self.seen.update({f"{layer}.{name}": (factor, rho[name]) for name, factor in factors.items()})

    def state(self) -> dict[str, float]:
        """For a checkpoint: the numbers of the last inverses made, which may be older than the last reading."""
        return self.read()

    def load(self, numbers: Mapping[str, float]) -> None:
        """From a checkpoint: they stand until inverses are made again."""
        self.loaded = dict(numbers)

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        found = dict(self.loaded)
        for name, (factor, rho) in self.seen.items():
            found[f"largest/{name}"] = largest_eigenvalue(factor)
            found[f"mean/{name}"] = float((factor.trace() / factor.d).mean())
            found[f"damping/{name}"] = float(rho.mean())
        return found


class Rates:
    """How far the last step took each parameter, over the size of its gradient. Momentum and decay are part of it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
        self.before: dict[str, Tensor] = {}
        self.found: dict[str, float] = {}
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._remember)
            optimizer.register_step_post_hook(self._compare)

    def _remember(self, *_: Any) -> None:
        moving = {name: value for name, value in self.parameters.items() if value.grad is not None}
        self.before = {name: value.detach().clone() for name, value in moving.items()}

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        self.found = {}
        for name, before in self.before.items():
            value = self.parameters[name]
            assert value.grad is not None
            gradient = float(value.grad.norm())
            if gradient > 0:
                self.found[f"rate/{name}"] = float((value - before).norm()) / gradient
        self.before = {}

    def read(self) -> dict[str, float]:
        return dict(self.found)


PROBES: dict[str, Callable[[nn.Module, Optimizer | None, Any], Probe]] = {
    "features": Features,
    "distance": Distance,
    "spectra": Spectra,
    "rates": Rates,
}


def call(model: nn.Module, x: Any) -> Any:
    """Inputs as they come in a batch: one, a tuple of them, or by name."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A pass in the model's own mode, without gradients, that changes neither its numbers nor any random stream."""
    kept = list(model.buffers())
    if any(getattr(module, "max_norm", None) is not None for module in model.modules()):
        kept += list(model.parameters())  # an embedding that renormalizes itself as it is read
    values = [(tensor, tensor.detach().clone()) for tensor in kept]
    with torch.no_grad(), torch.random.fork_rng(devices=_gpus(model)):
        torch.manual_seed(0)  # the same dropout each time
        try:
            yield
        finally:
            for tensor, before in values:
                tensor.copy_(before)


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def first_tensor(output: Any) -> Tensor | None:
    """Of whatever a module returns, the first tensor of real numbers."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if is_dataclass(output) and not isinstance(output, type):
        output = {each.name: getattr(output, each.name) for each in fields(output)}
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
    """The mean over groups; a large matrix is iterated on, not decomposed. Not a number where there is none."""
    try:
        if isinstance(factor, MatrixFactor) and factor.d > DENSE and "eigh" not in factor.__dict__:
            return float(torch.stack([_iterated(M) for M in factor.M]).mean())
        return float(factor.largest_eigenvalue().mean())
    except (LinAlgError, FactorizationError):
        return math.nan


def _iterated(M: Tensor) -> Tensor:
    """By lobpcg, over the trace, so that no square of it leaves the range of its numbers."""
    trace = M.trace()
    if not trace > 0 or not trace.isfinite():
        return trace
    start = torch.randn(len(M), 1, generator=torch.Generator().manual_seed(0)).to(M)
    value: Tensor = torch.lobpcg(M / trace, X=start, niter=100)[0][0]
    return value * trace
