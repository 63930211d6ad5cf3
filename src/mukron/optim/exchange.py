"""Where processes talk: the one place for what ranks reduce, gather, own and agree on.

In one process there is nobody to talk to, and an optimizer's ``exchange`` is None. The step asks it at four points:

    gather   after the passes: statistics of all ranks' batches in place of this rank's own
    owns     before inverses are made: whether this rank makes those of a layer
    share    after that: operators that other ranks made
    agree    before the step counts: the same decision on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mukron.curvature import LayerStatistics
from mukron.linalg import Operator


class Exchange(Protocol):
    """What several processes that train one model do together."""

    def gather(self, statistics: Mapping[str, LayerStatistics]) -> dict[str, LayerStatistics]:
        """The statistics of all ranks' batches, by layer."""

    def owns(self, layer: str) -> bool:
        """Whether this rank prepares the operators of a layer."""

    def share(self, operators: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, dict[str, Operator]]]:
        """The operators of every layer, each from the rank that owns it."""

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """The same numbers on every rank, not finite if one rank's are not: all ranks take a step, or none does."""
