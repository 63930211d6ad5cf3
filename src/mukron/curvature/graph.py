"""Places in autograd's graph where derivatives arrive, in the user's backward passes and in our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Joined(torch.autograd.Function):
    """The tensor itself, made part of autograd's graph: what arrives there is heard of, and goes nowhere."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def listening_at(edges: Mapping[str, GradientEdge], then: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``then`` with the derivatives that arrive at those edges in backward passes of our own."""
    handles = []
    for name, edge in edges.items():

        def arrived(gradients: tuple[Tensor | None, ...], name: str = name, number: int = edge.output_nr) -> None:
            gradient = gradients[number]
            if gradient is not None:
                then(name, gradient)

        handles.append(edge.node.register_prehook(arrived))
    try:
        yield
    finally:
        remove(handles)


def own_backward(f: Tensor, edges: Iterable[GradientEdge], v: Tensor) -> tuple[Tensor | None, ...]:
    """A backward pass of our own, which nobody who waits for the user's may take for that."""
    global _own_passes  # noqa: PLW0603
    _own_passes += 1
    try:
        return torch.autograd.grad(f, list(edges), grad_outputs=v, retain_graph=True, allow_unused=True)
    finally:
        _own_passes -= 1


_own_passes = 0  # for the whole process: backward passes may run in threads of their own


def on_gradient(edge: GradientEdge, then: Callable[[Tensor], None]) -> None:
    """Call ``then`` with the derivative that arrives at that edge in the user's backward passes."""
    number = edge.output_nr  # the edge itself would keep its own graph alive

    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None and not _own_passes:
            then(gradient)

    edge.node.register_prehook(arrived)


def remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
