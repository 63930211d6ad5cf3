"""Every rule that turns a user's number into the numbers added to a layer's factors. Nowhere else is damping computed.

A = E[h h^T] and B = E[delta delta^T] are K-FAC's factors, L and R Shampoo's, K Gauss-Newton's; r_in and r_out say how
much the layer's fan-in and fan-out have grown since the base width (1 without a Parametrization).

**What the rescaled rule divides by.** rho_A = rho tr(A) / m_A with m_A the *base* size of A, d_A / r_in. At the base
width that is rho times the mean eigenvalue (the paper's appendix); beyond it, it grows like the trace (the paper's main
text). Dividing by the actual size breaks muP: tr(A) / d_A stays constant where valid damping grows like the width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mukron.arguments import check_number, check_whole
from mukron.linalg import Factor

__all__ = ["Adaptive", "Constant", "Fixed", "Heuristic", "MaxEigenvalue", "MeanEigenvalue", "Rescaled", "Rule"]


@dataclass(frozen=True)
class Sides:
    """What a rule may know of a layer beside its factors."""

    growth: Mapping[str, float]  # by factor: how much its size has grown since the base width
    scales: Mapping[str, float]  # by factor: the theory's multiplier of a fixed damping
    peaks: Mapping[str, Tensor] = field(default_factory=dict)  # by factor: the largest trace seen so far


class Rule:
    """Base of the damping rules: from a layer's factors to what is added to their diagonals.

    Example:
        >>> Rule.parse("heuristic:0.01")
        Heuristic(rho=0.01)
    """

    kinds: ClassVar[dict[str, type[Rule]]] = {}
    usual: ClassVar[tuple[float, ...]]  # numbers to begin with
    transfers: ClassVar[bool] = True  # its number holds at every width under muP
    rho: float

    def __init_subclass__(cls) -> None:
        Rule.kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            check_number(f"damping: {type(self).__name__}'s {name}", value)
            if not value >= 0:
                raise ValueError(f"damping must not be negative: {type(self).__name__}({name}={value})")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._numbers.items())})"

    @property
    def _numbers(self) -> dict[str, float]:
        # Without an eps of 0, which rules did not have at first: stored benchmarks know a rule by its numbers.
        return {name: value for name, value in vars(self).items() if name != "eps" or value}

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        """The damping of every factor, one number a group."""
        raise NotImplementedError

    def condition(self, d: int, growth: float) -> float | None:
        """A bound of the condition number of a damped factor of size d, if the rule alone gives one.

        Args:
            d: The factor's size.
            growth: How much that size has grown since the base width.
        """
        return None

    @property
    def relative(self) -> bool:
        """Whether the damping is a part of the factor, whatever unit that is measured in."""
        return False

    def plain(self) -> dict[str, Any]:
        """As plain data, for a parameter group and its ``state_dict``."""
        return {"rule": type(self).__name__, **self._numbers}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Rule:
        """Make a rule from the plain data of ``plain``.

        Args:
            data: The rule's name as "rule", and its fields.
        """
        return Rule.kinds[data["rule"]](**{name: value for name, value in data.items() if name != "rule"})

    @staticmethod
    def of_group(group: Mapping[str, Any]) -> Rule:
        """The rule of a parameter group, with the number that the group has now.

        Args:
            group: A parameter group of an optimizer.
        """
        damping = group["damping"]
        if damping is None:
            return Constant(0.0)  # of a method without damping
        return damping if isinstance(damping, Rule) else _rule(float(damping), *group["damping_rule"].items())

    def text(self) -> str:
        """As ``parse`` reads it, with the numbers that are not defaults."""
        own = [(getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        while own[-1][0] == own[-1][1]:
            own.pop()
        numbers = [number for number, _ in own]
        return f"{_dashed(type(self).__name__)}:{','.join(f'{number:.12g}' for number in numbers)}"

    @staticmethod
    def parse(text: str) -> Rule:
        """Make a rule from text, with its usual numbers or others: "rescaled", "heuristic:0.01", "fixed:1,0.1".

        Args:
            text: The rule's name, with or without :NUMBER.
        """
        kinds = {_dashed(name): kind for name, kind in Rule.kinds.items()}
        name, _, numbers = text.strip().lower().partition(":")
        if name not in kinds:
            raise ValueError(f"unknown damping rule {name!r}; known: {', '.join(kinds)}, each with or without :NUMBER")
        try:
            return kinds[name](*map(float, numbers.split(",")) if numbers else kinds[name].usual)
        except (TypeError, ValueError) as error:
            raise ValueError(f"damping {text!r}: {error}; expected {name}:NUMBER, as in heuristic:1e-3") from error


@dataclass(frozen=True, repr=False)
class Rescaled(Rule):
    """rho times the factor's trace over its base size, plus eps. Consistent with muP; K-FAC's and FOOF's own.

    The trace counts as at least ``floor`` times the largest seen. With cross-entropy B falls with the loss, and a B
    drawn from a confident model falls faster than the gradient: without a floor steps would grow as the loss falls.

    Attributes:
        rho: The number that is tuned; 1 is a good start. Schedulers may change it through ``group["damping"]``.
        floor: The part of the largest trace seen below which the trace does not count; 0 is the paper's rule.
        eps: An absolute part, for factors that vanish, scaled with the width as a fixed damping is.

    Example:
        >>> Rescaled(1.0)
        Rescaled(rho=1.0, floor=0.01)
    """

    usual = (1.0,)
    rho: float
    floor: float = 0.01
    eps: float = 0.0

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        damping = {}
        for name, factor in factors.items():
            trace = factor.trace()
            if name in sides.peaks:
                trace = torch.maximum(trace, self.floor * sides.peaks[name])
            damping[name] = self.rho * sides.growth.get(name, 1.0) / factor.d * trace
        return _raised(damping, self.eps, sides)

    @property
    def relative(self) -> bool:
        """Whether the damping is a part of the factor: not with an eps."""
        return self.eps == 0

    def condition(self, d: int, growth: float) -> float | None:
        """The bound d / (rho growth) of the condition number.

        Args:
            d: The factor's size.
            growth: How much that size has grown since the base width.
        """
        return d / (self.rho * growth) if self.rho > 0 else math.inf


@dataclass(frozen=True, repr=False)
class MeanEigenvalue(Rescaled):
    """rho times the factor's trace over its actual size. Right where a factor has more rows than features.

    The eigenvalues of such a factor do not grow with the width, and neither may their damping. Of few rows, a factor's
    eigenvalues grow like the width, and this rule breaks muP there.

    Attributes:
        rho: The number that is tuned; 1 is a good start. Schedulers may change it through ``group["damping"]``.
        floor: The part of the largest trace seen below which the trace does not count.
        eps: An absolute part, scaled with the width as a fixed damping is.

    Example:
        >>> MeanEigenvalue(1.0).condition(256, growth=4.0)
        256.0
    """

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        return super().__call__(factors, replace(sides, growth={}))

    def condition(self, d: int, growth: float) -> float | None:
        """The bound d / rho of the condition number.

        Args:
            d: The factor's size.
            growth: Has no part in it.
        """
        return super().condition(d, 1.0)


@dataclass(frozen=True, repr=False)
class Heuristic(Rule):
    """K-FAC's usual damping, which balances the two factors. It breaks muP.

    pi^2 = (tr A / d_A) / (tr B / d_B), rho_A = sqrt(rho) pi + eps, rho_B = sqrt(rho) / pi + eps.

    Attributes:
        rho: The number; schedulers may change it through ``group["damping"]``.
        eps: An absolute part, scaled with the width as a fixed damping is.

    Example:
        >>> Heuristic(1e-3)
        Heuristic(rho=0.001)
    """

    usual = (1e-3,)
    transfers = False
    rho: float
    eps: float = 0.0

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        if set(factors) != {"A", "B"}:
            raise ValueError("the heuristic damping balances A against B: it is for K-FAC alone")
        A, B = factors["A"], factors["B"]
        tiny = 1e-30
        pi = ((A.trace() / A.d).clamp_min(tiny) / (B.trace() / B.d).clamp_min(tiny)).sqrt()
        return _raised({"A": self.rho**0.5 * pi, "B": self.rho**0.5 / pi}, self.eps, sides)


@dataclass(frozen=True, repr=False)
class Fixed(Rule):
    """Numbers of your own for the two sides, scaled with the width as the theory says.

    Attributes:
        a: Damping of the factor of inputs (A, R) at the base width.
        b: Damping of the factor of output derivatives (B, L) at the base width.
        rho: Multiplies both; schedulers may change it through ``group["damping"]``.
        power_a: Power of the theory's scale of a. 1 is right, 0 is the same damping at every width; others show what
            goes wrong.
        power_b: The same for b.

    Example:
        >>> Fixed(a=1.0, b=0.1).power_a
        1.0
    """

    usual = (1.0, 1.0)
    a: float
    b: float
    rho: float = 1.0
    power_a: float = 1.0
    power_b: float = 1.0

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        own = {"A": self.a, "B": self.b, "R": self.a, "L": self.b, "K": self.a * self.b}
        power = {"A": self.power_a, "B": self.power_b, "R": self.power_a, "L": self.power_b, "K": self.power_a}
        damping = {}
        for name, factor in factors.items():
            number = self.rho * own[name] * sides.scales.get(name, 1.0) ** power[name]
            damping[name] = torch.zeros_like(factor.trace()) + number
        return damping


@dataclass(frozen=True, repr=False)
class MaxEigenvalue(Rule):
    """rho times the factor's largest eigenvalue, plus eps. Consistent with muP; Shampoo's own.

    A factor whose trace has fallen below ``floor`` times the largest seen is damped as if it had that trace. Steps that
    do not depend on the size of the gradient never end: on data that are fitted, the floor lets them shrink. A sum of
    all gradients never falls, and has no use for it.

    Attributes:
        rho: The number; schedulers may change it through ``group["damping"]``.
        floor: The part of the largest trace seen below which the damping does not fall; 0: it always may.
        eps: An absolute part, for factors that vanish, scaled with the width as a fixed damping is.

    Example:
        >>> MaxEigenvalue(1e-6)
        MaxEigenvalue(rho=1e-06, floor=1.0)
    """

    usual = (1e-6,)
    rho: float
    floor: float = 1.0
    eps: float = 0.0

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        damping = {}
        for name, factor in factors.items():
            damping[name] = self.rho * factor.largest_eigenvalue()
            if name in sides.peaks:
                trace, least = factor.trace(), self.floor * sides.peaks[name]
                damping[name] = damping[name] * torch.where(trace > 0, (least / trace).clamp_min(1.0), 1.0)
        return _raised(damping, self.eps, sides)

    @property
    def relative(self) -> bool:
        """Whether the damping is a part of the factor: not with an eps."""
        return self.eps == 0


@dataclass(frozen=True, repr=False)
class Constant(Rule):
    """The same damping at every layer and every width. It breaks muP.

    Attributes:
        rho: The damping; schedulers may change it through ``group["damping"]``.

    Example:
        >>> Constant(1e-3)
        Constant(rho=0.001)
    """

    usual = (1e-3,)
    transfers = False
    rho: float

    def __call__(self, factors: Mapping[str, Factor], sides: Sides) -> dict[str, Tensor]:
        return {name: torch.zeros_like(factor.trace()) + self.rho for name, factor in factors.items()}


@dataclass(frozen=True)
class Adaptive:
    """A rule whose number adapts by Levenberg and Marquardt's rule, as in Martens and Grosse (2015, section 6.5).

    At every ``every``-th step the loss is evaluated once more, on the same batch, where the step leads. The reduction
    ratio is its change over the change that the quadratic model of the step predicted. Above 3/4 the number is
    multiplied by decay^every, below 1/4 it is divided by that. ``step`` then needs a closure, as in torch's LBFGS.

    Attributes:
        rule: The rule whose number adapts, with the number to begin with; a number means the method's own rule.
        every: Steps from one test of the model to the next.
        decay: What the number is multiplied by, a step, where the model predicts well; from 0 to below 1.
        lowest: The number does not adapt below this.
        highest: The number does not adapt above this.

    Example:
        >>> Adaptive(Rescaled(1.0), every=10)
        Adaptive(rule=Rescaled(rho=1.0, floor=0.01), every=10, decay=0.95, lowest=0.0001, highest=10000.0)
    """

    rule: Rule | float
    every: int = 5
    decay: float = 0.95
    lowest: float = 1e-4
    highest: float = 1e4

    def __post_init__(self) -> None:
        if not isinstance(self.rule, (Rule, int, float)):
            raise TypeError(
                f"Adaptive takes a damping rule or a number, as in Adaptive(Rescaled(1.0)); got {self.rule!r:.80}"
            )
        check_whole("Adaptive's every", self.every)
        for name in ("decay", "lowest", "highest", *([] if isinstance(self.rule, Rule) else ["rule"])):
            check_number(f"Adaptive's {name}", getattr(self, name))
        if self.every < 1:
            raise ValueError(f"every counts steps: at least 1, got {self.every}")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {self.decay}")
        rho = self.rule.rho if isinstance(self.rule, Rule) else self.rule
        if not 0 < self.lowest <= rho <= self.highest:
            raise ValueError(
                f"adaptive damping starts at {rho:g}, which must lie between lowest={self.lowest:g} (above 0) and "
                f"highest={self.highest:g}"
            )

    def plain(self) -> dict[str, Any]:
        """The numbers of the schedule, and the last reduction ratio, as plain data for a parameter group."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rule"}
        return {**own, "ratio": None}


@lru_cache(maxsize=64)
def _rule(rho: float, *plain: tuple[str, Any]) -> Rule:
    return Rule.from_plain({**dict(plain), "rho": rho})


def _raised(damping: Mapping[str, Tensor], eps: float, sides: Sides) -> dict[str, Tensor]:
    """Add an absolute part, which scales with the width as the theory says of a fixed damping."""
    return {name: rho + eps * sides.scales.get(name, 1.0) for name, rho in damping.items()}


def _dashed(name: str) -> str:
    """MaxEigenvalue -> max-eigenvalue."""
    return re.sub("(?<!^)([A-Z])", r"-\1", name).lower()
