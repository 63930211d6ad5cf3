"""Outputs of layers that are views: where the derivative by what was computed arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from mukron.curvature.passes import LayerPass


def note_view(this: LayerPass, output: Tensor, computed: Tensor) -> None:
    """Note where the derivative by what a layer computed arrives, of which its output is a view.

    That of a Linear layer with a bias is one, for inputs with positions. What is changed in place behind a view gets a
    new place, and the view's own is off the way; the place of what was computed stays on it.
    """
    if computed.grad_fn is None or computed.numel() != output.numel():
        return
    if computed.is_contiguous() and output.is_contiguous():
        this.behind = get_gradient_edge(computed)
        this.of_output = partial(_in_shape, output.shape, this.of_output)


def _in_shape(shape: tuple[int, ...], then: Callable[[Tensor], Tensor] | None, delta: Tensor) -> Tensor:
    delta = delta.reshape(shape)
    return delta if then is None else then(delta)
