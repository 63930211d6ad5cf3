"""Listening to a model: hooks on its layers, from their registration to their removal.

While the model's own forward pass runs (training mode, gradients on), a hook on every layer notes its input and the
*gradient edge* of its output: the place in autograd's graph where the derivative by the output arrives, as the output
was when the layer returned it. An in-place activation right after it does not change that place. Nothing is computed
until the user's own backward pass arrives at the model's output. Then Fisher signals are sent from the output to those
edges by backward passes of our own, which compute no weight gradients, and statistics are made of inputs and signals.

    forward:   root pre-hook -> layer hooks, and products inside of modules (``curvature.products``) -> root hook: a
               ``Pass`` waits at the model's output, in autograd's graph
    backward:  the user's own, at the output: Fisher signals, inputs -> statistics; the pass joins the coming step
               further down, at the layers: the loss's own derivatives

A forward pass that is never differentiated leaves no trace: its graph owns all that was noted of it. (For this, nothing
that waits in the graph may own the place it waits at, or anything nearer to the output.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, distributed, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import TensorWeakRef

from mukron.curvature.ahead import Ahead
from mukron.curvature.fisher import CaptureOptions, OwnPasses, send_signals
from mukron.curvature.forms import makes_gradient
from mukron.curvature.hooks import hooked
from mukron.curvature.jacobians import add_jacobians
from mukron.curvature.noted import Noted, thrown_away
from mukron.curvature.outputs import no_classes, no_output, shows_reduction, takes_rows_apart, warn_of_folding
from mukron.curvature.passes import LayerPass, LayerStatistics, Pass, gather, precise
from mukron.curvature.products import Watch, end_watches, enter_host, hosts, leave_host, passes_of_product
from mukron.curvature.ranks import Ranks
from mukron.curvature.scale import add_scale, classes_at
from mukron.curvature.spread import check_parts, draw_nothing, weights_kept
from mukron.curvature.uses import Joined, add_probe
from mukron.curvature.views import note_view
from mukron.layers import MatrixLayer
from mukron.stages import stage


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
    """Hooks on a model and its layers, and the passes that were differentiated since the last step."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, MatrixLayer],
        options: CaptureOptions,
        generator: Generator,
        others: Mapping[str, tuple[str, MatrixLayer]] | None = None,
    ) -> None:
        """others: by name, layers that use the weight of one of these layers, with the name of that one."""
        self.model, self.layers, self.options, self.generator = model, dict(layers), options, generator
        self.uses = {**{name: (name, layer) for name, layer in layers.items()}, **(others or {})}
        # heads that use an embedding's weight, and those embeddings
        self._heads = {key for key, (name, use) in self.uses.items() if layers[name].one_hot and not use.one_hot}
        self._tied = {self.uses[key][0] for key in self._heads}
        self.close: Callable[[], Any] = lambda: None
        self.modules: dict[str, nn.Module] = {"": model, **{key: layer.module for key, (_, layer) in self.uses.items()}}
        self.parameters = list(model.parameters())
        self.passes: list[Pass] = []
        self.ranks: Callable[[], Ranks | None] = lambda: None  # which processes train the model together
        self.ahead: Ahead | None = None  # sends statistics as soon as they are there
        self.forms: Mapping[str, str] = {}  # of the statistics of some layers, until ranks have exchanged them
        self.products = frozenset[str]()  # those of them whose D and H are kept
        self.paused, self.lost = False, False  # lost: a pass that was thrown away was differentiated once more
        self.due = True  # the coming step wants fresh statistics
        self.checks_uses = True  # until a step has seen that gradients come from the layers' own passes
        self.asks_reduction = False  # no batch has shown yet how the loss reduces: they had one sample or position
        self.double: frozenset[str] = frozenset()  # layers that are preconditioned in float64
        self.odd: dict[str, str] = {}  # layers that returned something else than a tensor: its type
        self.warns_of_rows = takes_rows_apart(options)  # until it has
        self.waiting = False  # a pass of this step has not been differentiated, from its output on
        self.class_dim = options.class_dim  # where the classes are in an output with positions, once that is known
        self._running: dict[str, LayerPass] | None = None  # inside the model's forward pass
        self._uses: Counter[tuple[str, int | None]] = Counter()  # so far in this pass, by layer and part
        self._fused: set[str] = set()  # layers of that pass whose weight takes no part in autograd's graph
        self._watches: list[Watch] = []  # over modules of that pass, the innermost last
        self._generator_before: Tensor | None = None  # its state before the draws of the coming step
        self.gradients: list[Noted] = []  # as they were when the last backward pass ended
        if not layers:
            return  # a method that measures nothing leaves the model alone
        self.hosts = {host.name: host for host in hosts(model, self.uses)}
        self.close = weakref.finalize(self, remove, hooked(self, Hook), self._watches)

    # What the step asks for.

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.passes)

    def gather(self) -> dict[str, LayerStatistics]:
        """The statistics of every layer over all differentiated passes."""
        return gather(self.passes)

    def commit(self, due: bool, double: frozenset[str]) -> None:
        """A step has used what was gathered; this is what the next one wants."""
        self.due, self.double, self._generator_before = due, double, None
        self.forget()

    def forget(self, rewind: bool = True) -> None:
        """Gradients were thrown away, or a step was skipped: their statistics and their draws count as never made."""
        for one in self.passes:
            one.over = True
            one.layers.clear()  # a loss that the user still holds keeps its graph, and that these passes
        self.passes, self.gradients, self.lost, self.waiting = [], [], False, False
        if self._generator_before is not None and rewind:
            self.generator.set_state(self._generator_before)
            self._generator_before = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Passes inside are not measured, and discarding their gradients does not discard what was gathered before."""
        kept = self.passes, self.gradients, self._generator_before, self.paused
        self.passes, self.gradients, self._generator_before, self.paused = [], [], None, True
        try:
            yield
        finally:
            self.passes, self.gradients, self._generator_before, self.paused = kept

    # The hooks, in the order in which they run.

    def before_forward(self, key: str, inputs: Any) -> None:
        wanted = self.due or self.options.fused or self.double
        listens = wanted and not self.paused and self.model.training and torch.is_grad_enabled() and not in_transform()
        self._running, self._uses = {} if listens else None, Counter()
        while self._fused:  # left behind by a forward pass that was interrupted
            getattr(self.modules[self._fused.pop()], "weight").requires_grad_(True)  # noqa: B009
        if self._watches:  # likewise
            end_watches(self._watches)

    before_host, after_host = enter_host, leave_host

    def before_layer(self, key: str, inputs: tuple[Tensor, ...]) -> None:
        """Keep the weight out of the graph for this call, if its gradient is to be D^T H."""
        if self._running is None or not torch.is_grad_enabled() or not inputs:
            return
        weight = getattr(self.modules[key], "weight", None)
        self._fused.discard(key)  # of another use in this pass
        if key in self._heads:
            return  # the sum with an embedding's gradient is no D^T H
        if weight is not None and weight.requires_grad and makes_gradient(self, self.uses[key][1], inputs[0]):
            weight.requires_grad_(self.checks_uses or self.asks_reduction)
            self._fused.add(key)

    def after_layer(self, key: str, inputs: tuple[Tensor, ...], output: Any) -> Tensor | None:
        fused = key in self._fused
        if fused:
            weight: Tensor = getattr(self.modules[key], "weight")  # noqa: B009
            weight.requires_grad_(True)
        if output is None or self._running is None or not torch.is_grad_enabled():  # None: the layer failed
            return None
        if not isinstance(output, Tensor):
            self.odd[self.uses[key][0]] = type(output).__name__
            return None
        if fused and not output.requires_grad:  # the first layer, whose input needs no gradient
            output = Joined.apply(output, torch.ones((), requires_grad=True))  # type: ignore[no-untyped-call]
        name, layer = self.uses[key]
        if any(name in watch.weights.values() for watch in self._watches):
            return None  # inside of a module whose products are heard of
        if fused or self._wants(name):
            if not inputs:
                raise RuntimeError(f'layer "{key}" was called with keywords alone; pass its input by position')
            this = LayerPass(name, layer, inputs[0].detach(), fused=fused)
            this.transposed, this.tied = key in self._heads, name in self._tied
            self._note(name, this, inputs[0], output)
        return output if fused else None

    def note_product(self, watch: Watch, x: Tensor, weight: Tensor, output: Tensor) -> None:
        """A module has applied a layer's weight by itself, or several of the maps that it stacks."""
        name = watch.name_of(weight)
        if self._running is not None and torch.is_grad_enabled() and self._wants(name):
            for key, this in passes_of_product(watch, self.layers[name], x, weight):
                self._note(key, this, x, output)

    def _wants(self, name: str) -> bool:
        options = self.options
        return name in self.double or (self.due and (options.inputs or options.signals or options.jacobian))

    def _note(self, key: str, this: LayerPass, x: Tensor, output: Tensor) -> None:
        """x, output: as the layer got and returned them."""
        assert self._running is not None
        if uses := self._uses[this.name, this.part]:  # the positions of all uses of a weight count alike
            key = f"{key} ({uses + 1})"
        if x.numel():  # without samples (an expert that got none) it is as if the layer had not run
            if output.requires_grad:
                this.edge = get_gradient_edge(output)
                if output._base is not None:
                    note_view(this, output, output._base)
            this.version, this.made = x._version, x.grad_fn is not None
            self._running[key] = this
            self._uses[this.name, this.part] += 1

    def after_forward(self, key: str, inputs: Any, output: Any) -> None:
        running, self._running = self._running, None  # layers that backward passes recompute are not measured
        if running is None or output is None:  # None: not listened to, or the forward pass failed
            return
        ranks = in_ranks(self) if self.due and self.options.own_passes else None
        if not running and ranks is None:
            return
        f = output_of(self.options, output)
        if ranks is not None and f.requires_grad:
            check_parts(self.model, self.options, ranks, f)
        if ranks is not None and f.requires_grad and not len(f) and self.options.draws:
            on_gradient(before_casts(get_gradient_edge(f)), partial(draw_nothing, self.options, self.generator, ranks))
        if not running or not f.requires_grad or not len(f):  # an empty batch shows nothing
            return
        for layer in running.values():
            if layer.input is not None and layer.input._version != layer.version:
                layer.check()
        if self.warns_of_rows:
            self.warns_of_rows = not warn_of_folding(f, running.values())
        end = before_casts(get_gradient_edge(f))
        for layer in running.values():
            settle_edge(layer, end)
        class_dim = class_dim_of(self.options, f) if self.options.signals and not self.options.empirical else -1
        checked = self.checks_uses or (self.asks_reduction and (self.options.fused or shows_reduction(f, class_dim)))
        this = Pass(f.shape[0], running, self.options, self.due, checked, self.double, self.forms, self.products)
        self.waiting = True
        at_output = partial(self._differentiated, this, f.detach(), f._version, class_dim, end.output_nr)
        on_gradient(end, at_output)

    # In the user's backward pass.

    def _differentiated(self, this: Pass, f: Tensor, version: int, class_dim: int, number: int, errors: Tensor) -> None:
        """The derivative of the user's loss has arrived at the model's output."""
        if this.over:
            self.lost = True
            return
        errors, f, changed, ranks = errors.detach(), f.to(errors), f._version != version, in_ranks(self)
        outputs = [name for name, layer in this.layers.items() if layer.is_output]
        again = this.errors is not None  # one more backward pass through the same forward pass
        if self.passes and thrown_away(self.gradients):
            if again:
                self.passes.remove(this)
            self.forget(rewind=not again)
            if again:
                this.restart()
                self.passes.append(this)
        as_it_ends(self._note_gradients)
        weighs = this.checked and self.options.weighs_loss and f.ndim > 1 and not changed
        this.class_dim = self.class_dim
        if weighs and f.ndim > 2 and this.class_dim is None:
            this.class_dim = classes_at(f, precise(errors))
        class_dim = class_dim if this.class_dim is None else this.class_dim
        this.add_errors(errors, class_dim)
        if weighs and this.errors is not None:
            add_scale(this, f, class_dim)
        if again:
            for name in outputs:
                reached(self, this, name, errors)
            return
        self.passes.append(this)
        if self._generator_before is None and self.options.signals and not self.options.empirical:
            self._generator_before = self.generator.get_state()
        edges = {name: layer.edge for name, layer in this.layers.items() if layer.edge is not None}
        with torch.autocast(f.device.type, enabled=False):  # statistics keep their precision
            if this.due and self.options.own_passes:
                if changed:
                    raise RuntimeError("the model's output was changed in place before its backward pass; use a copy")
                root = GradientEdge(torch._C._current_autograd_node(), number)
                kept = nullcontext() if ranks is None else weights_kept(self.model)
                with stage("mukron::fisher"), kept:  # first: a backward pass takes much memory
                    if self.options.jacobian:
                        add_jacobians(this, f, root, edges, outputs)
                    else:
                        send_signals(this, f, root, edges, outputs, class_dim, self.generator, ranks)
            for name in this.layers if self.options.inputs or self.options.fused or not this.due else ():
                if this.checked:
                    add_probe(this.layers[name])
                this.add_inputs(name)
        for name in outputs:
            this.add_delta(name, errors)
        for name, edge in edges.items():
            this.layers[name].edge = None  # whatever hears of the pass at an edge must not own that edge
            if this.wants_delta(name):
                on_gradient(edge, partial(reached, self, this, name))
        advance(self)

    def _note_gradients(self) -> None:
        """Note which gradients there are: if they are thrown away, so are the passes."""
        found = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self.gradients = [Noted(p, TensorWeakRef(G), G._version, None if G._base is None else G) for p, G in found]


def settle_edge(this: LayerPass, end: GradientEdge) -> None:
    """Once the forward pass is over: the pass waits at ``end``, and must not own it or what comes after it."""
    edge, behind, this.behind = this.edge, this.behind, None
    if edge is None:
        return
    if (source := before_casts(edge)).node is end.node:  # fully_shard may cast what a layer returns
        edge = source
    if edge.node is end.node:
        this.is_output, this.edge = edge.output_nr == end.output_nr, None
    else:
        this.edge = behind or edge
        if this.edge.node._sequence_nr() > end.node._sequence_nr():
            this.edge = None


def before_casts(edge: GradientEdge) -> GradientEdge:
    """The place that leads here through casts alone, which a loss inside the model may not have gone through."""
    node, number = edge.node, edge.output_nr
    while node.name() == "ToCopyBackward0" and (source := node.next_functions[0][0]) and source.next_functions:
        node, number = source, node.next_functions[0][1]
    return edge if node is edge.node else GradientEdge(node, number)


def on_gradient(edge: GradientEdge, then: Callable[[Tensor], None]) -> None:
    """Call ``then`` with the derivative that arrives at that edge in the user's backward passes."""
    number = edge.output_nr  # the edge itself would keep its own graph alive

    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None and not OwnPasses.running:
            then(gradient)

    edge.node.register_prehook(arrived)


def reached(capture: Capture, this: Pass, name: str, delta: Tensor) -> None:
    """The derivative of the user's loss has arrived at a layer's output."""
    this.add_delta(name, delta)
    advance(capture)


def advance(capture: Capture) -> None:
    """Something was measured: perhaps it can be sent."""
    if capture.ahead is not None and capture.passes:
        capture.ahead.advance(capture.passes)


def in_ranks(capture: Capture) -> Ranks | None:
    """The processes that train the model together; None: there is one."""
    return capture.ranks() if distributed.is_available() and distributed.is_initialized() else None


def as_it_ends(call: Callable[[], None]) -> None:
    """Call something as this backward pass ends, after what averages gradients then."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(partial(engine.queue_callback, call))


def in_transform() -> bool:
    """Whether ``torch.func`` transforms what runs: its tensors mean nothing outside, and have no gradients there."""
    return torch._C._functorch.maybe_current_level() is not None


def output_of(options: CaptureOptions, returned: Any) -> Tensor:
    """The network's output, in what the model returned."""
    f = options.output(returned) if options.output is not None else returned
    if not isinstance(f, Tensor) or f.ndim == 0:
        raise no_output(f, returned, options.output is not None)
    return f


def class_dim_of(options: CaptureOptions, f: Tensor) -> int:
    """Where the classes are in the output f."""
    class_dim, categorical = options.class_dim, options.likelihood == "categorical"
    fits = f.ndim == 2 or not categorical if class_dim is None else f.ndim > max(class_dim, 1)
    if not fits or (categorical and f.shape[1:] == (1,)):
        raise no_classes(options, f)
    return -1 if class_dim is None else class_dim


def remove(handles: list[Any], watches: list[Watch]) -> None:
    for handle in handles:
        handle.remove()
    end_watches(watches)
