"""What a recipe is: from a scale to what is run, what the paper claims of it, and how it is drawn.

A **part** is something that studies or diagnostics run: a ``Design`` of widths, learning rates, dampings and seeds, or
a ``Checking``, the coordinate check of one run. What the parts found is the **evidence**; a claim is checked on it
alone, and so is the figure drawn.
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
from mukron.paper.errors import ReproductionError
from mukron.study.design import Design
from mukron.study.record import StudyRecord
from mukron.train import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
HOLDS, IN_PART, FAILS, UNTOLD = "holds", "holds in part", "does not hold", "cannot tell"


class Scale(str, Enum):
    """How much of the paper is run."""

    SMOKE = "smoke"  # seconds, on digits: shows that the recipe runs, and nothing else
    SMALL = "small"  # minutes on two cores: the paper's data, narrower networks, shorter grids
    PAPER = "paper"  # the paper's widths, data, samples and epochs, for one GPU

    def choose(self, smoke: T, small: T, paper: T) -> T:
        return {Scale.SMOKE: smoke, Scale.SMALL: small, Scale.PAPER: paper}[self]


@dataclass(frozen=True)
class Checking:
    """A coordinate check: a few steps at several widths and seeds."""

    config: RunConfig
    widths: tuple[float, ...]
    seeds: int = 3
    steps: int = 3

    def to_dict(self) -> dict[str, Any]:
        axes = {"widths": list(self.widths), "seeds": self.seeds, "steps": self.steps}
        return {**axes, "config": self.config.to_dict()}


Part = Design | Checking
PartResult = StudyRecord | Check


class Evidence(dict[str, Any]):
    """What the parts found, by their names."""

    def study(self, part: str) -> StudyRecord:
        return self._of(part, StudyRecord)

    def check(self, part: str) -> Check:
        return self._of(part, Check)

    def _of(self, part: str, kind: type[T]) -> T:
        found = self.get(part)
        if not isinstance(found, kind):
            raise ReproductionError(f"evidence {part!r}: expected a {kind.__name__}, found {type(found).__name__}")
        return found


@dataclass(frozen=True)
class Finding:
    """What became of a claim."""

    verdict: str  # HOLDS, IN_PART, FAILS or UNTOLD
    measured: str  # in words, with the numbers


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that can be wrong."""

    text: str
    check: Callable[[Evidence], Finding]
    paper: str = ""  # the number that the paper printed
    tried: str = ""  # said where the claim does not hold: what else was run to find out why


@dataclass(frozen=True)
class Experiment:
    """A recipe at one scale."""

    parts: Mapping[str, Part]
    claims: Sequence[Claim]
    draw: Callable[[Evidence], Figure]
    choices: Sequence[str] = ()  # where the paper is silent, or contradicts itself


@dataclass(frozen=True)
class Less:
    """A recipe made smaller than its scale, which its result then says."""

    epochs: int | None = None
    widths: tuple[float, ...] | None = None
    seeds: int | None = None

    def of(self, part: Part) -> Part:
        """Of the widths asked for, those that the part has, or its narrowest; more epochs than it has are none."""
        changes: dict[str, Any] = {}
        if self.widths is not None:
            changes["widths"] = self._widths(part)
        if self.seeds is not None:
            few = min(self.seeds, part.seeds if isinstance(part, Checking) else len(part.seeds))
            changes["seeds"] = few if isinstance(part, Checking) else part.seeds[:few]
        if self.epochs is not None and not isinstance(part, Checking) and self.epochs < part.config.epochs:
            shorter = min(part.config.warmup, float(self.epochs))
            changes["config"] = part.config.replace(epochs=self.epochs, warmup=shorter)
        return dataclasses.replace(part, **changes)

    def _widths(self, part: Part) -> tuple[float, ...]:
        assert self.widths is not None
        asked = tuple(width for width in part.widths if width in self.widths)
        least = 2 if isinstance(part, Checking) else 1
        return asked if len(asked) >= least else part.widths[:least]

    def options(self) -> list[str]:
        """As the command takes them."""
        widths = None if self.widths is None else ",".join(f"{width:g}" for width in self.widths)
        given = {"--epochs": self.epochs, "--widths": widths, "--seeds": self.seeds}
        return [part for name, value in given.items() if value is not None for part in (name, str(value))]

    def words(self) -> str:
        def most(count: int, what: str) -> str:
            return f"{count} {what}{'s' if count > 1 else ''} at most"

        said = [most(self.epochs, "epoch")] if self.epochs is not None else []
        said += [f"widths {', '.join(f'{width:g}' for width in self.widths)}"] if self.widths is not None else []
        said += [most(self.seeds, "seed")] if self.seeds is not None else []
        return ", ".join(said)


@dataclass(frozen=True)
class Recipe:
    """One figure or table of the paper."""

    name: str  # its label in the paper's source
    where: str  # in the paper, in words
    title: str
    make: Callable[[Scale], Experiment]

    def experiment(self, scale: Scale, less: Less | None = None, device: str = "cpu") -> Experiment:
        made = self.make(scale)
        if less is not None and less.widths is not None:
            there = sorted({width for part in made.parts.values() for width in part.widths})
            if made.parts and not set(there) & set(less.widths):
                shown = ", ".join(f"{width:g}" for width in there)
                raise ReproductionError(f"{self.name}: has none of the widths asked for; its own: {shown}")
        parts = {name: _on(device, part if less is None else less.of(part)) for name, part in made.parts.items()}
        return dataclasses.replace(made, parts=parts)


RECIPES: dict[str, Recipe] = {}


def recipe(
    name: str, where: str, title: str
) -> Callable[[Callable[[Scale], Experiment]], Callable[[Scale], Experiment]]:
    """Registers a function as the recipe of that figure or table."""

    def register(make: Callable[[Scale], Experiment]) -> Callable[[Scale], Experiment]:
        if name in RECIPES:
            raise ReproductionError(f"there are two recipes {name!r}")
        RECIPES[name] = Recipe(name, where, title, make)
        return make

    return register


def key_of(part: Part) -> str:
    """A short name of what is run, wherever it is run: parts that are alike in two recipes are run once."""
    content = part.to_dict()
    content["config"] = {name: value for name, value in content["config"].items() if name != "device"}
    text = json.dumps({"kind": type(part).__name__, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def verdict_of(findings: Sequence[Finding]) -> str:
    """Of a recipe, from those of its claims."""
    found = {finding.verdict for finding in findings}
    if len(found) == 1:
        return found.pop()
    return IN_PART if found & {HOLDS, IN_PART} else FAILS if FAILS in found else UNTOLD


def _on(device: str, part: Part) -> Part:
    return (
        part if part.config.device == device else dataclasses.replace(part, config=part.config.replace(device=device))
    )
