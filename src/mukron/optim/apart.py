"""Processes that differ: what every step compares, and what to do about it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from mukron.params.sharded import is_sharded

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

SAME_SIZE = 1e-4  # of a gradient, relatively: what averaged it may have put it elsewhere in memory
NAMED = 3  # parameters in an error
SETTINGS_IN_WORDS = {"lr": "learning rates", "fallback_lr": "learning rates", "weight_decay": "weight decays"}


class Alike(NamedTuple):
    """What ranks tell each other of a step that must be alike on all of them.

    Attributes:
        settings: Of all groups, in the order of groups: their numbers and texts.
        trained: A digest of which parameters are trained.
        gradients: The sum of the sizes of each gradient's entries, by parameter; None: they are not averages yet, or
            spread.
    """

    settings: tuple[dict[str, float | str | None], ...] = ()
    trained: int = 0
    gradients: tuple[float, ...] | None = None

    @staticmethod
    def of(optimizer: SecondOrder, gradients: Sequence[float] | None) -> Alike:
        """That of a rank.

        Args:
            optimizer: The optimizer.
            gradients: The sums of the sizes of their entries, of those that there are; None: they are not compared.
        """
        settings = tuple(
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if value is None or isinstance(value, (int, float, str)) or _is_number(value)
            }
            for group in optimizer.param_groups
        )
        parameters = [entry.parameter for entry in optimizer.entries.values()]
        trained = zlib.crc32(bytes(parameter.requires_grad for parameter in parameters))
        if gradients is None:
            return Alike(settings, trained)
        sizes = iter(gradients)
        return Alike(settings, trained, tuple(0.0 if p.grad is None else next(sizes, 0.0) for p in parameters))


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def refuse_apart(optimizer: SecondOrder, told: Sequence[Alike]) -> None:
    """Refuse a step whose settings or gradients differ.

    Args:
        optimizer: The optimizer.
        told: By every rank.

    Raises:
        RuntimeError: They do. All of them are told.
    """
    apart, values = [], ""
    if names := _gradients_apart(optimizer, told):
        apart.append("gradients")
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        values = f" (of {', '.join(names[:NAMED])}{more})"
    if len({len(one.settings) for one in told}) > 1:
        apart.append("numbers of parameter groups")
    for number, groups in enumerate(zip(*(one.settings for one in told), strict=False)):
        for key in {key: None for group in groups for key in group}:
            found = [group.get(key) for group in groups]
            if len(set(found)) > 1 and not all(value != value for value in found):
                word = SETTINGS_IN_WORDS.get(key, f'settings "{key}"')
                apart += [word] if word not in apart else []
                values = values or f" (in group {number}: {', '.join(map(str, found))})"
    if len({one.trained for one in told}) > 1:
        apart.append("parameters that are trained (requires_grad)")
    if apart:
        what = " and ".join(apart)
        raise RuntimeError(f"the {what} of {len(told)} processes differ{values}. {remedy(optimizer, apart)}")


def _gradients_apart(optimizer: SecondOrder, told: Sequence[Alike]) -> list[str]:
    """Parameters whose gradients differ in size, in quotes. Each is compared by itself: a small one counts, too."""
    sizes = [one.gradients for one in told if one.gradients is not None]
    if len(sizes) < len(told):
        return []
    return [
        f'"{name}"'
        for name, of in zip(optimizer.entries, zip(*sizes, strict=False), strict=False)
        if all(map(math.isfinite, of)) and max(of) - min(of) > SAME_SIZE * max(of)
    ]


def remedy(optimizer: SecondOrder, apart: Sequence[str]) -> str:
    """What to do where processes differ.

    Args:
        optimizer: The optimizer.
        apart: What differs, in words.
    """
    alike = [name for name in apart if name != "gradients"]
    same = (
        f"Give all of them the same {' and '.join(alike)}: one seed for the initial weights, one schedule, and a "
        "checkpoint that all of them load"
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
            "before a step must be outside of no_sync. It averages the gradients of what was trained when it was made: "
            "wrap the model again after parameters were frozen or unfrozen"
        )
    else:
        way = (
            "Call the model through DistributedDataParallel (its last backward pass before a step outside of no_sync), "
            f"average gradients by all_reduce before the step, or let {type(optimizer).__name__} do it: "
            "process_group=torch.distributed.group.WORLD"
        )
    return f"{way}. {same}" if alike else way
