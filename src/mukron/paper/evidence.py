"""The results of a recipe's parts, which claims are checked and figures drawn from."""

from __future__ import annotations

from typing import Any, TypeVar

from mukron.diagnose.check import Check
from mukron.paper.errors import ReproductionError
from mukron.study.record import StudyRecord

T = TypeVar("T")


class Evidence(dict[str, Any]):
    """The results of a recipe's parts, by their names.

    Example:
        >>> Evidence().study("MLP")
        Traceback (most recent call last):
            ...
        mukron.paper.errors.ReproductionError: evidence 'MLP': expected a StudyRecord, found NoneType
    """

    @property
    def seconds(self) -> float:
        """The time that runs and checks took; checks of earlier versions did not record it."""
        runs = sum(run.seconds for part in self.values() if isinstance(part, StudyRecord) for run in part.results)
        checks = [part.record.about for part in self.values() if isinstance(part, Check)]
        return float(runs + sum(about.get("seconds", 0.0) for about in checks))

    @property
    def minutes(self) -> float:
        """The same as results store it, in tenths of a minute."""
        return round(self.seconds / 60, 1)

    def study(self, part: str) -> StudyRecord:
        """Returns the record of a study.

        Args:
            part: The part's name.

        Returns:
            The record.

        Raises:
            ReproductionError: If there is no such part, or it is not a study.
        """
        return self._of(part, StudyRecord)

    def check(self, part: str) -> Check:
        """Returns the result of a coordinate check.

        Args:
            part: The part's name.

        Returns:
            The result.

        Raises:
            ReproductionError: If there is no such part, or it is not a coordinate check.
        """
        return self._of(part, Check)

    def _of(self, part: str, kind: type[T]) -> T:
        result = self.get(part)
        if not isinstance(result, kind):
            raise ReproductionError(f"evidence {part!r}: expected a {kind.__name__}, found {type(result).__name__}")
        return result
