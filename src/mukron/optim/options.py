"""Options of a step as values: the type is the choice. Bare numbers and strings are shorthands for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mukron.arguments import check_whole
from mukron.linalg import Cholesky, Solver
from mukron.memory import Batch, Memory
from mukron.optim.communication import Communication
from mukron.optim.momentum import GradientMomentum, HeavyBall, Momentum, check_momentum
from mukron.params.excluded import Excluded, check_form, without_types
from mukron.readers import whole
from mukron.theory import Method
from mukron.trust import (
    FALLBACKS,
    RMS,
    AdamStep,
    Graft,
    KLClip,
    SGDStep,
    Spectral,
    StepRule,
    Trust,
    step_rule,
    usual_exclude,
    usual_fallback,
)

__all__ = [
    "FALLBACKS",
    "RMS",
    "AdamStep",
    "Communication",
    "Excluded",
    "GradientMomentum",
    "Graft",
    "HeavyBall",
    "KLClip",
    "Memory",
    "Momentum",
    "SGDStep",
    "Solver",
    "Spectral",
    "StepOptions",
    "StepRule",
    "Trust",
    "check_momentum",
    "check_one_of",
    "step_rule",
    "usual_fallback_lr",
    "usual_interval",
]


@dataclass(frozen=True)
class StepOptions:
    """What is the same for all parameter groups.

    Attributes:
        memory: What factors remember.
        factor_every: Steps from one measurement of the factors to the next, counted from ``start``.
        inverse_every: Steps from one preparation of the inverses to the next, counted from ``start``.
        solver: How factors are inverted.
        refresh_warmup: Steps at the start, at each of which factors and inverses are made.
        start: The step from which on gradients are preconditioned; before it factors are measured.
        trust: The bound on a layer's move; None: no bound.
        fallback: The rule for parameters that are not preconditioned.
        exclude: Layers that are left to the fallback rule, by name, pattern or type. None: embeddings, and layers that
            use a tied embedding.
        leaves_tied: Whether layers that use a tied parameter are left to the fallback rule beside those of ``exclude``;
            otherwise they are refused. True if ``exclude`` is None.
        block: The largest side of a matrix with factors of its own; larger ones are cut into blocks. None: none are.
        split: By layer, how many matrices its weight stacks along its outputs, or how many rows each has: "rows:64".
        communication: How ranks that train together exchange the curvature of layers.
        seed: Of the drawn targets.

    Example:
        >>> StepOptions(factor_every=10, inverse_every=20).inverse_every
        20
    """

    memory: Memory = field(default_factory=Batch)
    factor_every: int = 1
    inverse_every: int = 1
    solver: Solver = field(default_factory=Cholesky)
    refresh_warmup: int = 0
    start: int = 0
    trust: Trust | None = None
    fallback: StepRule = field(default_factory=SGDStep)
    exclude: tuple[Excluded, ...] | None = ()
    leaves_tied: bool = False
    # not in its text, by which benchmarks tell whether a method still does what it did
    block: int | None = field(default=None, repr=False)
    split: Mapping[str, int | str] = field(default_factory=dict, repr=False)
    communication: Communication = field(default=Communication(), repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("factor_every", "inverse_every", "refresh_warmup", "start", "seed"):
            check_whole(name, getattr(self, name))
        for name in ("factor_every", "inverse_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts steps: at least 1, got {getattr(self, name)}")
        if self.inverse_every % self.factor_every:
            raise ValueError(
                f"inverse_every={self.inverse_every} must be a multiple of factor_every={self.factor_every}: an "
                "inverse is made when its factors are fresh"
            )
        for name in ("refresh_warmup", "start"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} counts steps: at least 0, got {getattr(self, name)}")
        self._check_cuts()
        object.__setattr__(self, "memory", Memory.of(self.memory))
        object.__setattr__(self, "communication", Communication.of(self.communication))
        object.__setattr__(self, "fallback", step_rule("fallback", self.fallback, FALLBACKS))
        check_form(self.exclude)
        object.__setattr__(self, "exclude", None if self.exclude is None else tuple(self.exclude))
        object.__setattr__(self, "leaves_tied", self.leaves_tied or self.exclude is None)

    def named(self, model: nn.Module) -> StepOptions:
        """The same with names instead of types in ``exclude``.

        Args:
            model: The model, which has modules of these types.
        """
        return replace(self, exclude=without_types(model, self.exclude))

    def _check_cuts(self) -> None:
        if not isinstance(self.split, Mapping):
            raise TypeError(f'split takes numbers by layer, as in split={{"attention.qkv": 3}}; got {self.split!r:.80}')
        numbers: dict[str, Any] = {"block": self.block}
        numbers |= {f"split[{name!r}]": parts for name, parts in self.split.items() if rows_of(parts) is None}
        for name, number in numbers.items():
            if number is not None:
                check_whole(name, number)
                if number < 1:
                    raise ValueError(f"{name} must be at least 1, got {number}")

    @classmethod
    def of(cls, method: Method, trust: Trust | None, **given: Any) -> StepOptions:
        """Options of which some may be None: those are the usual ones beside a bound, or the paper's without one.

        Args:
            method: The method.
            trust: The bound on a layer's move; None: the paper's plain step.
            given: The other options by name.
        """
        usual: dict[str, Any] = {"fallback": usual_fallback(method, trust), "exclude": usual_exclude(method, trust)}
        usual["leaves_tied"] = given.get("exclude") is None
        usual["refresh_warmup"] = 0 if trust is None else 10
        check_whole("factor_every", given.get("factor_every", 1))
        usual["inverse_every"] = usual_interval(trust is not None, max(given.get("factor_every", 1), 1))
        return cls(trust=trust, **{**usual, **{name: value for name, value in given.items() if value is not None}})


def usual_interval(bounded: bool, factor_every: int) -> int:
    """Steps between two inversions where none are given: with a bound about ten, a multiple of ``factor_every``."""
    return factor_every * (-(-10 // factor_every) if bounded else 1)


ADAMS_RATE = 0.005  # of Adam's steps, at a method's default learning rate


def usual_fallback_lr(method: Method, options: StepOptions, lr: float, default_lr: float) -> float | None:
    """The fallback rule's learning rate where none is given; None: that of the layers.

    Learning rates of different methods count in different units. Beside a trust that leaves a method its own, and
    beside Muon, Adam's is 0.005 at the method's default and in proportion to it at others.
    """
    units_of_method = not method.entrywise if options.trust is None else options.trust.rates != "adamw"
    own_units = units_of_method and (options.trust is not None or method.matrices_only)
    return ADAMS_RATE * lr / default_lr if own_units and isinstance(options.fallback, AdamStep) else None


def check_one_of(name: str, value: str | None, known: Iterable[str | None]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(map(repr, known))}")


def read_split(values: Any) -> dict[str, int | str]:
    """Read by name into how many parts something is cut: a number above 0, or the rows of each as ``"rows:64"``.

    Args:
        values: A mapping.

    Returns:
        Numbers and texts by name.

    Example:
        >>> read_split({"qkv": 3, "heads": "rows:64"})
        {'qkv': 3, 'heads': 'rows:64'}
    """
    if not isinstance(values, Mapping):
        raise TypeError('expected numbers by name, as in {"qkv": 3}')
    return {str(name): part if rows_of(part) else whole(1)(part) for name, part in values.items()}


def rows_of(part: Any) -> int | None:
    """The number in ``"rows:64"``; None: it is no such text.

    Args:
        part: A number of parts, or a text.

    Returns:
        The rows of a part.

    Example:
        >>> rows_of("rows:64"), rows_of(3)
        (64, None)
    """
    if not isinstance(part, str):
        return None
    kind, _, number = part.partition(":")
    if kind != "rows" or not number.isdecimal() or not int(number):
        raise ValueError(f'expected a whole number from 1 on, or the rows of a part as "rows:64"; got {part!r:.80}')
    return int(number)
