"""Random numbers that do not depend on how a batch is split: one call draws what several in turn do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def fill(noise: Tensor, generators: Sequence[Generator], kind: str, share: tuple[int, int] | None = None) -> Tensor:
    """The tensor [networks, ...], filled with random numbers of a kind, each network's by its own generator.

    kind: "signs", "normal" or "exponential".
    share: those of all parts of a batch are drawn, in one call as one process does, and this part's are taken.
    """
    if share is not None:
        begin, total = share
        whole = fill(noise.new_empty(1, total), generators, kind)
        return whole[0, begin : begin + noise.numel()].reshape(noise.shape)
    for part, generator in zip(noise, generators, strict=True):
        if generator.device.type == "cpu":
            _draw_in_order(part, generator, kind)
        elif kind == "signs":
            part.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        elif kind == "normal":
            part.normal_(generator=generator)
        else:
            part.exponential_(generator=generator)
    return noise


def _draw_in_order(part: Tensor, generator: Generator, kind: str) -> None:
    """From uniform numbers u, one for each entry: those of a call follow those of the last.

    ``bernoulli_`` and ``exponential_`` begin another stream in each call where torch was built with MKL, and
    ``normal_`` draws numbers in groups of 16.
    """
    u = torch.rand(part.shape, generator=generator, dtype=torch.float64)
    if kind == "signs":
        part.copy_(u < 0.5).mul_(2).sub_(1)
    elif kind == "normal":
        part.copy_(torch.special.ndtri(u.clamp_min_(2.0**-54)))
    else:
        part.copy_(-torch.log1p(-u))
