"""Places in autograd's graph where derivatives arrive: at a layer's output, at the model's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mukron.curvature.fisher import OwnPasses

if TYPE_CHECKING:
    from mukron.curvature.passes import LayerPass


def note_output(this: LayerPass, output: Tensor) -> None:
    """Note where the derivative by a layer's output arrives, as the output was when the layer returned it.

    An output may be a view of what the layer computed: that of a Linear layer with a bias is, for inputs with
    positions. What is changed in place behind a view gets a new place, and the view's own is off the way; the place of
    what was computed stays on it.
    """
    if not output.requires_grad:
        return
    this.edge = get_gradient_edge(output)
    computed = output._base
    if computed is None or computed.grad_fn is None or computed.numel() != output.numel():
        return
    if computed.is_contiguous() and output.is_contiguous():
        this.behind = get_gradient_edge(computed)
        this.of_output = partial(_in_shape, output.shape, this.of_output)


def _in_shape(shape: tuple[int, ...], then: Callable[[Tensor], Tensor] | None, delta: Tensor) -> Tensor:
    delta = delta.reshape(shape)
    return delta if then is None else then(delta)


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


def source_of(f: Tensor) -> GradientEdge:
    """Where derivatives by the output arrive: before casts, which a loss inside the model may not have gone through."""
    return before_casts(get_gradient_edge(f))


def before_casts(edge: GradientEdge) -> GradientEdge:
    """The place that what arrives at this one goes on to through casts alone."""
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
