"""Probes: numbers read from a network while it trains. A probe is built before the first step, from the initial state.

features   features/LAYER  |h_t - h_0|, the root mean square of the change of a layer's output
           update/NAME     |(W_t - W_0) h_t|, the part of that change that is due to one parameter
           output          the change of the network's output
distance   distance/NAME   |W_t - W_0| / |W_0| of a parameter
spectra    largest/LAYER.X, mean/LAYER.X   eigenvalues of the curvature factor X
           damping/LAYER.X                 what is added to them
rates      rate/NAME       |W_t+1 - W_t| / |G|, a parameter's step over its gradient; for plain SGD the learning rate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mukron.layers import WEIGHT
from mukron.linalg import Factor
from mukron.optim import SecondOrder
from mukron.params.inventory import clean_name, unwrap
from mukron.train.calls import call, gpu_indices, untouched
from mukron.train.quantities import first_tensor, largest_eigenvalue, rms_difference, root_mean_square, sum_of_squares


class Probe(Protocol):
    """Reads numbers from a network and its optimizer."""

    def read(self) -> dict[str, float]:
        """Returns the numbers by name."""


class Features:
    """Measures how far each layer's output has moved on a fixed batch, and how much of it is due to each parameter.

    A layer is a module that holds parameters itself and whose forward is called. If a parameter's module is not called
    (an attention's output projection, a bare parameter), the output of the nearest module around it is measured.

    Args:
        model: The network, in its initial state.
        optimizer: Not used.
        x: The inputs of the batch, as ``call`` takes them.

    Raises:
        ValueError: If the network returns no tensor of real numbers.

    Example:
        >>> probe = Features(model := nn.Linear(2, 1), None, torch.ones(4, 2))
        >>> _ = model.weight.data.add_(1.0)
        >>> {name: round(change, 4) for name, change in probe.read().items()}
        {'features/': 2.0, 'update/weight': 2.0, 'update/bias': 0.0, 'output': 2.0}
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.model, self.x = unwrap(model), x
        self.modules = dict(self.model.named_modules())
        self.initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.members: dict[str, list[str]] = _members(self.model, self._modules_that_run())
        self.before = self._forward()

    @property
    def indirect(self) -> set[str]:
        """The parameters that are measured in the output of a module around their own."""
        return {
            clean_name(name)
            for owner, names in self.members.items()
            for name in names
            if name.rpartition(".")[0] != owner or (not owner and len(self.modules) > 1)
        }

    def read(self) -> dict[str, float]:
        """Returns the changes so far. A layer whose output changed its shape (a mixture of experts) is left out."""
        squares: dict[str, list[tuple[float, int]]] = {}
        now = self._forward(squares)
        changes = {
            f"features/{clean_name(name)}": rms_difference(now[name], before)
            for name, before in self.before.items()
            if name in now
            and name in self.members
            and _same_shapes(now[name], before)
            and (name or len(self.before) == 1)
        }
        changes |= {f"update/{clean_name(name)}": root_mean_square(sums) for name, sums in squares.items()}
        return {**changes, "output": rms_difference(now[""], self.before[""])}

    def own_changes(self) -> dict[str, float]:
        """Returns the root mean square change of the entries of each indirect parameter."""
        values = {
            clean_name(name): (value.detach(), self.initial[name]) for name, value in self.model.named_parameters()
        }
        return {name: rms_difference([values[name][0]], [values[name][1]]) for name in sorted(self.indirect)}

    @property
    def sizes(self) -> dict[str, float]:
        """The root mean square of every layer's initial output, by the keys that ``read`` gives to their changes."""
        named = {f"features/{clean_name(name)}": tensors for name, tensors in self.before.items()}
        named["output"] = self.before[""]
        return {
            key: rms_difference(tensors, [tensor.new_zeros(()) for tensor in tensors]) for key, tensors in named.items()
        }

    def _modules_that_run(self) -> set[str]:
        ran: set[str] = set()
        hooks = [
            module.register_forward_hook(lambda *_, name=name: ran.add(name)) for name, module in self.modules.items()
        ]
        self._run_once(hooks)
        return ran

    def _forward(self, squares: dict[str, list[tuple[float, int]]] | None = None) -> dict[str, list[Tensor]]:
        """Returns the outputs of layers and network in a pass without side effects; ``squares`` takes those of dW h."""
        outputs: dict[str, list[Tensor]] = {}
        states_at_entry: list[list[Tensor]] = []  # of the random streams, one entry per layer that is being called
        repeating = False  # whether a layer is called again with an initial parameter

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not repeating:
                states_at_entry.append(self._random_states())

        def leave(name: str) -> Callable[..., None]:
            def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                nonlocal repeating
                if repeating:
                    return
                at_entry = states_at_entry.pop()
                if (tensor := first_tensor(output)) is None:
                    return
                outputs.setdefault(name, []).append(tensor.clone())
                if squares is None:
                    return
                repeating, at_exit = True, self._random_states()
                for parameter in self.members.get(name, ()):  # call the layer again with this parameter's initial value
                    key = parameter[len(name) + 1 :] if name else parameter
                    buffers = {buffer: value.clone() for buffer, value in module.named_buffers()}
                    self._random_states(at_entry)
                    old = first_tensor(functional_call(module, {key: self.initial[parameter], **buffers}, args, kwargs))
                    assert old is not None
                    squares.setdefault(parameter, []).append(sum_of_squares(tensor, old))
                repeating = False
                self._random_states(at_exit)

            return measure

        hooks = []
        for name, module in self.modules.items():
            if name in self.members or not name:
                hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                hooks.append(module.register_forward_hook(leave(name), with_kwargs=True))
        self._run_once(hooks)
        if "" not in outputs:
            raise ValueError(f"{type(self.model).__name__} returns no tensor of real numbers, alone or in a container")
        return outputs

    def _run_once(self, hooks: list[RemovableHandle]) -> None:
        try:
            with untouched(self.model):
                call(self.model, self.x)
        finally:
            for hook in hooks:
                hook.remove()

    def _random_states(self, states: list[Tensor] | None = None) -> list[Tensor]:
        """Returns the states of the random streams that layers draw from, or sets them."""
        devices = gpu_indices(self.model)
        if states is None:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], devices, strict=True):
            torch.cuda.set_rng_state(state, device)
        return states


def _members(model: nn.Module, ran: set[str]) -> dict[str, list[str]]:
    """Returns, by called module, the parameters measured in its output: its own and those of parts not called."""
    members: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in ran:
            owner = owner.rpartition(".")[0]
        members.setdefault(owner, []).append(name)
    return members


def _same_shapes(now: list[Tensor], before: list[Tensor]) -> bool:
    return [tensor.shape for tensor in now] == [tensor.shape for tensor in before]


class Distance:
    """Measures each parameter's distance from its initial value, relative to that value's norm.

    Parameters that start at zero are left out.

    Args:
        model: The network, in its initial state.
        optimizer: Not used.
        x: Not used.

    Example:
        >>> probe = Distance(model := nn.Linear(2, 1, bias=False), None, None)
        >>> _ = model.weight.data.mul_(3.0)
        >>> {name: round(distance, 4) for name, distance in probe.read().items()}
        {'distance/weight': 2.0}
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.model = unwrap(model)
        self.initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Returns the distances by parameter."""
        distances = {}
        for name, value in self.model.named_parameters():
            size = float(self.initial[name].double().norm())
            if size > 0:
                distances[f"distance/{clean_name(name)}"] = float((value - self.initial[name]).double().norm()) / size
        return distances


class Spectra:
    """Measures the largest and the mean eigenvalue and the damping of every curvature factor at the last inverse.

    Args:
        model: Not used.
        optimizer: A second-order optimizer; with any other there is nothing to read.
        x: Not used.

    Example:
        >>> import mukron
        >>> model = nn.Linear(2, 2)
        >>> probe = Spectra(model, optimizer := mukron.KFAC(model, lr=0.1), None)
        >>> nn.functional.cross_entropy(model(torch.eye(2)), torch.tensor([0, 1])).backward()
        >>> optimizer.step()
        >>> round(probe.read()["mean/.A"], 4)
        0.5
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.seen: dict[str, tuple[Factor, Tensor]] = {}
        self.loaded: dict[str, float] = {}
        self.of_all: Callable[[dict[str, float]], list[dict[str, float]]] = lambda own: [own]  # of several processes
        if isinstance(optimizer, SecondOrder):
            optimizer.watch(self._record_factors)

    def _record_factors(self, layer: str, block: str, factors: Mapping[str, Factor], rho: Mapping[str, Tensor]) -> None:
        if block == WEIGHT:
            self.seen.update({f"{layer}.{name}": (factor, rho[name]) for name, factor in factors.items()})

    def state(self) -> dict[str, float]:
        """Returns the numbers of the last inverses, to be saved in a checkpoint."""
        return self.read()

    def load(self, numbers: Mapping[str, float]) -> None:
        """Restores the numbers of a checkpoint, which are valid until inverses are computed again.

        Args:
            numbers: What ``state`` returned.
        """
        self.loaded = dict(numbers)

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Returns the numbers by layer and factor. All processes must call this: each has its own layers."""
        numbers: dict[str, float] = {}
        for name, (factor, rho) in self.seen.items():
            numbers[f"largest/{name}"] = largest_eigenvalue(factor)
            numbers[f"mean/{name}"] = float((factor.trace() / factor.d).mean())
            numbers[f"damping/{name}"] = float(rho.mean())
        return {**self.loaded, **{name: number for rank in self.of_all(numbers) for name, number in rank.items()}}


class Rates:
    """Measures each parameter's change in the last step over its gradient; momentum and weight decay are included.

    Args:
        model: The network.
        optimizer: The optimizer, whose steps are observed; without one there is nothing to read.
        x: Not used.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> probe = Rates(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.5), None)
        >>> model(torch.ones(2)).backward()
        >>> optimizer.step()
        >>> {name: round(rate, 4) for name, rate in probe.read().items()}
        {'rate/weight': 0.5}
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, x: Any) -> None:
        self.parameters = {clean_name(name): value for name, value in unwrap(model).named_parameters()}
        self.before: dict[str, Tensor] = {}
        self.rates: dict[str, float] = {}
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._remember)
            optimizer.register_step_post_hook(self._compare)

    def _remember(self, *_: Any) -> None:
        moving = {name: value for name, value in self.parameters.items() if value.grad is not None}
        self.before = {name: value.detach().clone() for name, value in moving.items()}

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        self.rates = {}
        for name, before in self.before.items():
            value = self.parameters[name]
            assert value.grad is not None
            gradient = float(value.grad.norm())
            if gradient > 0:
                self.rates[f"rate/{name}"] = float((value - before).norm()) / gradient
        self.before = {}

    def read(self) -> dict[str, float]:
        """Returns the rates of the last step by parameter."""
        return dict(self.rates)


PROBES: dict[str, Callable[[nn.Module, Optimizer | None, Any], Probe]] = {
    "features": Features,
    "distance": Distance,
    "spectra": Spectra,
    "rates": Rates,
}
