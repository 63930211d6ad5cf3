"""Listening to a model: the inputs of its layers, and the derivatives by their outputs.

While the model's own forward pass runs (training mode, gradients on), a hook on every layer keeps its input and the
*gradient edge* of its output: the place in autograd's graph where the derivative by the output arrives, as the output
was when the layer returned it. An in-place activation right after it does not change that place. When the forward pass
ends, the Fisher signals are drawn from the model's output by backward passes to those edges alone, which compute no
weight gradients. What was gathered counts once the user's own backward pass arrives at the model's output: a forward
pass that is never differentiated leaves no trace.

    forward:   root pre-hook -> layer hooks -> root hook: inputs and signals into accumulators of this pass
    backward:  the user's own, at the output: this pass joins what the step will use
               (on its way down it also brings "empirical" signals)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mukron.curvature.accumulate import Accumulator, FrequencyAccumulator
from mukron.curvature.fisher import targets
from mukron.curvature.layers import Layout


@dataclass(frozen=True)
class Listening:
    """What to listen for."""

    inputs: bool = True
    signals: bool = True
    jacobian: bool = False  # every output's own derivative, and the loss's derivative by the output: Gauss-Newton
    fisher: str = "mc"
    likelihood: str = "categorical"
    class_dim: int | None = None  # where the classes stand in the output; None: dimension 1 of a two-dimensional output
    sharing: str = "expand"
    form: str = "auto"
    output: Callable[[Any], Tensor] | None = None  # picks the network's output out of what the model returns


@dataclass
class Gathered:
    """One layer's statistics."""

    A: Accumulator | FrequencyAccumulator | None = None
    B: Accumulator | None = None
    positions: int = 1  # of a sample, as far as one weight is concerned
    inputs: list[Tensor] = field(default_factory=list)  # the rows H that A was made of, while they are few
    gradients: list[Tensor] = field(default_factory=list)  # the loss's own derivatives, row by row as H: G = D^T H
    jacobians: list[Jacobian] = field(default_factory=list)

    def merge(self, other: Gathered) -> None:
        self.A = _merged(self.A, other.A)
        self.B = _merged(self.B, other.B)
        self.positions = other.positions
        self.inputs += other.inputs
        self.gradients += other.gradients
        self.jacobians += other.jacobians


class Jacobian(NamedTuple):
    """Every output's derivative by a layer's weight: the sum over positions of signals inputs^T."""

    inputs: Tensor  # [groups, samples, positions, d_in]
    signals: Tensor  # [groups, samples, outputs, positions, d_out]
    errors: Tensor  # [samples, outputs], the derivative of the user's loss by the outputs


class Hook:
    """A forward hook that outlives neither its capture nor a copy of its model: copies and pickles of it do nothing."""

    def __init__(self, target: Capture | None, method: str, key: str) -> None:
        self.target = None if target is None else weakref.ref(target)
        self.method, self.key = method, key
        disable: Callable[..., Any] = torch.compiler.disable
        self.run = disable(self._run)  # a compiled model runs its hooks as plain Python

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        self.run(module, *arguments)

    def _run(self, module: nn.Module, *arguments: Any) -> None:
        target = None if self.target is None else self.target()
        if target is not None and target.modules.get(self.key) is module:
            getattr(target, self.method)(self.key, *arguments)

    def __reduce__(self) -> Any:
        return Hook, (None, self.method, self.key)


class Capture:
    """Hooks on a model and its layers, and what they gathered since the last step."""

    def __init__(
        self, model: nn.Module, layers: Mapping[str, Layout], listening: Listening, generator: Generator
    ) -> None:
        self.model, self.layers, self.listening, self.generator = model, dict(layers), listening, generator
        self.close: Callable[[], Any] = lambda: None
        self.modules: dict[str, nn.Module] = {"": model, **{name: entry.module for name, entry in layers.items()}}
        self.gathered: dict[str, Gathered] = {}
        self.samples = 0
        self.paused = False
        self.due = True  # the coming step wants fresh statistics
        self._running: dict[str, tuple[Tensor, GradientEdge | None]] | None = None  # inside the model's forward pass
        if not layers:
            return  # a method that listens to nothing leaves the model alone
        handles = [
            model.register_forward_pre_hook(Hook(self, "before_forward", "")),
            *(entry.module.register_forward_hook(Hook(self, "layer_ran", name)) for name, entry in layers.items()),
            model.register_forward_hook(Hook(self, "after_forward", "")),
        ]
        self.close = weakref.finalize(self, _remove, handles)

    def reset(self) -> None:
        """Forget what was gathered: a step has used it, or its gradients were thrown away."""
        self.gathered, self.samples = {}, 0

    # The three hooks, in the order in which they run.

    def before_forward(self, key: str, inputs: Any) -> None:
        listens = self.due and not self.paused and self.model.training and torch.is_grad_enabled()
        self._running = {} if listens else None

    def layer_ran(self, key: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._running is None or not torch.is_grad_enabled():
            return
        if key in self._running:
            raise RuntimeError(
                f'layer "{key}" ran twice in one forward pass; its two uses share one weight, which the factors of one '
                f'use do not describe. Leave it to the fallback rule: exclude=("{key}",)'
            )
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._running[key] = (inputs[0].detach(), edge)

    def after_forward(self, key: str, inputs: Any, output: Any) -> None:
        running, self._running = self._running, None  # layers that backward passes recompute are not listened to
        if not running:
            return
        f = self._output(output)
        if f.requires_grad:
            with torch.autocast(f.device.type, enabled=False):  # statistics keep their precision
                self._gather(f, running)

    def _gather(self, f: Tensor, running: Mapping[str, tuple[Tensor, GradientEdge | None]]) -> None:
        """Inputs and Fisher signals of a forward pass that ended in f."""
        samples, listening = f.shape[0], self.listening
        layer_inputs = {name: x for name, (x, _) in running.items()}
        edges = {name: edge for name, (_, edge) in running.items() if edge is not None}
        this_pass = {name: Gathered() for name in running}
        if listening.inputs:
            for name, x in layer_inputs.items():
                self._add_input(this_pass[name], name, x, samples)
        if listening.signals and listening.fisher != "empirical":
            for name, deltas in self._fisher(f, edges).items():
                self._add_signals(this_pass[name], name, deltas, samples)
        jacobians = self._jacobians(f, edges) if listening.jacobian else {}

        def differentiated(errors: Tensor) -> None:
            self.samples += samples
            errors = _precise(errors.detach()).reshape(samples, -1)
            for name, signals in jacobians.items():
                H = _precise(self.layers[name].inputs(layer_inputs[name]))
                this_pass[name].jacobians.append(Jacobian(H, signals, errors))
            for name, gathered in this_pass.items():
                self.gathered.setdefault(name, Gathered()).merge(gathered)

        _on_gradient(get_gradient_edge(f), differentiated)
        for name, edge in edges.items():
            if this_pass[name].inputs:
                _on_gradient(edge, partial(self._add_gradient, name))
        if listening.signals and listening.fisher == "empirical":
            for name, edge in edges.items():
                _on_gradient(edge, partial(self._add_empirical, name, samples))

    def _output(self, output: Any) -> Tensor:
        f = self.listening.output(output) if self.listening.output is not None else output
        if not isinstance(f, Tensor):
            raise TypeError(
                f"the model returned a {type(f).__name__}, not a tensor; say where its output is: "
                "output=lambda returned: returned.logits"
            )
        return f

    # From captured tensors to statistics.

    def _fisher(self, f: Tensor, edges: Mapping[str, GradientEdge]) -> dict[str, list[Tensor]]:
        listening = self.listening
        deltas: dict[str, list[Tensor]] = {name: [] for name in edges}
        for v in targets(f, listening.fisher, listening.likelihood, self._class_dim(f), self.generator):
            for name, delta in zip(edges, _backward(f, edges.values(), v), strict=True):
                if delta is not None:
                    deltas[name].append(delta)
        return deltas

    def _class_dim(self, f: Tensor) -> int:
        class_dim = self.listening.class_dim
        if class_dim is None:
            if f.ndim < 2 and self.listening.likelihood == "categorical":
                raise ValueError(
                    f"the model's output of shape {list(f.shape)} has no classes to choose from; for a regression say "
                    'likelihood="gaussian", for two classes give both a logit'
                )
            if f.ndim > 2 and self.listening.likelihood == "categorical":
                raise ValueError(
                    f"the model's output has shape {list(f.shape)}: say where the classes are, class_dim=1 "
                    "(segmentation) or class_dim=-1 (language)"
                )
            return -1
        if f.ndim <= class_dim or f.ndim < 2:
            raise ValueError(f"class_dim={class_dim} does not fit the model's output of shape {list(f.shape)}")
        return class_dim

    def _jacobians(self, f: Tensor, edges: Mapping[str, GradientEdge]) -> dict[str, Tensor]:
        """Every output's derivative by every layer's output, [groups, samples, outputs, positions, d_out]."""
        outputs = f[0].numel()
        deltas: dict[str, list[Tensor]] = {name: [] for name in edges}
        for output in range(outputs):
            v = torch.zeros_like(f).reshape(f.shape[0], outputs)
            v[:, output] = 1
            for name, delta in zip(edges, _backward(f, edges.values(), v.reshape(f.shape)), strict=True):
                if delta is not None:
                    deltas[name].append(_precise(self.layers[name].signals(delta)))
        return {name: torch.stack(found, dim=2) for name, found in deltas.items() if found}

    def _add_input(self, gathered: Gathered, name: str, x: Tensor, samples: int) -> None:
        layer = self.layers[name]
        if layer.one_hot:
            gathered.A = FrequencyAccumulator(layer.d_in)
            gathered.A.add(layer.inputs(x), samples, _precise(next(layer.module.parameters())[:0]).dtype)
            return
        H = self._shared(_precise(layer.inputs(x)), samples, torch.mean)
        gathered.positions = H.shape[2]
        rows = H.flatten(1, 2)
        gathered.A = Accumulator(layer.d_in, layer.d_out, self.listening.form)
        gathered.A.add(rows, samples)
        if gathered.A.rows:
            gathered.inputs.append(rows)

    def _add_signals(self, gathered: Gathered, name: str, deltas: list[Tensor], samples: int) -> None:
        layer = self.layers[name]
        if gathered.B is None:
            gathered.B = Accumulator(layer.d_out, layer.d_in, self.listening.form)
        for number, delta in enumerate(deltas):
            D = self._shared(_precise(layer.signals(delta.detach())), samples, torch.sum)
            gathered.positions = D.shape[2]
            # every draw adds rows, but samples count once
            gathered.B.add(D.flatten(1, 2), samples * D.shape[2] if number == 0 else 0)

    def _add_gradient(self, name: str, delta: Tensor) -> None:
        rows = _precise(self.layers[name].signals(delta.detach())).flatten(1, 2)
        self.gathered.setdefault(name, Gathered()).gradients.append(rows)

    def _add_empirical(self, name: str, samples: int, delta: Tensor) -> None:
        self._add_signals(self.gathered.setdefault(name, Gathered()), name, [delta], samples)

    def _shared(self, X: Tensor, samples: int, reduce: Callable[..., Tensor]) -> Tensor:
        """[groups, samples, positions, d], also where the model folded positions into samples; reduced if so asked."""
        rows = X.shape[1] * X.shape[2]
        if X.shape[1] != samples and rows % samples == 0:
            X = X.reshape(X.shape[0], samples, rows // samples, X.shape[3])
        if self.listening.sharing == "reduce" and X.shape[2] > 1:
            return reduce(X, dim=2, keepdim=True)
        return X


def _backward(f: Tensor, edges: Iterable[GradientEdge], v: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(f, list(edges), grad_outputs=v, retain_graph=True, allow_unused=True)


def _on_gradient(edge: GradientEdge, then: Callable[[Tensor], None]) -> None:
    """Call ``then`` with the derivative that arrives at that edge in the next backward pass."""

    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[edge.output_nr]
        if gradient is not None:
            then(gradient)

    edge.node.register_prehook(arrived)


def _precise(x: Tensor) -> Tensor:
    """Statistics are float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _merged(ours: Any, theirs: Any) -> Any:
    if ours is None or theirs is None:
        return ours or theirs
    ours.merge(theirs)
    return ours


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
