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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mukron.curvature.accumulate import Accumulator, FrequencyAccumulator, rows_are_cheaper
from mukron.curvature.fisher import targets
from mukron.curvature.graph import Joined, listening_at, on_gradient, own_backward, remove
from mukron.curvature.layers import Layout
from mukron.curvature.precision import as_precise
from mukron.curvature.statistics import Gathered, Halves, Jacobian, probe, unfolded
from mukron.curvature.statistics import precise as _precise
from mukron.stages import stage


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
    fused: bool = False  # weights whose gradient is cheaper as D^T H never get one

    @property
    def halves_alone(self) -> bool:
        """Nothing but gradients as D^T H."""
        return self.fused and not (self.inputs or self.signals or self.jacobian)

    @property
    def anything(self) -> bool:
        return self.inputs or self.signals or self.jacobian or self.fused


@dataclass
class Pass:
    """One forward pass of the model: what its layers saw, and what the user's backward passes through it bring."""

    samples: int
    layers: dict[str, Gathered]
    deltas: dict[str, Tensor] = field(default_factory=dict)  # the loss's own derivatives, by layer
    jacobians: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # inputs and signals of every output
    errors: Tensor | None = None  # the loss's derivative by the model's output; None: not differentiated yet
    later: dict[str, Ran] = field(default_factory=dict)  # of whose inputs rows are made when the step wants them
    probed: dict[str, Tensor] = field(default_factory=dict)  # H v, while uses are checked
    along: dict[str, Tensor] = field(default_factory=dict)  # and D^T H v
    rows: dict[str, Tensor] = field(default_factory=dict)  # H, for gradients as D^T H
    fused: frozenset[str] = frozenset()  # layers whose gradient is wanted as D^T H alone
    checked: bool = False  # uses are checked in this pass, for which those weights got their gradient all the same
    over: bool = False  # a step has used it, or its gradients were thrown away

    def clear(self) -> None:
        self.over = True
        for found in (self.layers, self.deltas, self.jacobians, self.later, self.probed, self.along, self.rows):
            found.clear()


class Ran(NamedTuple):
    """A layer that ran.

    input: what it got, and its version then.
    made: by the model itself; what the user passed in may be overwritten before the step.
    edge: where the derivative by the layer's output will arrive.
    """

    input: Tensor
    version: int
    made: bool
    edge: GradientEdge | None

    def check(self, name: str) -> None:
        if self.input._version != self.version:
            raise RuntimeError(f'the input of layer "{name}" was changed in place after the layer had used it')


class Hook:
    """A forward hook that outlives neither its capture nor a copy of its model: copies and pickles of it do nothing."""

    def __init__(self, target: Capture | None, method: str, key: str) -> None:
        self.target = None if target is None else weakref.ref(target)
        self.method, self.key = method, key
        disable: Callable[..., Any] = torch.compiler.disable
        self.run = disable(self._run)  # a compiled model runs its hooks as plain Python

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        return self.run(module, *arguments)

    def _run(self, module: nn.Module, *arguments: Any) -> Any:
        target = None if self.target is None else self.target()
        if target is not None and target.modules.get(self.key) is module:
            return getattr(target, self.method)(self.key, *arguments)
        return None

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
        self.passes: list[Pass] = []  # those that were differentiated
        self.paused = False
        self.due = True  # the coming step wants fresh statistics
        self.checks_uses = True  # until a step has seen that gradients come from the layers' own passes
        self._running: dict[str, Ran] | None = None  # inside the model's forward pass
        self._fused: set[str] = set()  # layers of that pass whose weight takes no part in autograd's graph
        if not layers:
            return  # a method that listens to nothing leaves the model alone
        handles = [model.register_forward_pre_hook(Hook(self, "before_forward", ""))]
        for name, entry in layers.items():
            if listening.fused:
                handles.append(entry.module.register_forward_pre_hook(Hook(self, "layer_runs", name)))
            ran = Hook(self, "layer_ran", name)
            handles.append(entry.module.register_forward_hook(ran, always_call=listening.fused))
        handles.append(model.register_forward_hook(Hook(self, "after_forward", ""), always_call=True))
        self.close = weakref.finalize(self, remove, handles)

    def reset(self) -> None:
        """Forget what was gathered: a step has used it, or its gradients were thrown away."""
        for each in self.passes:
            each.clear()  # a loss that the user still holds keeps its graph, and that these passes
        self.passes = []

    @property
    def samples(self) -> int:
        return sum(each.samples for each in self.passes)

    def gather(self) -> dict[str, Gathered]:
        """The statistics of every layer over all differentiated passes."""
        total: dict[str, Gathered] = {}
        for each in self.passes:
            for name, ran in each.later.items():
                ran.check(name)
                self._add_input(each, name, ran.input)
            each.later.clear()
            for name, found in each.layers.items():
                total.setdefault(name, Gathered()).merge(found)
            for name, delta in each.deltas.items():
                self._add_delta(total[name], name, delta, each)
            for name, (inputs, signals) in each.jacobians.items():
                assert each.errors is not None
                total[name].jacobians.append(Jacobian(inputs, signals, each.errors))
        return total

    def along(self, name: str) -> Tensor | None:
        """What the gradient of that layer's weight, by its own passes, does to the probe v: D^T (H v)."""
        found = [each.along[name] for each in self.passes if name in each.along]
        return torch.stack(found).sum(0) if found else None

    def is_fused(self, name: str) -> bool:
        """Whether all passes want that layer's gradient as D^T H alone."""
        return all(name in each.fused and name in each.deltas for each in self.passes)

    # The hooks, in the order in which they run.

    def before_forward(self, key: str, inputs: Any) -> None:
        wanted = self.due or self.listening.fused
        listens = wanted and not self.paused and self.model.training and torch.is_grad_enabled()
        self._running = {} if listens else None
        self._fused = set()

    def layer_runs(self, key: str, inputs: tuple[Tensor, ...]) -> None:
        """Keep the weight out of the graph for this call, if its gradient is to be D^T H."""
        if self._running is None or not torch.is_grad_enabled() or not inputs:
            return
        weight = getattr(self.modules[key], "weight", None)
        if weight is not None and weight.requires_grad and self._fuses(self.layers[key], inputs[0]):
            weight.requires_grad_(self.checks_uses)
            self._fused.add(key)

    def layer_ran(self, key: str, inputs: tuple[Tensor, ...], output: Tensor | None) -> Tensor | None:
        fused = key in self._fused
        if fused:
            weight: Tensor = getattr(self.modules[key], "weight")  # noqa: B009
            weight.requires_grad_(True)
        if output is None or self._running is None or not torch.is_grad_enabled():  # None: the layer failed
            return None
        if fused and not output.requires_grad:  # the first layer, whose input needs no gradient
            output = Joined.apply(output, torch.ones((), requires_grad=True))  # type: ignore[no-untyped-call]
        if fused or (self.due and not self.listening.halves_alone):
            self._note(key, inputs, output)
        return output if fused else None

    def _note(self, key: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert self._running is not None
        if key in self._running:
            raise RuntimeError(
                f'layer "{key}" ran twice in one forward pass; its two uses share one weight, which the factors of one '
                f'use do not describe. Leave it to the fallback rule: exclude=("{key}",)'
            )
        if not inputs:
            raise RuntimeError(f'layer "{key}" was called with keywords alone; pass its input by position')
        if not inputs[0].numel():  # an expert that no sample was sent to: as if it had not run
            return
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._running[key] = Ran(inputs[0].detach(), inputs[0]._version, inputs[0].grad_fn is not None, edge)

    def _fuses(self, layer: Layout, x: Tensor) -> bool:
        """Whether the gradient is cheaper to precondition as D^T H, N rows each, than as a matrix; in multiplications.

        halves:  A's side  N^2 d_out (its own rows), 2 N^2 d_in (another batch's) or N d_in^2 (a matrix);  B's likewise
        matrix:  A's side  2 N d_in d_out (rows) or d_in^2 d_out (a matrix);  B's likewise
        """
        d_in, d_out = layer.d_in, layer.d_out
        N = layer.row_count(x)
        if N is None:
            return False
        if self.listening.halves_alone:  # all products then cost N d^2 in place of d^3
            return min(d_in, d_out) >= 2 * N
        as_rows = self.listening.form != "matrix"
        a_rows, b_rows = as_rows and d_in > N, as_rows and d_out > N
        own_b = 1 if self.listening.fisher == "empirical" and self.due else 2
        halves = (N * d_out if self.due else 2 * N * d_in) * N if a_rows else N * d_in**2
        matrix = 2 * N * d_in * d_out if a_rows else d_in**2 * d_out
        if self.listening.signals:
            halves += own_b * N**2 * d_out if b_rows else N * d_out**2
            matrix += 2 * N * d_in * d_out if b_rows else d_out**2 * d_in
        return halves < matrix

    def after_forward(self, key: str, inputs: Any, output: Any) -> None:
        running, self._running = self._running, None  # layers that backward passes recompute are not listened to
        if not running or output is None:  # None: the forward pass failed
            return
        f = self._output(output)
        if f.requires_grad and len(f):  # an empty batch shows nothing
            with torch.autocast(f.device.type, enabled=False):  # statistics keep their precision
                self._gather(f, running)

    def _output(self, output: Any) -> Tensor:
        f = self.listening.output(output) if self.listening.output is not None else output
        if not isinstance(f, Tensor):
            raise TypeError(
                f"the model returned a {type(f).__name__}, not a tensor; say where its output is: "
                "output=lambda returned: returned.logits"
            )
        if f.ndim == 0:
            raise ValueError("the model returned a single number (its loss?); the optimizer needs its outputs")
        return f

    # From captured tensors to statistics.

    def _gather(self, f: Tensor, running: Mapping[str, Ran]) -> None:
        """Inputs and Fisher signals of a forward pass that ended in f; the rest follows when it is differentiated."""
        samples, listening = f.shape[0], self.listening
        for name, ran in running.items():
            ran.check(name)
        edges = {name: ran.edge for name, ran in running.items() if ran.edge is not None}
        this = Pass(samples, {name: Gathered() for name in running}, fused=frozenset(self._fused))
        this.checked = self.checks_uses
        if listening.signals and listening.fisher != "empirical" and self.due:
            with stage("mukron::fisher"):  # first: a backward pass takes much memory
                self._fisher(f, edges, this)
        if listening.inputs or listening.fused:
            for name in as_precise([(self.layers[name], name) for name in running]):
                ran = running[name]
                if self._waits(this, name, ran):
                    this.later[name] = ran._replace(edge=None)  # which would keep its own graph alive
                else:
                    keeps = not ran.made and not self._as_matrix(this, name, ran.input)
                    self._add_input(this, name, ran.input.clone() if keeps else ran.input)
        if listening.jacobian:
            this.jacobians = self._jacobians(f, edges, running)
        if self.checks_uses:
            this.probed = {name: self._probed(self.layers[name], running[name].input) for name in edges}

        def differentiated(errors: Tensor) -> None:
            errors = _precise(errors.detach()).reshape(samples, -1)
            if this.errors is None:
                self.passes.append(this)
                this.errors = errors
            else:  # a second backward pass through the same forward pass adds to its gradients
                this.errors = this.errors + errors

        on_gradient(get_gradient_edge(f), differentiated)
        empirical = listening.signals and listening.fisher == "empirical"
        for name, edge in edges.items():
            if empirical or name in this.rows or name in this.later:
                on_gradient(edge, partial(self._keep_delta, this, name))
            if self.checks_uses:
                on_gradient(edge, partial(self._add_along, this, name))

    def _fisher(self, f: Tensor, edges: Mapping[str, GradientEdge], this: Pass) -> None:
        """Signals of every layer, each used as it passes by: together they are as large as the graph."""
        listening = self.listening
        for number, v in enumerate(
            targets(f, listening.fisher, listening.likelihood, self._class_dim(f), self.generator)
        ):
            waiting = dict(edges)

            def hear(name: str, delta: Tensor, number: int = number, waiting: dict[str, Any] = waiting) -> None:
                if waiting.pop(name, None) is not None:
                    self._add_signals(this.layers[name], self.layers[name], delta, this.samples, number)

            with listening_at(waiting, hear):
                while waiting:  # the way to the earliest layer leads past most others, if not all
                    name, edge = next(iter(waiting.items()))
                    (delta,) = own_backward(f, [edge], v)
                    if delta is not None:
                        hear(name, delta)
                    waiting.pop(name, None)

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

    def _jacobians(
        self, f: Tensor, edges: Mapping[str, GradientEdge], running: Mapping[str, Ran]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Every layer's inputs, and every output's derivative by it, [groups, samples, outputs, positions, d_out]."""
        samples, outputs = f.shape[0], f[0].numel()
        deltas: dict[str, list[Tensor]] = {name: [] for name in edges}
        for output in range(outputs):
            v = torch.zeros_like(f).reshape(samples, outputs)
            v[:, output] = 1
            for name, delta in zip(edges, own_backward(f, edges.values(), v.reshape(f.shape)), strict=True):
                if delta is not None:
                    deltas[name].append(unfolded(_precise(self.layers[name].signals(delta)), samples))
        found = {}
        for name, signals in deltas.items():
            if signals:
                H = self.layers[name].inputs(running[name].input)
                if self.layers[name].one_hot:
                    H = torch.nn.functional.one_hot(H, self.layers[name].d_in).to(signals[0].dtype)
                found[name] = (unfolded(_precise(H), samples), torch.stack(signals, dim=2))
        return found

    def _add_input(self, this: Pass, name: str, x: Tensor) -> None:
        gathered, layer, samples = this.layers[name], self.layers[name], this.samples
        gathered.samples = samples
        if layer.one_hot:
            indices = layer.inputs(x)
            gathered.rows = indices.numel()
            gathered.A = FrequencyAccumulator(layer.d_in)
            gathered.A.add(indices, samples, _precise(next(layer.module.parameters())[:0]).dtype)
            return
        if not self.due or not self.listening.inputs:
            this.rows[name] = unfolded(_precise(layer.inputs(x)), samples).flatten(1, 2)
            return
        if self._as_matrix(this, name, x):
            gathered.rows = layer.row_count(x) or 0
            gathered.A = Accumulator(layer.d_in, layer.d_out, "matrix")
            gathered.A.add_matrix(layer.gram(_precise(x)), samples)
            return
        fused, reduced = name in this.fused, self.listening.sharing == "reduce"
        if reduced and not fused:
            rows = self._means(layer, x, samples)
        else:
            H = unfolded(_precise(layer.inputs(x)), samples)
            rows = H.flatten(1, 2)
            if fused:
                this.rows[name] = rows
            if reduced:
                rows = H.mean(2)
        gathered.rows = rows.shape[1]
        gathered.A = Accumulator(layer.d_in, layer.d_out, self.listening.form)
        gathered.A.add(rows, samples)
        if gathered.A.rows and not fused:
            this.rows[name] = rows

    def _as_matrix(self, this: Pass, name: str, x: Tensor) -> bool:
        """Whether nothing but the sum of h h^T is wanted of a layer's inputs."""
        layer, form = self.layers[name], self.listening.form
        N = layer.row_count(x)
        wanted = self.due and self.listening.inputs and self.listening.sharing == "expand"
        if N is None or name in this.fused or not wanted:
            return False
        return form == "matrix" or (form == "auto" and not rows_are_cheaper(N, layer.d_in, layer.d_out))

    def _waits(self, this: Pass, name: str, ran: Ran) -> bool:
        """Whether rows are better made at the step, when the graph is gone: those of a convolution are its patches."""
        layer, x = self.layers[name], ran.input
        N = layer.row_count(x)
        widens = N is not None and N * layer.d_in * layer.groups > 2 * x.numel()
        return ran.made and widens and not self._as_matrix(this, name, x) and self.listening.sharing == "expand"

    def _means(self, layer: Layout, x: Tensor, samples: int) -> Tensor:
        """[groups, samples, d_in], each the mean of a sample's positions; patches are made a portion at a time."""
        if len(x) != samples:
            return unfolded(_precise(layer.inputs(x)), samples).mean(2)
        portions = layer.portions(x)
        return torch.cat([unfolded(_precise(layer.inputs(part)), len(part)).mean(2) for part in portions], dim=1)

    def _probed(self, layer: Layout, x: Tensor) -> Tensor:
        if layer.one_hot:
            dtype = _precise(next(layer.module.parameters())[:0]).dtype
            return layer.along(x, probe(layer.d_in, dtype, x.device))
        return layer.along(_precise(x), probe(layer.d_in, _precise(x[:0]).dtype, x.device))

    def _keep_delta(self, this: Pass, name: str, delta: Tensor) -> None:
        if not this.over:
            _add_to(this.deltas, name, delta.detach())

    def _add_along(self, this: Pass, name: str, delta: Tensor) -> None:
        if not this.over:
            D = _precise(self.layers[name].signals(delta.detach())).flatten(1, 2)
            _add_to(this.along, name, D.mT @ this.probed[name])

    def _add_signals(self, gathered: Gathered, layer: Layout, delta: Tensor, samples: int, draw: int = 0) -> None:
        """Every draw adds rows, but samples and positions count once."""
        D = unfolded(_precise(layer.signals(delta.detach())), samples)
        if self.listening.sharing == "reduce" and not layer.one_hot:  # a diagonal A has expanded its positions
            D = D.sum(2, keepdim=True)
        if gathered.B is None:
            gathered.B = Accumulator(layer.d_out, layer.d_in, self.listening.form)
        for B in as_precise([(layer, gathered.B)]):
            B.add(D.flatten(1, 2), D.shape[1] * D.shape[2] if draw == 0 else 0)

    def _add_delta(self, gathered: Gathered, name: str, delta: Tensor, this: Pass) -> None:
        """The loss's own derivative: the gradient's other half, and the empirical Fisher's signal."""
        layer = self.layers[name]
        if name in this.rows:
            D = unfolded(_precise(layer.signals(delta)), this.samples).flatten(1, 2)
            gathered.halves.append(Halves(D, this.rows[name], name in this.fused and not this.checked))
        if self.listening.signals and self.listening.fisher == "empirical" and this.layers[name].A is not None:
            self._add_signals(gathered, layer, delta, this.samples)


def _add_to(found: dict[str, Tensor], name: str, term: Tensor) -> None:
    found[name] = found[name] + term if name in found else term
