"""The design of a study: which points it consists of, and which one is trained next."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from numbers import Integral, Real
from types import NoneType
from typing import Any

from mukron.arguments import check_type
from mukron.optim.spec import spec_of
from mukron.params import plain_width
from mukron.study.errors import StudyError
from mukron.study.points import Point, read_scheme
from mukron.study.search import PRUNERS, SAMPLERS, propose
from mukron.study.store import ENDED, LOST, RUNNING, WORKER_DIED, Entry
from mukron.train import RunConfig

RETRIES = 10  # new proposals after one that repeats a setting
LARGEST_SEED = 2**31
TRIES = 3  # worker deaths after which a point is no longer tried
Setting = tuple[float, float | None]  # learning rate and damping
Slice = tuple[str, float]  # scheme and width


@dataclass(frozen=True)
class Search:
    """Settings that a sampler of Optuna's proposes one after another, at every width, instead of a grid.

    Attributes:
        trials: Settings per scheme and width; each is trained with every seed.
        sampler: "tpe" or "random".
        pruner: Gives up runs that fall behind: "median", "halving" or "none". Only for one scheme at one width.

    Raises:
        StudyError: There are no trials, or the sampler or the pruner is unknown.

    Example:
        >>> Search(trials=50, pruner="median")
        Search(trials=50, sampler='tpe', pruner='median')
    """

    trials: int = 30
    sampler: str = "tpe"
    pruner: str = "none"

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise StudyError(f"search: trials={self.trials}; expected at least 1")
        for known, name, what in ((SAMPLERS, self.sampler, "sampler"), (PRUNERS, self.pruner, "pruner")):
            if name not in known:
                raise StudyError(f"search: unknown {what} {name!r}; known: {', '.join(known)}")


@dataclass(frozen=True, init=False)
class Design:
    """The runs of a study: widths x schemes x learning rates x dampings x seeds.

    Args:
        config: The run. Its width, learning rate, damping, scheme and seed are replaced by those of the study. The
            default is ``RunConfig()``, an MLP on digits.
        widths: The widths to compare; at least two are needed to determine whether settings transfer.
        lr: The learning rates to try; for a search, the lowest and the highest. A single number is kept fixed.
        damping: The dampings to try, as multiples of the scheme's own damping number; given like ``lr``.
        schemes: Parametrizations with their damping rules, as in "mup" or "sp/heuristic:1e-3". The default is
            ``usual_schemes``: common practice and muP.
        seeds: The number of seeds, or the seeds themselves.
        search: Propose settings by a sampler instead of a grid.
        metric: The column of a run's rows that decides which setting is best.

    Raises:
        StudyError: The study is not possible; the message names the argument.

    Example:
        >>> design = Design(widths=(64, 128), lr=(0.01, 0.02), schemes="mup", seeds=2)
        >>> design.total, design.over
        (8, ('lr',))
    """

    config: RunConfig
    widths: tuple[float, ...]
    schemes: tuple[str, ...]  # in the spelling of ``read_scheme``
    lr: tuple[float, ...]
    damping: tuple[float, ...]
    seeds: tuple[int, ...]
    search: Search | None
    metric: str

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        widths: float | Sequence[float],
        lr: float | Sequence[float],
        damping: float | Sequence[float] = 1.0,
        schemes: str | Sequence[str] | None = None,
        seeds: int | Sequence[int] = 3,
        search: Search | None = None,
        metric: str = "train_loss",
    ) -> None:
        values: dict[str, Any] = {"config": (config := _checked(config))}
        dampings = _read_schemes(schemes, config.method)
        values |= {
            "widths": tuple(sorted({plain_width(width) for width in _numbers("widths", widths)})),
            "schemes": tuple(dampings),
            "lr": tuple(sorted(set(_numbers("lr", lr)))),
            "damping": tuple(sorted(set(_numbers("damping", damping)))),
            "seeds": _read_seeds(seeds),
            "search": search,
            "metric": _text("metric", metric),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check(dampings)

    def _check(self, dampings: Mapping[str, float | None]) -> None:
        """Raise an error if the study is not possible, before anything is run.

        Args:
            dampings: The schemes and their damping numbers.
        """
        if not isinstance(self.search, (Search, type(None))):
            raise StudyError(f"search: expected Search(trials=...), got {self.search!r}")
        if len(self.damping) > 1 and None in dampings.values():
            raise StudyError(f"damping: {self.config.method} has none; it is for second-order methods")
        if len(self.damping) > 1 and 0.0 in dampings.values():
            raise StudyError("damping: multiples of 0 are all 0; give the scheme a damping above 0, as in rescaled:1")
        if self.search is not None and not self.over:
            raise StudyError("search: lr or damping needs two ends, the lowest and the highest to try")
        if self.search is not None and self.search.pruner != "none" and len(self.slices) > 1:
            raise StudyError("search: a pruner compares runs of one width and scheme; this study has several")
        for point in self.grid_corners():
            point.config(self.config)  # raises where the run is not possible

    @property
    def over(self) -> tuple[str, ...]:
        """What is tuned: "lr", "damping" or both."""
        return tuple(name for name in ("lr", "damping") if len(getattr(self, name)) > 1)

    @property
    def slices(self) -> list[Slice]:
        """The pairs of scheme and width; settings are tuned for every pair."""
        return [(scheme, width) for width in self.widths for scheme in self.schemes]

    @property
    def total(self) -> int:
        """The number of runs."""
        settings = len(self.lr) * len(self.damping) if self.search is None else self.search.trials
        return len(self.slices) * settings * len(self.seeds)

    def grid_corners(self) -> Iterator[Point]:
        """The lowest and highest settings of every slice, with the first seed."""
        ends = {(lr, damping) for lr in (self.lr[0], self.lr[-1]) for damping in (self.damping[0], self.damping[-1])}
        for (scheme, width), (lr, damping) in itertools.product(self.slices, ends):
            yield Point(scheme, width, lr, self._rho(scheme, damping), self.seeds[0])

    def points(self, entries: Sequence[Entry]) -> Iterator[Point]:
        """The runs in order: by seed, then by width, so that an incomplete study already has results at every width.

        Args:
            entries: The stored trials.
        """
        return iter(self._of_grid) if self.search is None else _ordered(self, self._tried(entries))

    @cached_property
    def _of_grid(self) -> tuple[Point, ...]:
        return tuple(_ordered(self, self._grid()))

    def next(self, entries: Sequence[Entry], since: int = 0) -> Point | None:
        """Return the first point without a trial; None if there is none for now.

        Args:
            entries: The stored trials.
            since: Number of the first trial whose worker's death counts.
        """
        point = next(self._waiting(entries, since, TRIES), None)
        return self._proposal(self.search, entries) if point is None and self.search is not None else point

    def stack(self, entries: Sequence[Entry], since: int = 0) -> list[Point]:
        """The next point of a grid and all others of its width that could be trained at once with it.

        A point whose worker died is trained on its own: it may be the one that killed the worker.

        Args:
            entries: The stored trials.
            since: Number of the first trial whose worker's death counts.
        """
        if (first := self.next(entries, since)) is None:
            return []
        fresh = [] if self.search is not None else list(self._waiting(entries, since, 1))
        same_width = [point for point in fresh if point.width == first.width]
        return same_width if first in same_width else [first]

    def _waiting(self, entries: Sequence[Entry], since: int, deaths: int) -> Iterator[Point]:
        """Points without a trial, whose workers died fewer than ``deaths`` times."""
        taken = {entry.point for entry in entries if entry.state != LOST}
        died = _deaths(entries, since)
        return (point for point in self.points(entries) if point not in taken and died[point] < deaths)

    def by_state(self, entries: Sequence[Entry]) -> dict[str, list[Entry]]:
        """The trials of this design by their state, the latest one of each point.

        Args:
            entries: The stored trials.
        """
        wanted = set(self.points(entries))
        trials: dict[str, list[Entry]] = {ENDED: [], RUNNING: [], LOST: []}
        for entry in {entry.point: entry for entry in entries if entry.point in wanted}.values():
            trials[entry.state].append(entry)
        return trials

    def deadly(self, entries: Sequence[Entry], since: int) -> list[Point]:
        """Points that are given up because their workers died too often.

        Args:
            entries: The stored trials.
            since: Number of the first trial whose worker's death counts.
        """
        missing = set(self.points(entries)) - {entry.point for entry in entries if entry.state != LOST}
        return [point for point, deaths in _deaths(entries, since).items() if deaths >= TRIES and point in missing]

    def asked(self, point: Point) -> bool:
        """Whether a stored point belongs to this study: settings that are not tuned have the same values.

        A study of the damping and one of the learning rate may share a storage; neither uses the other's points.

        Args:
            point: A stored point.
        """
        if "lr" not in self.over and "damping" in self.over and point.lr not in self.lr:
            return False
        multiples = {self._rho(point.scheme, multiple) for multiple in self.damping}
        return "damping" in self.over or point.damping in multiples

    def _rho(self, scheme: str, multiple: float) -> float | None:
        """A multiple of the scheme's damping number."""
        number = _damping_number(scheme, self.config.method)
        return None if number is None else _plain(number * multiple)

    def ranges(self, scheme: str) -> dict[str, tuple[float, float]]:
        """The lowest and highest learning rate and, where the method has one, damping.

        Args:
            scheme: The scheme, whose damping rule sets the unit.
        """
        ranges = {"lr": (self.lr[0], self.lr[-1])}
        if unit := self._rho(scheme, 1.0):
            ranges["damping"] = (_plain(unit * self.damping[0]), _plain(unit * self.damping[-1]))
        return ranges

    def _grid(self) -> dict[Slice, list[Setting]]:
        return {
            (scheme, width): [(lr, self._rho(scheme, damping)) for lr in self.lr for damping in self.damping]
            for scheme, width in self.slices
        }

    def _tried(self, entries: Sequence[Entry]) -> dict[Slice, list[Setting]]:
        """The settings within the ranges that were tried so far."""
        tried: dict[Slice, dict[Setting, None]] = {}
        for entry in entries:
            point = entry.point
            if point.scheme in self.schemes and self._within(point):
                tried.setdefault((point.scheme, point.width), {})[point.lr, point.damping] = None
        return {where: list(settings) for where, settings in tried.items()}

    def _within(self, point: Point) -> bool:
        ranges = self.ranges(point.scheme)
        return all(low <= (getattr(point, axis) or low) <= high for axis, (low, high) in ranges.items())

    def _proposal(self, search: Search, entries: Sequence[Entry]) -> Point | None:
        """A new setting for the slice that has the fewest, so that all widths advance evenly; None if all are done."""
        tried = self._tried(entries)
        for scheme, width in sorted(self.slices, key=lambda where: len(tried.get(where, ()))):
            known = tried.get((scheme, width), ())
            if len(known) >= search.trials:
                continue
            history = [
                entry
                for entry in entries
                if (entry.point.scheme, entry.point.width) == (scheme, width) and self._within(entry.point)
            ]
            for again in range(RETRIES):  # in a narrow range the sampler may repeat a setting
                lr, damping = propose(search.sampler, self.ranges(scheme), history, self.metric, again)
                setting = _plain(lr), self._rho(scheme, 1.0) if damping is None else _plain(damping)
                if setting not in known:
                    return Point(scheme, width, *setting, self.seeds[0])
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the design as plain data for JSON."""
        axes = {name: list(getattr(self, name)) for name in ("widths", "schemes", "lr", "damping", "seeds")}
        search = None if self.search is None else asdict(self.search)
        return {**axes, "config": self.config.to_dict(), "search": search, "metric": self.metric}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, trust: bool = False) -> Design:
        """Read what ``to_dict`` returned.

        Args:
            data: The plain data.
            trust: As in ``RunConfig.from_dict``.
        """
        axes = {name: tuple(data[name]) for name in ("widths", "schemes", "lr", "damping", "seeds")}
        search = None if data["search"] is None else Search(**data["search"])
        return cls(RunConfig.from_dict(data["config"], trust=trust), search=search, metric=data["metric"], **axes)


def _ordered(design: Design, settings: Mapping[Slice, Sequence[Setting]]) -> Iterator[Point]:
    for seed, (scheme, width) in itertools.product(design.seeds, design.slices):
        for lr, damping in settings.get((scheme, width), ()):
            yield Point(scheme, width, lr, damping, seed)


def _text(name: str, value: str) -> str:
    check_type(name, value, str, "a name")
    return value


def _checked(config: RunConfig | None) -> RunConfig:
    check_type("config", config, (RunConfig, type(None)), "a RunConfig")
    return RunConfig() if config is None else config


def _deaths(entries: Sequence[Entry], since: int) -> Counter[Point]:
    """How often a worker died at each point."""
    dead = [entry for entry in entries if entry.state == LOST and entry.reason == WORKER_DIED]
    return Counter(entry.point for entry in dead if entry.number >= since)


def usual_schemes(method: str) -> tuple[str, ...]:
    """Return the two schemes that a study compares by default: common practice (SP) and muP.

    Args:
        method: A method by its name, as in "kfac" or "shampoo:1/4".

    Returns:
        Schemes as ``Design`` takes them.

    Example:
        >>> usual_schemes("kfac")
        ('sp/heuristic:0.001', 'mup/rescaled:1')
    """
    spec = spec_of(method)
    dampings = {"sp": spec.sp_damping or spec.damping, "mup": spec.damping}
    return tuple(scheme if rule is None else f"{scheme}/{rule.text()}" for scheme, rule in dampings.items())


@cache
def _damping_number(scheme: str, method: str) -> float | None:
    return read_scheme(scheme, method)[1]


def _read_schemes(schemes: str | Sequence[str] | None, method: str) -> dict[str, float | None]:
    """Schemes in their canonical spelling, with their damping numbers."""
    if schemes is None:
        schemes = usual_schemes(method)
    if not isinstance(schemes, str) and not (
        isinstance(schemes, Sequence) and all(isinstance(scheme, str) for scheme in schemes)
    ):
        raise StudyError(f"schemes: expected names, as in mup or sp/heuristic:1e-3, got {schemes!r:.80}")
    dampings = dict(read_scheme(scheme, method) for scheme in ((schemes,) if isinstance(schemes, str) else schemes))
    if not dampings:
        raise StudyError("schemes: expected at least one, as in mup or sp/heuristic:1e-3")
    return dampings


def _read_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    chosen: Sequence[int] = range(int(seeds)) if isinstance(seeds, (int, Integral)) else seeds
    whole = [isinstance(seed, (int, Integral)) and 0 <= seed <= LARGEST_SEED for seed in chosen]
    if not whole or not all(whole):
        raise StudyError(f"seeds: expected whole numbers from 0 to {LARGEST_SEED}, got {seeds}")
    return tuple(sorted({int(seed) for seed in chosen}))


def _numbers(name: str, values: float | Sequence[float]) -> list[float]:
    several: Sequence[float] = (values,) if isinstance(values, (Real, NoneType)) else values  # type: ignore[assignment]
    if not len(several) or not all(isinstance(value, Real) and 0 < value < math.inf for value in several):
        raise StudyError(f"{name}: expected numbers above 0, got {values!r}")
    return [_plain(value) for value in several]


def _plain(number: float) -> float:
    """Round off the last digits, so that 0.1 * 3 and 0.3 are the same point."""
    return float(f"{float(number):.15g}")
