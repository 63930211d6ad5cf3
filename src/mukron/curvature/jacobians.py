"""Jacobians for Gauss-Newton: the derivative of every output of the network by every layer's weight.

A layer's Jacobian is held as its inputs H and as the derivatives of all outputs by the layer's output, one backward
pass per output. Both are rows by sample and position, and the weight's part of an output is the sum of signals
inputs^T over positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mukron.curvature.fisher import own_backward
from mukron.curvature.passes import Pass, precise
from mukron.curvature.stacking import Jacobian
from mukron.curvature.uses import add_probe


def add_jacobians(
    this: Pass, f: Tensor, root: GradientEdge, edges: Mapping[str, GradientEdge], outputs: Sequence[str]
) -> None:
    """Every output's derivative by every layer, one backward pass per output."""
    deltas: dict[str, list[Tensor]] = {name: [] for name in this.layers}
    for output in range(f[0].numel()):
        v = torch.zeros_like(f).reshape(len(f), -1)
        v[:, output] = 1
        v = v.reshape(f.shape)
        arrived = dict(zip(edges, own_backward(root, edges.values(), v) if edges else (), strict=True))
        for name, delta in {**arrived, **dict.fromkeys(outputs, v)}.items():
            if delta is not None:
                deltas[name].append(delta)
    for name, signals in deltas.items():
        if signals:
            _add_jacobian(this, name, signals)


def _add_jacobian(this: Pass, name: str, deltas: list[Tensor]) -> None:
    """Every output's derivative by a layer's output."""
    layer, x = (use := this.layers[name]).layer, use.input
    assert x is not None and this.errors is not None  # noqa: PT018
    if this.checked:
        add_probe(use)
    signals = [this.unfolded(precise(layer.signals(use.derivative(delta)))) for delta in deltas]
    H = layer.inputs(x)
    if layer.one_hot:
        H = torch.nn.functional.one_hot(H, layer.d_in).to(signals[0].dtype)
    H, use.input = this.unfolded(precise(H)), None
    counts = None if this.ignored is None else this.ignored.of_outputs()
    use.statistics.jacobians = [Jacobian(H, torch.stack(signals, dim=2), this.errors, counts)]
    use.statistics.samples, use.statistics.rows = this.samples, H.shape[1] * H.shape[2]
