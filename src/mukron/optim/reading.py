"""What a step reads from the device: norms of many tensors, and all numbers at one look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

HALF_PRECISION = (torch.float16, torch.bfloat16)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each, in float32 at least: a half-precision norm overflows where its entries do not."""
    precise = [tensor.float() if tensor.dtype in HALF_PRECISION else tensor for tensor in tensors]
    result = list(precise)
    for dtype in {tensor.dtype for tensor in precise}:
        places = [place for place, tensor in enumerate(precise) if tensor.dtype == dtype]
        for place, norm in zip(places, torch._foreach_norm([precise[place] for place in places]), strict=True):
            result[place] = norm
    return result


def read(groups: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """The numbers of each group, with one look at the device."""
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for number in (number for group in groups for number in group):
        alike.setdefault((number.dtype, number.ndim), []).append(number)
    if not alike:
        return [[] for _ in groups]
    parts = [torch.cat(same) if ndim else torch.stack(same) for (_, ndim), same in alike.items()]
    if len({part.dtype for part in parts}) > 1:
        parts = [part.double() for part in parts]
    values = iter(torch.cat(parts).tolist())
    of = {kind: iter([*islice(values, len(part))]) for kind, part in zip(alike, parts, strict=True)}
    return [[value for n in group for value in islice(of[n.dtype, n.ndim], n.numel())] for group in groups]
