"""How far a layer moves in a step, whose learning-rate multipliers that takes, and first-order rules for all the rest.

A bound is a value whose type is the choice; ``optim.direction`` applies it. What follows from it, the fallback rule and
the layers that are left to it, stands here too: the optimizers and the tables that explain them read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mukron.arguments import check_number
from mukron.theory import Method

USUAL = "spectral"  # the bound of every optimizer that is given none
AMBIGUOUS = (
    "That law holds while the rank of moves does not grow with the width; with more samples or tokens than features it "
    "does, and steps become too small as the width grows. The spectral bound has no such limit"
)


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
        eps: Added to the root of the averaged square, at the base width; a ``Parametrization`` scales it.

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

    def direction(self, state: dict[str, Any], G: Tensor, eps_scale: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        """m^ / (sqrt(v^) + eps), and the moments that the state will hold if the step counts.

        Args:
            state: The parameter's state: the moments of earlier steps.
            G: The gradient.
            eps_scale: What the parametrization multiplies eps by.
        """
        beta1, beta2 = self.betas
        t = state.get("adam_step", 0) + 1
        m, v = (state[name].to(G.dtype) if t > 1 else torch.zeros_like(G) for name in ("exp_avg", "exp_avg_sq"))
        m = m.lerp(G, 1 - beta1)
        v = (v * beta2).addcmul_(G, G, value=1 - beta2)
        direction = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + self.eps * eps_scale)
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
        Spectral(size=0.5, growth=2.0)
    """

    kinds: ClassVar[dict[str, type[Trust]]] = {}
    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        Trust.kinds[cls.name] = cls

    @property
    def rates(self) -> str | None:
        """The method whose learning-rate multipliers apply; None: the optimizer's own."""
        return None

    by_length: ClassVar[bool] = False  # it sets the Frobenius norm of a move, not what it does to features

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        raise NotImplementedError

    @property
    def meaning(self) -> str:
        """What it does to a step, in a few words."""
        raise NotImplementedError

    @staticmethod
    def of(trust: Trust | str | None) -> Trust | None:
        """Make a bound from its text: "spectral", "spectral:0.5", "kl:1e-3", "graft:adam", "rms:0.2" or "none".

        "spectral:0.5:3" has a growth of 3, "spectral:0.5:inf" none.

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
            numbers = value.split(":", 1 if kind is Spectral else 0)
            return kind(*([value] if kind is Graft else map(float, numbers)) if colon else ())
        except ValueError as error:
            raise ValueError(f"trust {trust!r}: {error}") from error


@dataclass(frozen=True)
class Spectral(Trust):
    """The largest singular value of a layer's move is at most ``size`` (d_out / d_in)^1/2, times the learning rate.

    A weight of that size maps inputs whose entries are of order one to outputs of order one, at every width. A learning
    rate of 0.02 then moves no layer by more than 2% of that size in a step. A move that is shorter stays as it is. The
    singular value is estimated by power iteration, kept warm from step to step. Biases are bounded by the root mean
    square of their entries, embeddings token by token.

    Between two refreshes an inverse meets gradients that its factors have not seen, and may amplify them. Its moves are
    therefore also at most ``growth`` times as long as the one of the step that made it.

    Attributes:
        size: The largest size of a move before the learning rate.
        growth: How many times as long as its first move a later one of the same inverse may be. ``math.inf``: as long
            as ``size`` allows.

    Example:
        >>> Spectral().text
        'spectral:1'
    """

    name = "spectral"
    size: float = 1.0
    growth: float = 2.0

    def __post_init__(self) -> None:
        _check_positive("size", self.size)
        if self.growth != math.inf:
            check_number("growth", self.growth)
        if not self.growth >= 1:
            raise ValueError(f"growth must be at least 1, got {self.growth}")

    @property
    def meaning(self) -> str:
        """What it does to a step, in a few words."""
        size = f"no layer moves by more than {self.size:g} (d_out / d_in)^1/2 in spectral norm, times the learning rate"
        if self.growth == math.inf:
            return size
        first = "the move of the step that made the inverse"
        return f"{size}. Until a layer's inverse is made again, it also moves by at most {self.growth:g} times {first}"

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it; the usual growth is left out."""
        return f"{self.name}:{self.size:.12g}" + ("" if self.growth == Spectral.growth else f":{self.growth:.12g}")


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

    def factor(self, gain: float) -> float:
        """What a step is multiplied by.

        Args:
            gain: The sum of eta^2 s <direction, gradient>.
        """
        return min(1.0, math.sqrt(self.kappa / max(gain, 1e-30))) if gain == gain else gain

    @property
    def meaning(self) -> str:
        """What it does to a step, in a few words."""
        return f"the predicted change of the outputs' distribution is at most {self.kappa:g}"

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

    by_length: ClassVar[bool] = True
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
    def meaning(self) -> str:
        """What it does to a step, in a few words."""
        return f"a layer's move has the length of a step of {RULE_TITLES[self.step_rule.name]}"

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

    by_length: ClassVar[bool] = True
    name = "rms"
    size: float = 0.2

    def __post_init__(self) -> None:
        _check_positive("size", self.size)

    @property
    def rates(self) -> str | None:
        """Those of Adam."""
        return "adamw"

    @property
    def meaning(self) -> str:
        """What it does to a step, in a few words."""
        return f"the root mean square of a layer's move is {self.size:g}, times the learning rate"

    @property
    def text(self) -> str:
        """As ``Trust.of`` reads it."""
        return f"{self.name}:{self.size:.12g}"


def _check_positive(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")


def usual_fallback(method: Method, trust: Trust | None) -> StepRule:
    """The rule of parameters that are not preconditioned, where none is given."""
    return SGDStep() if trust is None and not method.matrices_only else AdamStep()


def usual_exclude(method: Method, trust: Trust | None) -> tuple[str, ...] | None:
    """The layers that are left to the fallback rule, where none are given, beside tied ones.

    None: embeddings, and for a method of inner matrices output layers.
    """
    return () if trust is None and not method.matrices_only else None


def takes_trust(method: Method) -> bool:
    """Whether a method's optimizer bounds its moves: Muon's have their length by themselves."""
    return bool(method.damped) or (method.matrices_only and method.entrywise)


def law_of(trust: Trust | None, method: Method) -> str:
    """Which bound is in force and which learning-rate law follows, as a sentence for people."""
    if method.matrices_only and (trust is None or not takes_trust(method)):
        size, s = ("1", "") if method.entrywise else ("s", f" {SHAPE_FACTOR}")
        what = "entry of a layer's move, in its eigenbases," if method.entrywise else "singular value of a layer's move"
        law = f"Every {what} is near {size}, times the learning rate and its multiplier, which is {method.title}'s own."
        return law + s
    if trust is None:
        return (
            "trust none: steps are the paper's, of any length; learning-rate multipliers are those of "
            f"{method.title} itself."
        )
    rates = f"{method.title} itself" if trust.rates is None else RULE_TITLES[trust.rates]
    ambiguous = f" {AMBIGUOUS}." if trust.by_length else ""
    return f"trust {trust.text}: {trust.meaning}; learning-rate multipliers are those of {rates}.{ambiguous}"


RULE_TITLES = {"sgd": "SGD", "adamw": "Adam"}
SHAPE_FACTOR = (  # Muon's
    's = max(1, d_out / d_in)^1/2, of a layer\'s sizes at the base width (with adjust_lr_fn="match_rms_adamw" '
    "0.2 max(d_out, d_in)^1/2)."
)
