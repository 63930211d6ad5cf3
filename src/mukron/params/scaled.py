"""Whether a plan meets the weights that were scaled for it, or a second copy of the model, as its constructor left it.

A plan is plain data, so it may go with any copy: with loaded weights, with a ``deepcopy``, in another process. Only
where nothing has written into a copy since it was built, and its weights have the size that the others had before they
were scaled, was it forgotten to parametrize that copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.utils.weak import TensorWeakRef

from mukron.params.initial import distance
from mukron.params.inventory import Found
from mukron.params.sharded import is_sharded

CLEAR_FACTOR = 1.25  # what a weight was multiplied by, or divided; less cannot be seen in its size
ENOUGH_NUMBERS = 1000  # in a weight: its size is known to 2%
SAME_SIZE_AS_BUILT = 0.1  # relative difference of two weights that are drawn alike


@dataclass(frozen=True, eq=False)
class Scaled:
    """The weights that ``parametrize`` has scaled, as they were before.

    Attributes:
        parameters: The parameters themselves, weakly.
        versions: By name, how often each had been written into.
        sizes: By name, the root mean square of those that were scaled clearly.
    """

    parameters: tuple[TensorWeakRef, ...]
    versions: Mapping[str, int]
    sizes: Mapping[str, float]

    def forgotten_in(self, found: Mapping[str, Found]) -> bool:
        """Whether weights are those of another copy, as its constructor drew them, and not scaled.

        Args:
            found: The parameters of a model that is not marked as parametrized.
        """
        here = {name: entry.parameter for name, entry in found.items()}
        if any(known() is parameter for known in self.parameters for parameter in here.values()):
            return False
        if _versions(found) != self.versions:
            return False
        return all(
            abs(distance(here[name].detach(), 0.0) / size - 1) < SAME_SIZE_AS_BUILT for name, size in self.sizes.items()
        )


def before_scaling(found: Mapping[str, Found], sizes: Mapping[str, float]) -> Scaled | None:
    """What is remembered of weights that are about to be scaled; None: they could not be recognized later.

    Args:
        found: The parameters.
        sizes: By name, the root mean square of those that will be scaled clearly.
    """
    versions = _versions(found)
    if versions is None or not sizes:
        return None
    return Scaled(tuple(TensorWeakRef(entry.parameter) for entry in found.values()), versions, sizes)


def clearly_scaled(numbers: int, factor: float) -> bool:
    """Whether it shows in the size of a weight that it was multiplied.

    Args:
        numbers: How many it has.
        factor: What it was multiplied by; 0: it is zero now.
    """
    return numbers >= ENOUGH_NUMBERS and (factor <= 0 or abs(math.log(factor)) > math.log(CLEAR_FACTOR))


def _versions(found: Mapping[str, Found]) -> dict[str, int] | None:
    """How often each parameter was written into; None where torch does not count, or for parts of parameters."""
    parameters = {name: entry.parameter for name, entry in found.items()}
    if any(p.is_meta or p.is_inference() or is_sharded(p) for p in parameters.values()):
        return None
    return {name: parameter._version for name, parameter in parameters.items()}
