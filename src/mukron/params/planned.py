"""Other people's optimizers with a plan that schedulers cannot undo: multipliers are applied at the step.

    between steps   every group shows the learning rate at the base width: schedulers, logs and ``defaults`` see it
    in a step       lr <- lr m, with m the group's ``lr_multiplier``, and back again, also if the step fails

So a scheduler may set learning rates, multiply them or compare them with ``defaults["lr"]``: ratios stay the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    BaseOptimizer = Optimizer
else:
    BaseOptimizer = object  # at run time the optimizer's own class comes after it

MULTIPLIER = "lr_multiplier"  # of a group; timm's schedulers apply one that is called lr_scale themselves


_made: dict[type[Optimizer], type[Optimizer]] = {}


class Planned(BaseOptimizer):
    """What is put before an optimizer's class; ``planned`` makes the class of both."""

    kind: ClassVar[type[Optimizer]]  # the optimizer's own class

    def step(self, *arguments: Any, **options: Any) -> Any:
        inner: Callable[..., Any] = self.kind.step
        if getattr(inner, "hooked", False):  # torch calls a step's hooks around each class's step: once is enough
            inner = cast(Any, inner).__wrapped__
        with _multiplied(self.param_groups):
            return inner(self, *arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose learning rate is multiplied by its ``lr_multiplier``; 1 if it says none."""
        param_group.setdefault(MULTIPLIER, 1.0)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was saved with the same multipliers; others are refused, and nothing is changed."""
        for number, (saved, here) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            if MULTIPLIER not in saved:
                name = self.kind.__name__
                raise ValueError(
                    f"group {number} of the saved state has no {MULTIPLIER}: it was not saved by an optimizer of "
                    "p.optimizer(...), and its learning rates may be multiplied already. Load it into the optimizer "
                    f"that saved it, as {name}(p.param_groups(...))"
                )
            if not math.isclose(saved[MULTIPLIER], here[MULTIPLIER], rel_tol=1e-9):
                raise ValueError(
                    f"group {number} of the saved state has the {MULTIPLIER} {saved[MULTIPLIER]:g}, and "
                    f"{here[MULTIPLIER]:g} here: it was saved at another width, or with other base shapes. Use the "
                    "same model, base shapes and method"
                )
        super().load_state_dict(state_dict)

    def __reduce__(self) -> Any:
        return _empty, (self.kind,), self.__getstate__()


def planned(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """The class of optimizers of that kind whose groups have multipliers.

    Args:
        kind: The optimizer's own class.
    """
    if kind not in _made:
        said = {"kind": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _made[kind] = type(f"Planned{kind.__name__}", (Planned, kind), said)
    return _made[kind]


def own_kind(optimizer: Optimizer) -> type[Optimizer]:
    """The class that the user chose.

    Args:
        optimizer: An optimizer, perhaps one with multipliers.
    """
    return optimizer.kind if isinstance(optimizer, Planned) else type(optimizer)


def _empty(kind: type[Optimizer]) -> Optimizer:
    """What a pickle fills."""
    planned(kind)
    return object.__new__(_made[kind])


@contextmanager
def _multiplied(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, the groups' learning rates are those of the step."""
    before: list[tuple[dict[str, Any], float | Tensor, float | Tensor]] = []
    try:
        for group in groups:
            lr = group["lr"]
            group["lr"] = lr * group[MULTIPLIER]
            before.append((group, lr, group["lr"]))
        yield
    finally:
        for group, lr, multiplied in before:
            if group["lr"] is multiplied:
                group["lr"] = lr
