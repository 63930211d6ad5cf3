"""Recipes: a recipe goes from a scale to what is run, what the paper claims about it, and how it is drawn.

A **part** is what is run: a ``Design`` of widths, learning rates, dampings and seeds, a ``Checking``, the coordinate
check of one run, or a ``Regression``, which trains nothing. The results of the parts are the **evidence**. Claims are
checked and figures drawn from the evidence only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mukron.diagnose.check import Check
from mukron.paper.effects import Effect
from mukron.paper.errors import ReproductionError
from mukron.paper.evidence import Evidence
from mukron.study.design import Design
from mukron.study.record import StudyRecord
from mukron.train import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
HOLDS, IN_PART, FAILS, UNTOLD = "holds", "holds in part", "does not hold", "cannot be determined"


class Scale(str, Enum):
    """How much of a recipe is run.

    Attributes:
        SMOKE: Seconds, on digits; shows only that the recipe runs.
        SMALL: Minutes on two cores; the paper's data with narrower networks and shorter grids.
        PAPER: The paper's widths, data, samples and epochs, for one GPU.

    Example:
        >>> Scale("small") is Scale.SMALL
        True
    """

    SMOKE = "smoke"
    SMALL = "small"
    PAPER = "paper"

    def choose(self, smoke: T, small: T, paper: T) -> T:
        """Returns the argument that belongs to this scale.

        Args:
            smoke: The value for ``SMOKE``.
            small: The value for ``SMALL``.
            paper: The value for ``PAPER``.

        Returns:
            One of the three.

        Example:
            >>> Scale.SMALL.choose(64, 256, 4096)
            256
        """
        return {Scale.SMOKE: smoke, Scale.SMALL: small, Scale.PAPER: paper}[self]


@dataclass(frozen=True)
class Checking:
    """A part that is a coordinate check: a few steps at several widths and seeds.

    Attributes:
        config: The run.
        widths: The widths.
        seeds: The number of seeds.
        steps: The number of steps.

    Example:
        >>> Checking(RunConfig(), (64.0, 128.0)).to_dict()["widths"]
        [64.0, 128.0]
    """

    config: RunConfig
    widths: tuple[float, ...]
    seeds: int = 3
    steps: int = 3

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as data for JSON."""
        axes = {"widths": list(self.widths), "seeds": self.seeds, "steps": self.steps}
        return {**axes, "config": self.config.to_dict()}


@dataclass(frozen=True)
class Regression:
    """A part that is kernel regression on the last features of untrained networks; it trains nothing.

    Attributes:
        config: The run whose first step arrives there, with a rescaled damping.
        widths: The only width.
        seeds: The number of seeds.

    Example:
        >>> Regression(RunConfig(damping="rescaled:2"), (64.0,), seeds=3).rho
        2.0
    """

    config: RunConfig
    widths: tuple[float, ...]
    seeds: int = 1

    @property
    def total(self) -> int:
        """The number of networks."""
        return self.seeds

    @property
    def rho(self) -> float:
        """The number of the damping rule."""
        assert self.config.damping is not None
        return self.config.damping.rho

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as data for JSON."""
        return {"widths": list(self.widths), "seeds": self.seeds, "config": self.config.to_dict()}


Part = Design | Checking | Regression
PartResult = StudyRecord | Check


@dataclass(frozen=True)
class Finding:
    """The result of checking a claim.

    Attributes:
        verdict: "holds", "holds in part", "does not hold" or "cannot be determined".
        measured: What was measured, in words and numbers.
        earlier: The verdict by an earlier rule, where the rule was replaced and gave another one; else empty.
        rule: What the earlier rule was and what replaced it; empty where ``earlier`` is.
        effect: How large what the claim is about is, with an interval; None where that is no single number.

    Example:
        >>> Finding("holds", "best at 2^-3 at every width").verdict
        'holds'
    """

    verdict: str
    measured: str
    earlier: str = ""
    rule: str = ""
    effect: Effect | None = None


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or one of our own, with a check of it.

    Attributes:
        text: The statement.
        check: From the evidence to a finding.
        paper: The number that the paper prints.
        tried: What else was run to find out why, and what it gave.
        ours: Whether the statement is not the paper's but our own; such claims are counted apart.

    Example:
        >>> claim = Claim("muP transfers.", lambda evidence: Finding(UNTOLD, "nothing was run"))
        >>> claim.check(Evidence()).verdict
        'cannot be determined'
    """

    text: str
    check: Callable[[Evidence], Finding]
    paper: str = ""
    tried: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Experiment:
    """A recipe at one scale.

    Attributes:
        parts: What is run, by name.
        claims: What the paper claims about it.
        draw: From the evidence to the figure.
        choices: What was chosen where the paper is silent or contradicts itself.

    Example:
        >>> from mukron.paper import RECIPES
        >>> experiment = RECIPES["zero-transfer"].experiment(Scale.SMOKE)
        >>> list(experiment.parts)
        ['MLP, SGD, SP', 'MLP, SGD, muP', 'MLP, K-FAC, SP', 'MLP, K-FAC, muP']
    """

    parts: Mapping[str, Part]
    claims: Sequence[Claim]
    draw: Callable[[Evidence], Figure]
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Less:
    """Limits that make a recipe smaller than its scale; the result mentions them.

    Attributes:
        epochs: The largest number of epochs.
        widths: The widths to run, of those that the recipe has.
        seeds: The largest number of seeds.

    Example:
        >>> Less(epochs=3, seeds=1).words()
        '3 epochs at most, 1 seed at most'
    """

    epochs: int | None = None
    widths: tuple[float, ...] | None = None
    seeds: int | None = None

    def applied_to(self, part: Part) -> Part:
        """Returns a part within the limits.

        Args:
            part: The part. If it has too few of the widths, its narrowest ones are run.

        Returns:
            The smaller part.

        Example:
            >>> Less(widths=(128.0,), seeds=1).applied_to(Checking(RunConfig(), (64.0, 128.0, 256.0))).widths
            (64.0, 128.0)
        """
        changes: dict[str, Any] = {}
        if self.widths is not None:
            changes["widths"] = self._widths(part)
        if self.seeds is not None:
            seeds = part.seeds
            changes["seeds"] = min(self.seeds, seeds) if isinstance(seeds, int) else seeds[: self.seeds]
        if self.epochs is not None and isinstance(part, Design) and self.epochs < part.config.epochs:
            shorter = min(part.config.warmup, float(self.epochs))
            changes["config"] = part.config.replace(epochs=self.epochs, warmup=shorter)
        return dataclasses.replace(part, **changes)

    def _widths(self, part: Part) -> tuple[float, ...]:
        assert self.widths is not None
        asked = tuple(width for width in part.widths if width in self.widths)
        least = 2 if isinstance(part, Checking) else 1
        return asked if len(asked) >= least else part.widths[:least]

    def options(self) -> list[str]:
        """Returns the limits as options of ``mukron reproduce``.

        Example:
            >>> Less(epochs=3).options()
            ['--epochs', '3']
        """
        widths = None if self.widths is None else ",".join(f"{width:g}" for width in self.widths)
        given = {"--epochs": self.epochs, "--widths": widths, "--seeds": self.seeds}
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]

    def words(self) -> str:
        """Returns the limits in words; empty if there are none."""

        def most(count: int, what: str) -> str:
            return f"{count} {what}{'s' if count > 1 else ''} at most"

        phrases = [most(self.epochs, "epoch")] if self.epochs is not None else []
        phrases += [f"widths {', '.join(f'{width:g}' for width in self.widths)}"] if self.widths is not None else []
        phrases += [most(self.seeds, "seed")] if self.seeds is not None else []
        return ", ".join(phrases)


@dataclass(frozen=True)
class Recipe:
    """One figure or table of the paper.

    Attributes:
        name: Its label in the paper's source.
        where: Its place in the paper, in words.
        title: What it shows.
        make: From a scale to the experiment.

    Example:
        >>> from mukron.paper import RECIPES
        >>> RECIPES["nngp"].where
        'Figure 3'
    """

    name: str
    where: str
    title: str
    make: Callable[[Scale], Experiment]

    def experiment(self, scale: Scale, less: Less | None = None, device: str = "cpu") -> Experiment:
        """Builds the experiment.

        Args:
            scale: How much of the recipe is run.
            less: Limits that make it smaller.
            device: Where it is run, "cpu" or "cuda".

        Returns:
            The experiment.

        Raises:
            ReproductionError: If the recipe has none of the widths in ``less``.

        Example:
            >>> from mukron.paper import RECIPES
            >>> len(RECIPES["coordinate"].experiment(Scale.SMOKE).claims)
            8
        """
        experiment = self.make(scale)
        if less is not None and less.widths is not None:
            known = sorted({width for part in experiment.parts.values() for width in part.widths})
            if experiment.parts and not set(known) & set(less.widths):
                shown = ", ".join(f"{width:g}" for width in known)
                raise ReproductionError(f"{self.name}: has none of the widths asked for; its own: {shown}")
        parts = {
            name: _with_device(device, part if less is None else less.applied_to(part))
            for name, part in experiment.parts.items()
        }
        return dataclasses.replace(experiment, parts=parts)


RECIPES: dict[str, Recipe] = {}


def recipe(
    name: str, where: str, title: str
) -> Callable[[Callable[[Scale], Experiment]], Callable[[Scale], Experiment]]:
    """Registers a function as the recipe of a figure or table.

    Args:
        name: The recipe's name.
        where: Its place in the paper, in words.
        title: What it shows.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        ReproductionError: If there is a recipe of that name.
    """

    def register(make: Callable[[Scale], Experiment]) -> Callable[[Scale], Experiment]:
        if name in RECIPES:
            raise ReproductionError(f"there are two recipes {name!r}")
        RECIPES[name] = Recipe(name, where, title, make)
        return make

    return register


def key_of(part: Part) -> str:
    """Returns a short hash of what is run, on any device, so that recipes share equal parts.

    Args:
        part: The part.

    Returns:
        Twelve hexadecimal digits.

    Example:
        >>> a, b = (Checking(RunConfig(device=device), (64.0,)) for device in ("cpu", "cuda"))
        >>> key_of(a) == key_of(b)
        True
    """
    content = part.to_dict()
    content["config"] = {name: value for name, value in content["config"].items() if name != "device"}
    text = json.dumps({"kind": type(part).__name__, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def verdict_of(findings: Sequence[Finding]) -> str:
    """Returns the verdict on a recipe from the findings of its claims.

    Args:
        findings: The findings.

    Returns:
        The verdict that all share, else "holds in part" if any claim holds.

    Example:
        >>> verdict_of([Finding(HOLDS, ""), Finding(FAILS, "")])
        'holds in part'
    """
    verdicts = {finding.verdict for finding in findings}
    if len(verdicts) == 1:
        return verdicts.pop()
    return IN_PART if verdicts & {HOLDS, IN_PART} else FAILS if FAILS in verdicts else UNTOLD


def _with_device(device: str, part: Part) -> Part:
    return (
        part if part.config.device == device else dataclasses.replace(part, config=part.config.replace(device=device))
    )
