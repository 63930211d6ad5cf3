"""Where processes talk: the one place for what ranks reduce, gather, own and agree on.

In one process there is nobody to talk to, and an optimizer's ``exchange`` is None. The step asks it at these points:

    gather   after the passes: statistics of all ranks' batches in place of this rank's own
    owns     before inverses are made: whether this rank makes those of a layer
    share    after that: operators that other ranks made
    union    if inverses failed: which ones did on any rank
    agree    before the step counts: the same decision on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mukron.curvature import Joint, Pass, Ranks, along, gather, joined
from mukron.linalg import Operator

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

T = TypeVar("T")


class Exchange(Protocol):
    """What several processes that train one model do together."""

    def gather(self, passes: Sequence[Pass]) -> Joint:
        """What the passes of all ranks have brought."""

    def owns(self, layer: str) -> bool:
        """Whether this rank prepares the operators of a layer."""

    def share(self, operators: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, dict[str, Operator]]]:
        """The operators of every layer, each from the rank that owns it."""

    def union(self, keys: Sequence[T]) -> list[T]:
        """What any rank names."""

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """The same numbers on every rank, not finite if one rank's are not: all ranks take a step, or none does."""


class Together:
    """All ranks have the statistics of the joined batch, and each makes all operators."""

    def __init__(self, optimizer: SecondOrder, ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks

    def gather(self, passes: Sequence[Pass]) -> Joint:
        """What the passes of all ranks have brought; nothing travels in a step that uses none of it."""
        capture, names = self.optimizer.capture, list(self.optimizer.layers)
        options = capture.options
        wanted = capture.due or capture.double or capture.checks_uses or capture.asks_reduction
        if not (options.measures and wanted):
            return Joint(gather(list(passes)), passes, partial(along, passes))
        return joined(passes, names, self.ranks, options.empirical)

    def owns(self, layer: str) -> bool:
        """Every rank makes all operators."""
        return True

    def share(self, operators: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """The operators as they are: all ranks have made them."""
        return operators

    def union(self, keys: Sequence[T]) -> list[T]:
        """What any rank names."""
        return self.ranks.union(keys)

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """The first rank's numbers, not finite where any rank's are not."""
        return self.ranks.agreed(numbers)
