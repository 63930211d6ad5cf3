"""Processes that differ: what every step compares, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from mukron.params.sharded import is_sharded

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

SAME_LENGTH = 1e-4  # of gradients, relatively: what averaged them may have put them elsewhere in memory


class Alike(NamedTuple):
    """What ranks tell each other of a step that must be alike on all of them.

    Attributes:
        rates: Learning rates of all groups.
        gradients: The sum of the gradients' lengths; None: they are not averages yet, or spread.
    """

    rates: tuple[float, ...] = ()
    gradients: float | None = None

    @staticmethod
    def of(optimizer: SecondOrder, gradients: float | None) -> Alike:
        """That of a rank.

        Args:
            optimizer: The optimizer.
            gradients: The sum of the gradients' lengths.
        """
        rates = [float(group[name] or 0) for group in optimizer.param_groups for name in ("lr", "fallback_lr")]
        return Alike(tuple(rates), gradients)


def refuse_apart(optimizer: SecondOrder, told: Sequence[Alike]) -> None:
    """Refuse a step whose learning rates or gradients differ.

    Args:
        optimizer: The optimizer.
        told: By every rank.

    Raises:
        RuntimeError: They do. All of them are told.
    """
    lengths = [one.gradients for one in told if one.gradients is not None and math.isfinite(one.gradients)]
    apart = []
    if len(lengths) == len(told) and max(lengths) - min(lengths) > SAME_LENGTH * max(lengths):
        apart.append("gradients")
    if len({one.rates for one in told}) > 1:
        apart.append("learning rates")
    if apart:
        what = " and ".join(apart)
        raise RuntimeError(f"the {what} of {len(told)} processes differ. {remedy(optimizer, apart)}")


def remedy(optimizer: SecondOrder, apart: Sequence[str]) -> str:
    """What to do where processes differ.

    Args:
        optimizer: The optimizer.
        apart: What differs, in words.
    """
    alike = [name for name in apart if name != "gradients"]
    same = (
        f"Give all of them the same {' and '.join(alike)}: one seed for the initial weights, one schedule of learning "
        "rates, and a checkpoint that all of them load"
    )
    if "gradients" not in apart:
        return same
    if any(map(is_sharded, optimizer.model.parameters())):
        way = (
            "fully_shard has not spread all parameters, and nobody averages the gradients of the others: call "
            "fully_shard(model) after its blocks, or average these gradients by all_reduce before the step"
        )
    elif isinstance(optimizer.model, nn.parallel.DistributedDataParallel):
        way = (
            "Call the wrapped model, the DistributedDataParallel, and not the one inside of it; its last backward pass "
            "before a step must be outside of no_sync"
        )
    else:
        way = (
            "Call the model through DistributedDataParallel (its last backward pass before a step outside of no_sync), "
            f"average gradients by all_reduce before the step, or let {type(optimizer).__name__} do it: "
            "process_group=torch.distributed.group.WORLD"
        )
    return f"{way}. {same}" if alike else way
