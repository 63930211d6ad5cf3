"""What a network's values show at the width at hand, measured over all processes where they hold shards.

Whatever is decided by these numbers is decided alike everywhere: values are gathered and measured as they would be
without sharding, and processes compare what they measured. All of that comes before anything is refused, so that no
process waits for one that has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import count

import torch
from torch import Tensor

from mukron.params.errors import ParametrizationError
from mukron.params.initial import Spread, distance, is_constant
from mukron.params.inventory import Found
from mukron.params.shapes import BaseShapes
from mukron.params.sharded import extremes, is_sharded, part_here, whole

ROUNDING = 1e-6  # by which measured numbers of the same values may differ between processes


@dataclass(frozen=True)
class InitialValues:
    """The values of one parameter.

    Attributes:
        numbers: How many there are.
        finite: Whether all are finite.
        constant: Whether all are equal.
        first: The first of them.
        largest: The largest size of one.
        std: The root mean square of their distance from the center that they have at the base width.
        rms: Their root mean square.
        memory: The place of the first parameter that shares their memory; its own place if none does.
    """

    numbers: int
    finite: bool
    constant: bool
    first: float
    largest: float
    std: float
    rms: float
    memory: int

    def distance(self, center: float) -> float:
        """The root mean square of their distance from zero, or from the center that they have at the base width."""
        return self.std if center else self.rms

    def drawn(self, base: Spread) -> Spread | None:
        """The spread at the base if the values are random; None for zeros, ones and other constants, which stay."""
        if base.std != 0:
            return base
        if base.numbers != 1 or base.center == 0 or self.constant == (self.numbers > 1):
            return None
        if self.numbers == 1 and self.first == base.center:
            return None
        return Spread(abs(base.center), 1)  # a single number that differs between the widths


@torch.no_grad()
def initial_values(found: Mapping[str, Found], shapes: BaseShapes) -> dict[str, InitialValues]:
    """Measure every parameter.

    Args:
        found: The parameters, which have values.
        shapes: The same at the base width.

    Raises:
        ParametrizationError: Processes hold different values.
    """
    measured, places = {}, dict[int, int]()
    for place, (name, entry) in zip(count(), found.items()):
        own = part_here(entry.parameter)
        memory = places.setdefault(own.data_ptr(), place) if own.numel() else place
        measured[name] = _measured(whole(entry.parameter), shapes.parameters[name].spread.center, memory)
    sharded = next((entry.parameter for entry in found.values() if is_sharded(entry.parameter)), None)
    return measured if sharded is None else _agreed(measured, sharded)


def refuse_unusable(values: Mapping[str, InitialValues]) -> None:
    """Refuse values that are not finite, and two parameters over the same numbers, which would be rescaled twice.

    Args:
        values: The values by parameter name. (Tied ones are one parameter.)
    """
    names = list(values)
    for place, (name, here) in zip(count(), values.items()):
        if here.memory != place:
            raise ParametrizationError(
                f'parameters "{names[here.memory]}" and "{name}" share their memory without being one parameter; '
                "tie them properly"
            )
    for name, here in values.items():
        if not here.finite:
            raise ParametrizationError(
                f'parameter "{name}": its values are not all finite; initialize it before it is parametrized '
                "(to_empty leaves it with whatever was in memory)"
            )


def refuse_not_initial(name: str, here: InitialValues, base: Spread) -> None:
    """Refuse values that the initializer of the base network cannot have drawn: they are not initial values.

    Args:
        name: The parameter's name.
        here: Its values.
        base: Its values at the base width.
    """
    if base.numbers == 1:
        return  # a single number may be random or constant
    constant = here.constant and here.numbers > 1
    if constant != (base.std == 0) and (constant or not here.constant):
        values, there = ("are all equal", "vary") if constant else ("vary", "are all equal")
        raise ParametrizationError(
            f'parameter "{name}": its values {values} here but {there} at the base width; these are not initial '
            "values of the same initializer. Call parametrize before load_state_dict and before training, and let the "
            "factory given to base_shapes do all of the initialization"
        )


def _measured(values: Tensor, center: float, memory: int) -> InitialValues:
    numbers = values.numel()
    if not numbers:
        return InitialValues(0, True, True, 0.0, 0.0, 0.0, 0.0, memory)
    rms = distance(values, 0.0)
    return InitialValues(
        numbers,
        finite=bool(values.isfinite().all()),
        constant=is_constant(values),
        first=float(values.flatten()[0]),
        largest=float(values.abs().max()),
        std=distance(values, center) if center else rms,
        rms=rms,
        memory=memory,
    )


def _agreed(measured: Mapping[str, InitialValues], sharded: Tensor) -> dict[str, InitialValues]:
    """The same numbers in every process that holds a sharded parameter."""
    rows = torch.tensor([astuple(here) for here in measured.values()], dtype=torch.float64).nan_to_num()
    low, high = extremes(rows, sharded)
    agreed = {}
    for (name, here), least, most in zip(measured.items(), low.tolist(), high.tolist(), strict=True):
        if any(b - a > ROUNDING * max(abs(a), abs(b)) for a, b in zip(least[:-1], most[:-1], strict=True)):
            raise ParametrizationError(
                f'parameter "{name}": processes that should hold the same values hold different ones; give all '
                "replicas the same initial values"
            )
        _, finite, constant, first, largest, std, rms, _ = most
        numbers = (bool(finite), bool(constant), first, largest, std, rms, int(least[-1]))
        agreed[name] = InitialValues(here.numbers, *numbers)
    return agreed
