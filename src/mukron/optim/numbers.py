"""What a step asks of its numbers: are they finite, how long are they, is one a multiple of the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor


def proportion(ours: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The factor that takes ours to the actual one, and what is missing then; at any size, even where squares are 0."""
    tiny = torch.finfo(actual.dtype).tiny
    ours_size, actual_size = (x.abs().amax().clamp_min(tiny) for x in (ours, actual))
    a, b = ours / ours_size, actual / actual_size
    factor = (a * b).sum() / a.square().sum().clamp_min(tiny)
    return factor * actual_size / ours_size, (b - factor * a).norm() / b.norm().clamp_min(tiny)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each, in float32 at least: a half-precision norm overflows where its entries do not."""
    found: list[Tensor] = []
    for kind in {tensor.dtype for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == kind]
        half = kind in (torch.float16, torch.bfloat16)
        found += torch._foreach_norm([tensor.float() for tensor in alike] if half else alike)
    return found


def all_finite(*groups: Sequence[Tensor]) -> list[bool]:
    """Whether all numbers of each group are, with one look at the device."""
    numbers = [number if number.ndim == 1 else number.reshape(-1) for group in groups for number in group]
    if not numbers:
        return [True] * len(groups)
    if len({number.dtype for number in numbers}) > 1:
        numbers = [number.double() for number in numbers]
    finite = map(math.isfinite, torch.cat(numbers).tolist())
    sizes = [sum(number.numel() for number in group) for group in groups]
    return [all(list(islice(finite, size))) for size in sizes]
