"""Targets whose mean of v v^T is the Fisher matrix itself: every class at every position of the output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def exact_targets(f: Tensor, likelihood: str, class_dim: int) -> Iterator[Tensor]:
    """Every class at every position of the output: positions are independent, so each has its turn alone."""
    if f.ndim == 1:
        f = f.unsqueeze(1)
        yield torch.ones_like(f).squeeze(1)  # one number a sample: gaussian
        return
    shape = f.movedim(class_dim, -1).shape  # [samples, *positions, classes]
    classes, positions = shape[-1], shape[1:-1].numel()
    p = f.softmax(class_dim).movedim(class_dim, -1).reshape(shape[0], positions, classes)
    for position in range(positions):
        for c in range(classes):
            v = torch.zeros_like(p)
            v[:, position, c] = 1
            if likelihood == "categorical":
                v[:, position] -= p[:, position]
                v[:, position] *= p[:, position, c, None].sqrt()
            yield v.reshape(shape).movedim(-1, class_dim)
