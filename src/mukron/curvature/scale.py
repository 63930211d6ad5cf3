"""The scale of a loss: how it reduces over samples and positions, found from its derivative at the model's output.

    n  samples that count        V  positions that count        T = V / n
    w  the weight of one position's log-likelihood in the loss
    s  = w n, that weight beside the 1 / n of a mean over samples

    mean over samples    w = 1 / n    s = 1
    mean over positions  w = 1 / V    s = 1 / T
    sum                  w = 1        s = n

The loss's curvature is  w sum over positions of (h h^T) (x) (delta delta^T), delta being the derivative of the summed
log-likelihood. B is the mean of delta delta^T, which knows neither n nor T. So w belongs to A, for methods with and
without a B:  A = w sum of h h^T,  s times the sum over positions and mean over samples that passes give. A batch of
longer sequences then has no larger A, and an average over batches of several lengths is one of like things.

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
from mukron.curvature.records import PassRecord
from mukron.linalg import total_count

OVER_SAMPLES, OVER_POSITIONS, AS_A_SUM = "mean over samples", "mean over positions", "sum"
SAID = {"mean": OVER_SAMPLES, "positions": OVER_POSITIONS, "sum": AS_A_SUM}  # by the user
ALIGNED = 0.8  # cosine between e and p - onehot(y), below which the loss is no cross-entropy of the output
SURELY_NOT_ZERO = 0.1  # of a sum, beside that of its terms' sizes
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
    def of(passes: Sequence[Pass | PassRecord]) -> LossScale | None:
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


def classes_at(f: Tensor, errors: Tensor) -> int | None:
    """Which dimension of an output with positions holds the classes, -1 or 1: where the loss is a cross-entropy.

    None: it is one of neither, or its derivative is zero or not finite. It waits for the device.
    """
    alignments = []
    for class_dim in (-1, 1):
        e, d, along, _, _ = weigh(f, errors, class_dim).tolist()
        alignments.append(along / e if 0 < e < math.inf and d > 0 else 0.0)
    best = max(alignments)
    return None if best < ALIGNED else -1 if alignments[0] == best else 1


def classes_elsewhere(errors: Tensor, class_dim: int) -> int | None:
    """The dimension that the derivative of a cross-entropy sums to zero over, if that is another one than was said.

    It waits for the device.
    """
    e = errors.double()
    sums = (
        torch.stack([e.sum(dim).abs().sum() for dim in range(1, e.ndim)]) / e.abs().sum().clamp_min(1e-300)
    ).tolist()
    parts = dict(enumerate(sums, start=1))
    best, said = min(parts, key=parts.__getitem__), class_dim % e.ndim
    return best if parts[said] > SURELY_NOT_ZERO and parts[best] < SURELY_NOT_ZERO / 20 else None


def add_scale(this: Pass, f: Tensor, class_dim: int) -> None:
    """Add to a pass what shows its loss's scale and, where the user said which dimension holds the classes, if it does.

    f: the model's output; the loss's derivative by it is the pass's.
    """
    assert this.errors is not None
    errors = this.errors.reshape(f.shape)
    this.weighed = weigh(f, errors, class_dim)
    if f.ndim > 2 and this.options.class_dim is not None:
        this.classes_elsewhere = classes_elsewhere(errors, class_dim)


def reduction_in_use(found: str | None, said: str | None) -> str:
    """The reduction that the loss showed; else what the user says; else a mean over samples."""
    return found or SAID.get(said or "", OVER_SAMPLES)


def inverse_weight(passes: Sequence[Pass | PassRecord], reduction: str) -> float | Tensor:
    """1 / w of these passes, which makes a derivative of the loss one of the summed log-likelihood."""
    if reduction == AS_A_SUM:
        return 1.0
    over_samples = reduction == OVER_SAMPLES
    return total_count([one.used_samples if over_samples else one.used_positions for one in passes])


def input_weight(passes: Sequence[Pass | PassRecord], reduction: str) -> float | Tensor:
    """s, which A is multiplied by."""
    if reduction == OVER_SAMPLES:
        return 1.0
    return inverse_weight(passes, OVER_SAMPLES) / inverse_weight(passes, reduction)
