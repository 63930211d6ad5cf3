"""Options of a step as values: the type is the choice. Bare numbers and strings are shorthands for them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mukron.linalg import Cholesky, Solver
from mukron.memory import Batch, Memory


@dataclass(frozen=True)
class HeavyBall:
    """Momentum on the update: buffer <- beta buffer + update, and the buffer is what the weights move by.

    Attributes:
        beta: From 0, no momentum, to below 1.
        nesterov: Look one step ahead along the buffer.

    Example:
        >>> HeavyBall(0.9, nesterov=True)
        HeavyBall(beta=0.9, nesterov=True)
    """

    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_momentum(self.beta, self.nesterov)


@dataclass(frozen=True)
class GradientMomentum:
    """Momentum on the gradient, before it is preconditioned: its moving average, corrected for its start at zero.

    Attributes:
        beta: Weight of the past, from 0 to below 1.

    Example:
        >>> GradientMomentum(0.95)
        GradientMomentum(beta=0.95)
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        check_momentum(self.beta, False)


Momentum = HeavyBall | GradientMomentum


def check_momentum(beta: float, nesterov: bool) -> None:
    if not 0 <= beta < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {beta}")
    if nesterov and not beta:
        raise ValueError("nesterov=True needs momentum > 0")


@dataclass(frozen=True)
class SGDStep:
    """The gradient itself: a fallback rule, or the length of a grafted step.

    Example:
        >>> SGDStep()
        SGDStep()
    """

    name = "sgd"


@dataclass(frozen=True)
class AdamStep:
    """Adam's step: a fallback rule, or the length of a grafted step. Weight decay is decoupled, as in AdamW.

    Attributes:
        betas: Decays of the averages of the gradient and of its square.
        eps: Added to the root of the averaged square.

    Example:
        >>> AdamStep(betas=(0.9, 0.95))
        AdamStep(betas=(0.9, 0.95), eps=1e-08)
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adamw"

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not self.eps >= 0:
            raise ValueError(f"eps must not be negative, got {self.eps}")

    def direction(self, state: dict[str, Any], G: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """m^ / (sqrt(v^) + eps), and the moments that the state will hold if the step counts.

        Args:
            state: The parameter's state: the moments of earlier steps.
            G: The gradient.
        """
        beta1, beta2 = self.betas
        t = state.get("adam_step", 0) + 1
        m, v = (state[name] if t > 1 else torch.zeros_like(G) for name in ("exp_avg", "exp_avg_sq"))
        m = m.lerp(G, 1 - beta1)
        v = (v * beta2).addcmul_(G, G, value=1 - beta2)
        direction = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + self.eps)
        return direction, {"adam_step": t, "exp_avg": m, "exp_avg_sq": v}


StepRule = SGDStep | AdamStep
FALLBACKS = ("sgd", "adamw")
GRAFTS = ("sgd", "adam")


def step_rule(name: str, rule: Any, known: tuple[str, ...]) -> StepRule:
    """A rule from its value or from one of its names."""
    if isinstance(rule, (SGDStep, AdamStep)):
        return rule
    if rule not in known:
        raise ValueError(f"unknown {name} {rule!r}; known: {', '.join(known)}")
    return SGDStep() if rule == "sgd" else AdamStep()


@dataclass(frozen=True)
class StepOptions:
    """What is the same for all parameter groups.

    Attributes:
        memory: What factors remember.
        factor_every: Steps from one measurement of the factors to the next.
        inverse_every: Steps from one preparation of the inverses to the next.
        solver: How factors are inverted.
        kl_clip: Largest predicted change of the output distribution; None: no limit.
        graft: The rule that sets the length of each layer's step; None: its own.
        fallback: The rule for parameters that are not preconditioned.
        exclude: Layers that are left to the fallback rule.
        seed: Of the drawn targets.

    Example:
        >>> StepOptions(factor_every=10, inverse_every=20).inverse_every
        20
    """

    memory: Memory = field(default_factory=Batch)
    factor_every: int = 1
    inverse_every: int = 1
    solver: Solver = field(default_factory=Cholesky)
    kl_clip: float | None = None
    graft: StepRule | None = None
    fallback: StepRule = field(default_factory=SGDStep)
    exclude: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("factor_every", "inverse_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts steps: at least 1, got {getattr(self, name)}")
        if self.inverse_every % self.factor_every:
            raise ValueError(
                f"inverse_every={self.inverse_every} must be a multiple of factor_every={self.factor_every}: an "
                "inverse is made when its factors are fresh"
            )
        if self.kl_clip is not None and not self.kl_clip > 0:
            raise ValueError(f"kl_clip must be positive, got {self.kl_clip}")
        object.__setattr__(self, "memory", Memory.of(self.memory))
        object.__setattr__(self, "fallback", step_rule("fallback", self.fallback, FALLBACKS))
        if self.graft is not None:
            object.__setattr__(self, "graft", step_rule("graft", self.graft, GRAFTS))
        if isinstance(self.exclude, str):
            raise ValueError(f'exclude takes several names: exclude=("{self.exclude}",)')
        object.__setattr__(self, "exclude", tuple(self.exclude))


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(map(repr, known))}")


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class by name, with those of its base where it passes on ``**options``."""
    arguments: dict[str, inspect.Parameter] = {}
    for kind in cls.__mro__:
        if "__init__" not in vars(kind):
            continue
        _, *parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        arguments = {**{parameter.name: parameter for parameter in parameters}, **arguments}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return arguments


def refuse_unknown(cls: type, arguments: Iterable[str], useless: Mapping[str, str]) -> None:
    """A TypeError that names the class and the nearest argument it has, for keywords that it does not take.

    useless: arguments of related methods that this one has no use for, and why.
    """
    known = [name for name, parameter in arguments_of(cls).items() if parameter.kind is not parameter.VAR_KEYWORD]
    for name in arguments:
        if name in useless and name not in known:
            raise TypeError(f"{cls.__name__} {useless[name]}: {name} would have no effect")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise TypeError(f"{cls.__name__} has no argument {name!r}{hint} Its arguments: {', '.join(known)}")
