"""The scale of a loss: how it reduces over samples and positions, found from its derivative at the model's output.

    n  samples that count        V  positions that count        T = V / n
    w  the weight of one position's log-likelihood in the loss
    s  = w n, the loss's curvature as a multiple of A (x) B, which is that of the sum over positions, mean over samples

    mean over samples    w = 1 / n    s = 1
    mean over positions  w = 1 / V    s = 1 / T
    sum                  w = 1        s = n

Cross-entropy at an output f has the derivative  e = w (p - onehot(y))  with p = softmax(f). The target's entry is the
only negative one. So y is the smallest entry's place, and  w = sum of |e| / sum of |p - onehot(y)|  over positions.

A factor that w has beside one of the three (a scaled loss, micro-batches that are not averaged) is no part of s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mukron.curvature.passes import Pass

OVER_SAMPLES, OVER_POSITIONS, AS_A_SUM = "mean over samples", "mean over positions", "sum"
ALIGNED = 0.8  # cosine between e and p - onehot(y), below which the loss is no cross-entropy of the output
AT_MOST = 2.0  # times too large or too small: within that a scale is taken for one of the three
NUMBERS_AT_ONCE = 2**24  # of the output's, in ``weigh``: a vocabulary makes it large


def weigh(f: Tensor, errors: Tensor, class_dim: int) -> Tensor:
    """Sums of |e|, of |d| and of e d / |d| with d = p - onehot(y); positions and samples that count.

    f: the model's output; errors: the loss's derivative by it.
    """
    classes = f.shape[class_dim]
    e, logits = (x.movedim(class_dim, -1).reshape(-1, classes) for x in (errors, f))
    tiny = torch.finfo(e.dtype).tiny
    size = e.abs().amax().clamp_min(tiny)  # of any size, even where squares are 0
    sums = torch.zeros(3, dtype=torch.float64, device=f.device)
    at_once = max(1, NUMBERS_AT_ONCE // classes)
    for start in range(0, len(e), at_once):
        part = e[start : start + at_once] / size
        d = logits[start : start + at_once].to(e.dtype).softmax(-1)
        d.scatter_add_(-1, part.argmin(-1, keepdim=True), -torch.ones_like(part[:, :1]))
        length = part.norm(dim=-1)
        d_length = d.norm(dim=-1) * (length > 0)
        along = (part * d).sum(-1) / d_length.clamp_min(tiny)
        sums += torch.stack([length.sum(), d_length.sum(), along.sum()])
    sums[0::2] *= size
    used = e.ne(0).any(-1).reshape(len(f), -1)
    return torch.cat([sums, torch.stack([used.sum(), used.any(1).sum()]).double()])


class LossScale(NamedTuple):
    """What the passes of a step show of the loss.

    Attributes:
        weight: Of one position's log-likelihood in the loss.
        samples: That count.
        positions: That count, in all samples together.
    """

    weight: float
    samples: float
    positions: float

    def reduction(self, known: Sequence[str] = (OVER_SAMPLES, OVER_POSITIONS, AS_A_SUM)) -> str | None:
        """Which of the known reductions has this scale, within a factor of two; None: none of them."""
        name = min(known, key=self.distance)
        return name if self.distance(name) <= math.log(AT_MOST) * (1 + 1e-6) else None

    def distance(self, reduction: str) -> float:
        """The size of the logarithm of this scale beside that of a reduction."""
        counts = {OVER_SAMPLES: self.samples, OVER_POSITIONS: self.positions, AS_A_SUM: 1.0}
        return abs(math.log(self.weight * counts[reduction]))

    @staticmethod
    def of(passes: Sequence[Pass]) -> LossScale | None:
        """None: it cannot be measured, or the loss is no cross-entropy of the output. A loss that depends on no output
        has the weight 0. It waits for the device.
        """
        sums = [one.weighed for one in passes if one.weighed is not None]
        if not sums or len(sums) < len(passes):
            return None
        e, d, along, positions, samples = torch.stack(sums).sum(0).tolist()
        if e == 0:
            return LossScale(0.0, samples, positions)
        if not (d > 0 and math.isfinite(e) and along >= ALIGNED * e):
            return None
        return LossScale(e / d, samples, positions)


def signal_scale(passes: Sequence[Pass], reduction: str, empirical: bool) -> float | Tensor:
    """What B's signals are multiplied by, so that A (x) B is the curvature of the user's loss.

    s^1/2 for signals of the summed log-likelihood. Derivatives of the loss itself (``empirical``) are divided by w
    before that; those of a pass with ignored samples come multiplied by the share of samples that count.
    """
    all_samples = float(sum(one.samples for one in passes))
    if reduction == OVER_SAMPLES:
        return all_samples if empirical else 1.0
    samples = sum([one.samples if one.ignored is None else one.ignored.used_samples.double() for one in passes])
    if reduction == AS_A_SUM:
        return all_samples / samples**0.5 if empirical else samples**0.5
    counted = [one.samples if one.ignored is None else one.ignored.weights.sum(dtype=torch.float64) for one in passes]
    root = (sum(counted) / samples) ** 0.5  # T^1/2
    return all_samples * root if empirical else 1 / root
