"""What shows whether a weight's gradient G is that of its layer's own passes: both do the same to a random vector v.

    G v = D^T (H v)     H  inputs as rows [groups, N, d_in]     D  the loss's derivatives as rows [groups, N, d_out]

H v is made with the inputs, and D^T (H v) as D arrives (``Pass.add_delta``). The step compares it with G v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mukron.curvature.frequencies import dtype_of
from mukron.curvature.passes import LayerPass, Pass, precise
from mukron.layers import MatrixLayer
from mukron.linalg import probe


def add_probe(use: LayerPass) -> None:
    """Make H v of a layer, while its input is there; maps with the same input have the same one."""
    if use.shares is not None and use.shares.probe is not None:
        use.probe = use.shares.probe
    elif use.probe is None and use.input is not None:
        use.probe = _probed(use.layer, use.input)


def _probed(layer: MatrixLayer, x: Tensor) -> Tensor:
    dtype = dtype_of(layer) if layer.one_hot else precise(x[:0]).dtype
    return layer.along(x if layer.one_hot else precise(x), probe(layer.d_in, dtype, x.device))


def along(passes: Sequence[Pass], name: str) -> Tensor | None:
    """D^T (H v) of a layer over all passes, [groups, d_out, 1]; None: it is not known."""
    known = [product for one in passes if (product := _along(one, name)) is not None]
    return torch.stack(known).sum(0) if known else None


def _along(this: Pass, name: str) -> Tensor | None:
    uses = [use for use in this.layers.values() if use.name == name]
    products: dict[int, Tensor] = {}
    for use in uses:
        if use.along is not None and not use.tied:  # whose gradient is that of both uses
            part = use.part or 0
            products[part] = use.along if part not in products else products[part] + use.along
    complete = bool(uses) and len(products) == uses[0].parts
    return torch.cat([products[part] for part in sorted(products)]) if complete else None


class Joined(torch.autograd.Function):
    """The tensor itself, made part of autograd's graph: what arrives there is heard of, and goes nowhere."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
