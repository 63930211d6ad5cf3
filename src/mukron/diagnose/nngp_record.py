"""How close a network's outputs are to kernel regression, and the record of how they approach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mukron.notebook import Shown
from mukron.table import Table
from mukron.typed import read_as


class Agreement(NamedTuple):
    """How close outputs f are to a solution f*.

    Attributes:
        correlation: The correlation over all numbers of both; 0 if one of them is constant, as before the first step.
        distance: |f - f*| / |f*|.
        size: |f| / |f*|. At a correlation of 1 it is the part of the way that is done.

    Example:
        >>> from mukron.diagnose import Agreement
        >>> Agreement(correlation=1.0, distance=0.5, size=0.5).distance
        0.5
    """

    correlation: float
    distance: float
    size: float


def agreement(outputs: Tensor, solution: Tensor) -> Agreement:
    """Compare outputs with a solution.

    Args:
        outputs: The outputs of a network.
        solution: The solution, of the same shape.

    Returns:
        The correlation and the distance between them, and the ratio of their sizes.

    Raises:
        ValueError: The shapes differ, or the solution is zero everywhere.

    Example:
        >>> import torch
        >>> from mukron.diagnose import agreement
        >>> agreement(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])).size
        0.5
    """
    if outputs.shape != solution.shape:
        raise ValueError(f"outputs are {list(outputs.shape)}, the solution is {list(solution.shape)}")
    f, f_star = outputs.detach().double().flatten(), solution.detach().double().flatten()
    norm = float(f_star.norm())
    if not norm:
        raise ValueError("the solution is zero everywhere: nothing is near it or far from it")
    a, b = f - f.mean(), f_star - f_star.mean()
    norms = float(a.norm() * b.norm())
    return Agreement(
        correlation=float(a @ b) / norms if norms else 0.0,
        distance=float((f - f_star).norm()) / norm,
        size=float(f.norm()) / norm,
    )


class ApproachStep(NamedTuple):
    """The state of a run after a number of steps.

    Attributes:
        step: The number of steps.
        loss: The loss.
        correlation: The correlation of the outputs' change with the solution.
        distance: The distance from the solution, relative to its size.
        size: The size of the outputs' change, relative to that of the solution.

    Example:
        >>> from mukron.diagnose import ApproachStep
        >>> ApproachStep(step=1, loss=0.1, correlation=1.0, distance=0.0, size=1.0).step
        1
    """

    step: int
    loss: float
    correlation: float
    distance: float
    size: float


@dataclass(frozen=True, repr=False)
class Approach(Shown):
    """How a network's outputs approach kernel regression on its initial features, step by step.

    Attributes:
        rows: The states of the run; the first is the one before any step.
        ridge: The ridge of the regression.
        trouble: Why the run ended early; empty if it did not.

    Example:
        >>> from mukron.diagnose import Approach, ApproachStep
        >>> run = Approach((ApproachStep(0, 0.5, 0.0, 1.0, 0.0), ApproachStep(1, 0.1, 1.0, 0.0, 1.0)), ridge=0.1)
        >>> run.rows[-1].correlation
        1.0
    """

    rows: tuple[ApproachStep, ...]
    ridge: float
    trouble: str = ""

    def table(self) -> Table:
        """Tabulate the run, with one row per step."""
        cells = tuple((str(step), *(f"{number:.4g}" for number in numbers)) for step, *numbers in self.rows)
        notes = (
            f"f: change of the outputs; f*: kernel regression on the first features, ridge {self.ridge:.4g}",
            "correlation: of f and f*; distance: |f - f*| / |f*|; size: |f| / |f*|",
            *([self.trouble] if self.trouble else []),
        )
        return Table("Towards kernel regression", ApproachStep._fields, cells, notes)

    def _summary(self) -> list[str]:
        first, last = self.rows[0], self.rows[-1]
        steps = f"{last.step} steps, loss {first.loss:.4g} to {last.loss:.4g}"
        found = f"correlation with the solution {last.correlation:.4f}, distance {last.distance:.4g}"
        return ["Towards kernel regression", f"{steps}; {found}", *([self.trouble] if self.trouble else [])]

    def _tables(self) -> list[Table]:
        return [self.table()]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data for JSON."""
        return {"ridge": self.ridge, "trouble": self.trouble, "rows": [row._asdict() for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Approach:
        """Restore a run from plain data.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The run.
        """
        run: Approach = read_as(cls, data, "run")
        if not run.rows:
            raise ValueError("run: there are no rows")
        return run
