"""How a factor is inverted, as a value: the type is the choice, its fields are that choice's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Solver:
    """Base of all solvers.

    Example:
        >>> Solver.of("tracked:0.05", (Eigh, Tracked))
        Tracked(tolerance=0.05)
    """

    names: ClassVar[dict[str, type[Solver]]] = {}

    def __init_subclass__(cls) -> None:
        Solver.names[cls.__name__.lower()] = cls

    @staticmethod
    def of(solver: Solver | str, allowed: tuple[type[Solver], ...]) -> Solver:
        """A solver from its value or its name, "eigh" or "tracked:0.05", if it is one of those allowed.

        Args:
            solver: The solver or its name.
            allowed: The solvers that the method can use.
        """
        if isinstance(solver, Solver):
            if isinstance(solver, allowed):
                return solver
            name = type(solver).__name__.lower()
        else:
            name, _, number = str(solver).strip().lower().partition(":")
            kind = Solver.names.get(name)
            if kind in allowed and not (number and kind is not Tracked):
                return kind(float(number)) if number else kind()  # type: ignore[call-arg]
        known = ", ".join(repr(kind.__name__.lower()) for kind in allowed)
        raise ValueError(f"unknown solver {name!r}; known: {known}")


@dataclass(frozen=True)
class Cholesky(Solver):
    """Inverses by Cholesky factorization; in sample space where the batch is smaller than the layer.

    Example:
        >>> Cholesky()
        Cholesky()
    """


@dataclass(frozen=True)
class Eigh(Solver):
    """Inverses and roots by eigendecomposition.

    Example:
        >>> Eigh()
        Eigh()
    """


@dataclass(frozen=True)
class Newton(Solver):
    """Inverses and roots by a Newton iteration of matrix products, accurate to 1 percent or refused.

    Example:
        >>> Newton()
        Newton()
    """


@dataclass(frozen=True)
class QR(Solver):
    """Eigenbases by one round of orthogonal iteration, begun with the last basis; the first one by eigendecomposition.

    Example:
        >>> QR()
        QR()
    """


@dataclass(frozen=True)
class Tracked(Solver):
    """Roots in an eigenbasis that is kept from step to step and renewed when its error would exceed the tolerance.

    Attributes:
        tolerance: Relative error of a root in the worst direction seen. Most steps stay far below it.

    Example:
        >>> Tracked(tolerance=0.05)
        Tracked(tolerance=0.05)
    """

    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")
