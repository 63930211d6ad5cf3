"""The order of samples: another one in every epoch, the same in every process."""

from __future__ import annotations

import torch
from torch import Tensor

from mukron.train.randomness import ORDER, seed_for


def batches(samples: int, batch: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the sample indices of an epoch's batches, shuffled by seed and epoch; an incomplete batch is dropped."""
    if samples == batch:
        return [torch.arange(samples)]
    generator = torch.Generator().manual_seed(seed_for(seed, ORDER, epoch))
    order = torch.randperm(samples, generator=generator)
    return list(torch.split(order, batch)[: samples // batch])
