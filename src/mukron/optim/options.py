"""Options of a step as values: the type is the choice. Bare numbers and strings are shorthands for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mukron.linalg import Cholesky, Solver
from mukron.memory import Batch, Memory
from mukron.optim.momentum import Momentum as Momentum  # noqa: PLC0414  # methods get it from here
from mukron.readers import check_number, check_whole


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
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise TypeError(f"betas must be two numbers, as in AdamStep(betas=(0.9, 0.999)); got {self.betas!r:.80}")
        for beta in self.betas:
            check_number("betas", beta)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        check_number("eps", self.eps)
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
        m, v = (state[name].to(G.dtype) if t > 1 else torch.zeros_like(G) for name in ("exp_avg", "exp_avg_sq"))
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
    if not isinstance(rule, str) or rule not in known:
        raise ValueError(f"unknown {name} {rule!r:.80}; known: {', '.join(known)}")
    return SGDStep() if rule == "sgd" else AdamStep()


@dataclass(frozen=True)
class Trust:
    """A bound on how far a layer moves in a step; ``optim/direction`` applies it.

    A preconditioner divides by curvature that it has measured. Where it has measured little (a direction that no batch
    has shown yet, a layer behind a gate at zero, a model that fits its data) the quotient can be of any size. Every
    kind of bound scales with the width in a way that muP knows:

        Spectral  the largest singular value of a move is at most size (d_out / d_in)^1/2: muP's own condition
        KLClip    the predicted change of the output distribution does not depend on the width
        Graft     the length is that of another rule's step, whose learning-rate multipliers are used
        RMS       the length is that of a sign step, and so are the multipliers: Adam's

    Example:
        >>> Trust.of("spectral:0.5")
        Spectral(size=0.5)
    """

    kinds: ClassVar[dict[str, type[Trust]]] = {}
    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        Trust.kinds[cls.name] = cls

    @property
    def rates(self) -> str | None:
        """The method whose learning-rate multipliers apply; None: the optimizer's own."""
        return None

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        raise NotImplementedError

    @staticmethod
    def of(trust: Trust | str | None) -> Trust | None:
        """Make a bound from its text: "spectral", "spectral:0.5", "kl:1e-3", "graft:adam", "rms:0.2" or "none".

        Args:
            trust: The text, or a value, which is returned as it is. None: no bound.
        """
        if trust is None or isinstance(trust, Trust):
            return trust
        if not isinstance(trust, str):
            raise TypeError(f'trust must be a bound, as in "spectral:0.5" or Spectral(0.5); got {trust!r:.80}')
        name, colon, value = trust.strip().lower().partition(":")
        if name == "none" and not colon:
            return None
        if name not in Trust.kinds:
            raise ValueError(f"unknown trust {trust!r}; known: {', '.join(Trust.kinds)}, none")
        kind = Trust.kinds[name]
        try:
            return kind(*([value] if kind is Graft else [float(value)]) if colon else ())
        except ValueError as error:
            raise ValueError(f"trust {trust!r}: {error}") from error


@dataclass(frozen=True)
class Spectral(Trust):
    """The largest singular value of a layer's move is at most ``size`` (d_out / d_in)^1/2, times the learning rate.

    A weight of that size maps inputs whose entries are of order one to outputs of order one, at every width. A learning
    rate of 0.02 then moves no layer by more than 2% of that size in a step. A move that is shorter stays as it is. The
    singular value is estimated by power iteration, kept warm from step to step. Biases are bounded by the root mean
    square of their entries, embeddings token by token.

    Attributes:
        size: The largest size of a move before the learning rate.

    Example:
        >>> Spectral().text
        'spectral:1'
    """

    name = "spectral"
    size: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("size", self.size)

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        return f"{self.name}:{self.size:.12g}"


@dataclass(frozen=True)
class KLClip(Trust):
    """The whole step is shortened so that the predicted change of the output distribution is at most kappa.

    nu = min(1, sqrt(kappa / sum of eta^2 s <direction, gradient>))  (Grosse and Martens 2016), s being the multiplier
    that the parametrization gives a layer's learning rate eta, 1 for K-FAC: see "Trust" in docs/optimizers.md.

    Attributes:
        kappa: The largest predicted change.

    Example:
        >>> KLClip(1e-3).text
        'kl:0.001'
    """

    name = "kl"
    kappa: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("kappa", self.kappa)

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        return f"{self.name}:{self.kappa:.12g}"


@dataclass(frozen=True)
class Graft(Trust):
    """A layer's move has the length of another rule's step, and the direction of the method's own.

    Attributes:
        rule: "sgd" or ``SGDStep()``, "adam" or ``AdamStep(betas, eps)``.

    Example:
        >>> Graft("adam")
        Graft(rule=AdamStep(betas=(0.9, 0.999), eps=1e-08))
    """

    name = "graft"
    rule: StepRule | str = "adam"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", step_rule("graft", self.rule, GRAFTS))

    @property
    def step_rule(self) -> StepRule:
        """The rule as a value."""
        return step_rule("graft", self.rule, GRAFTS)

    @property
    def rates(self) -> str | None:
        """Those of the rule."""
        return self.step_rule.name

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it, for a rule with its usual numbers."""
        return f"{self.name}:{'adam' if isinstance(self.rule, AdamStep) else 'sgd'}"


@dataclass(frozen=True)
class RMS(Trust):
    """The root mean square of the entries of a layer's move is ``size``, whatever the curvature says of its length.

    Its law is Adam's as long as the rank of moves does not grow with the width. With more tokens than features it does,
    and the best learning rate drifts; ``Spectral`` has no such ambiguity.

    Attributes:
        size: The root mean square before the learning rate.

    Example:
        >>> RMS().text
        'rms:0.2'
    """

    name = "rms"
    size: float = 0.2

    def __post_init__(self) -> None:
        _check_positive("size", self.size)

    @property
    def rates(self) -> str | None:
        """Those of Adam."""
        return "adamw"

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        return f"{self.name}:{self.size:.12g}"


def _check_positive(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")


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
        exclude: Layers that are left to the fallback rule. None: embeddings.
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
    exclude: tuple[str, ...] | None = ()
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
        object.__setattr__(self, "memory", Memory.of(self.memory))
        object.__setattr__(self, "fallback", step_rule("fallback", self.fallback, FALLBACKS))
        if isinstance(self.exclude, str):
            raise ValueError(f'exclude takes several names: exclude=("{self.exclude}",)')
        names = () if self.exclude is None else self.exclude
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise TypeError(f'exclude takes names of layers, as in exclude=("head",); got {self.exclude!r:.80}')
        object.__setattr__(self, "exclude", None if self.exclude is None else tuple(self.exclude))

    @classmethod
    def of(cls, trust: Trust | None, **given: Any) -> StepOptions:
        """Options of which some may be None: those are the usual ones beside a bound, or the paper's without one.

        Args:
            trust: The bound on a layer's move; None: the paper's plain step.
            given: The other options by name.
        """
        usual: dict[str, Any] = {"fallback": SGDStep(), "exclude": ()}
        if trust is not None:
            usual = {"fallback": AdamStep(), "exclude": None, "refresh_warmup": 10}
        check_whole("factor_every", given.get("factor_every", 1))
        usual["inverse_every"] = usual_interval(trust is not None, max(given.get("factor_every", 1), 1))
        return cls(trust=trust, **{**usual, **{name: value for name, value in given.items() if value is not None}})


def usual_interval(bounded: bool, factor_every: int) -> int:
    """Steps between two inversions where none are given: with a bound about ten, a multiple of ``factor_every``."""
    return factor_every * (-(-10 // factor_every) if bounded else 1)


def usual_fallback_lr(trust: Trust | None, fallback: StepRule, lr: float) -> float | None:
    """The fallback rule's learning rate where none is given; None: that of the layers.

    A spectral bound counts in multiples of a weight's natural size, of which Adam takes small steps.
    """
    return lr / 20 if isinstance(trust, Spectral) and isinstance(fallback, AdamStep) else None


def check_one_of(name: str, value: str | None, known: Iterable[str | None]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(map(repr, known))}")
