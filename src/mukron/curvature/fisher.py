"""Fisher targets: which derivatives of the network's output the factor B is made of.

For an output f with log-likelihood log p(y | f), one sample's Fisher matrix is E[v v^T] over v = d log p / d f:

    categorical, p = softmax(f)      mc: one-hot(y) - p, y drawn from p     exact: sqrt(p_c) (one-hot(c) - p), every c
    gaussian, unit variance          mc: a standard normal vector           exact: one-hot(c), every c

A backward pass from v gives every layer's delta. All are of the *summed* log-likelihood: one sample's delta does not
know how many samples there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

FISHERS = ("mc", "exact", "empirical")
LIKELIHOODS = ("categorical", "gaussian")


def targets(f: Tensor, fisher: str, likelihood: str, class_dim: int, generator: Generator) -> Iterator[Tensor]:
    """The vectors v, each of f's shape. Exact ones come one a class and, beyond that, one a position of the output."""
    f = f.detach()
    if fisher == "exact":
        yield from _exact(f, likelihood, class_dim)
    elif likelihood == "gaussian":
        yield torch.randn(f.shape, generator=generator, device=generator.device).to(f)
    else:
        classes_last = f.movedim(class_dim, -1)
        flat = classes_last.reshape(1, -1, classes_last.shape[-1])
        yield drawn_targets(flat, likelihood, [generator]).reshape(classes_last.shape).movedim(-1, class_dim)


def drawn_targets(f: Tensor, likelihood: str, generators: Sequence[Generator]) -> Tensor:
    """The vectors "mc" of many networks' outputs f [networks, samples, classes], each drawn by its own generator.

    A class y is drawn as the largest of p / q with q exponential, as ``torch.multinomial`` does it, which would wait
    for the device. Outputs that are not finite give signals that are not: the step sees them and is skipped.
    """
    f = f.detach()
    if likelihood == "gaussian":
        noise = torch.empty(f.shape, device=generators[0].device)
        for own, generator in zip(noise, generators, strict=True):
            own.normal_(generator=generator)
        return noise.to(f)
    p = (f if f.dtype == torch.float64 else f.float()).softmax(-1)
    noise = torch.empty_like(p, device=generators[0].device)
    for own, generator in zip(noise, generators, strict=True):
        own.exponential_(generator=generator)
    y = (p.nan_to_num(1.0) / noise.to(p.device)).argmax(-1)
    return (torch.nn.functional.one_hot(y, p.shape[-1]) - p).to(f)


def _exact(f: Tensor, likelihood: str, class_dim: int) -> Iterator[Tensor]:
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
