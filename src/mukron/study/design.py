"""What a study asks: which points there are, and which one is next."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any

from mukron.optim.spec import spec_of
from mukron.params import plain_width
from mukron.study.errors import StudyError
from mukron.study.points import Point, read_scheme
from mukron.study.search import PRUNERS, SAMPLERS, propose
from mukron.study.store import ENDED, LOST, RUNNING, WORKER_DIED, Entry
from mukron.train import RunConfig

RETRIES = 10  # proposals that were made before
LARGEST_SEED = 2**31
TRIES = 3  # a point that kills its worker so often is left alone
Setting = tuple[float, float | None]  # learning rate and damping


@dataclass(frozen=True)
class Search:
    """Settings found one after another by a sampler of Optuna's, at each width, instead of a grid."""

    trials: int = 30  # settings a scheme and width; each is trained with every seed
    sampler: str = "tpe"
    pruner: str = "none"  # gives up runs that fall behind; for a search at one width

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise StudyError(f"search: trials={self.trials}; expected at least 1")
        for known, name, what in ((SAMPLERS, self.sampler, "sampler"), (PRUNERS, self.pruner, "pruner")):
            if name not in known:
                raise StudyError(f"search: unknown {what} {name!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class Design:
    """Widths x schemes x learning rates x dampings x seeds of one run's config."""

    config: RunConfig
    widths: tuple[float, ...]
    schemes: tuple[str, ...]  # SCHEME or SCHEME/DAMPING
    lr: tuple[float, ...]  # a grid; in a search the lowest and highest
    damping: tuple[float, ...] = (1.0,)  # times each scheme's own number; likewise
    seeds: tuple[int, ...] = (0, 1, 2)
    search: Search | None = None
    metric: str = "train_loss"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.schemes, str):
            set_(self, "schemes", (self.schemes,))
        if not isinstance(self.search, (Search, type(None))):
            raise StudyError(f"search: expected Search(trials=...), got {self.search!r}")
        set_(self, "widths", tuple(sorted({plain_width(width) for width in _numbers("widths", self.widths)})))
        set_(self, "lr", tuple(sorted(set(_numbers("lr", self.lr)))))
        set_(self, "damping", tuple(sorted(set(_numbers("damping", self.damping)))))
        whole = [isinstance(seed, Integral) and 0 <= seed <= LARGEST_SEED for seed in self.seeds]
        if not whole or not all(whole):
            raise StudyError(f"seeds: expected whole numbers from 0 to {LARGEST_SEED}, got {self.seeds}")
        set_(self, "seeds", tuple(sorted({int(seed) for seed in self.seeds})))
        read = dict(read_scheme(scheme, self.config.method) for scheme in self.schemes)
        if not read:
            raise StudyError("schemes: expected at least one, as in mup or sp/heuristic:1e-3")
        set_(self, "schemes", tuple(read))
        if len(self.damping) > 1 and None in read.values():
            raise StudyError(f"damping: {self.config.method} has none; it is for second-order methods")
        if len(self.damping) > 1 and 0.0 in read.values():
            raise StudyError("damping: multiples of 0 are all 0; give the scheme a damping above 0, as in rescaled:1")
        if self.search is not None and not self.over:
            raise StudyError("search: lr or damping needs two ends, the lowest and the highest to try")
        if self.search is not None and self.search.pruner != "none" and len(self.slices) > 1:
            raise StudyError("search: a pruner compares runs of one width and scheme; this study has several")
        for point in self.grid_corners():
            point.config(self.config)  # refuses what cannot be, before anything is run

    @property
    def over(self) -> tuple[str, ...]:
        """What is tuned."""
        return tuple(name for name in ("lr", "damping") if len(getattr(self, name)) > 1)

    @property
    def slices(self) -> list[tuple[str, float]]:
        """One tuning problem each."""
        return [(scheme, width) for width in self.widths for scheme in self.schemes]

    @property
    def total(self) -> int:
        settings = len(self.lr) * len(self.damping) if self.search is None else self.search.trials
        return len(self.slices) * settings * len(self.seeds)

    def grid_corners(self) -> Iterator[Point]:
        ends = {(lr, damping) for lr in (self.lr[0], self.lr[-1]) for damping in (self.damping[0], self.damping[-1])}
        for (scheme, width), (lr, damping) in itertools.product(self.slices, ends):
            yield Point(scheme, width, lr, self._rho(scheme, damping), self.seeds[0])

    def points(self, entries: Sequence[Entry]) -> Iterator[Point]:
        """In the order they are run: all of the first seed, narrow ones first, so that half a study shows something."""
        settings = self._grid() if self.search is None else self._found(entries)
        for seed, (scheme, width) in itertools.product(self.seeds, self.slices):
            for lr, damping in settings.get((scheme, width), ()):
                yield Point(scheme, width, lr, damping, seed)

    def next(self, entries: Sequence[Entry], since: int = 0) -> Point | None:
        """The first point that nobody has run or runs; None if there is none, for now. Deaths count from ``since``."""
        point = next(self._waiting(entries, since, TRIES), None)
        return self._proposal(self.search, entries) if point is None and self.search is not None else point

    def stack(self, entries: Sequence[Entry], since: int = 0) -> list[Point]:
        """The first point of a grid and all those of its width that could be trained at once with it.

        One whose worker died comes alone: it may have been this one that killed it.
        """
        first = self.next(entries, since)
        fresh = [] if self.search is not None else list(self._waiting(entries, since, 1))
        alike = [point for point in fresh if first is not None and point.width == first.width]
        return alike if first in alike else [] if first is None else [first]

    def _waiting(self, entries: Sequence[Entry], since: int, deaths: int) -> Iterator[Point]:
        """Points that nobody has run or runs, and whose workers died less often than so."""
        taken = {entry.point for entry in entries if entry.state != LOST}
        died = self._deaths(entries, since)
        return (point for point in self.points(entries) if point not in taken and died[point] < deaths)

    def standing(self, entries: Sequence[Entry]) -> dict[str, list[Entry]]:
        """The trials of this design by their state, one a point."""
        wanted = set(self.points(entries))
        found: dict[str, list[Entry]] = {ENDED: [], RUNNING: [], LOST: []}
        for entry in {entry.point: entry for entry in entries if entry.point in wanted}.values():
            found[entry.state].append(entry)
        return found

    def deadly(self, entries: Sequence[Entry], since: int) -> list[Point]:
        """Points whose workers died too often, and that nobody has trained since."""
        missing = set(self.points(entries)) - {entry.point for entry in entries if entry.state != LOST}
        return [point for point, deaths in self._deaths(entries, since).items() if deaths >= TRIES and point in missing]

    def asked(self, point: Point) -> bool:
        """Whether a stored point belongs to this question: what is not tuned has the value that it has here.

        A study of the damping may share its trials with one of the learning rate; it is judged by its own.
        """
        if "lr" not in self.over and "damping" in self.over and point.lr not in self.lr:
            return False
        multiples = {self._rho(point.scheme, multiple) for multiple in self.damping}
        return "damping" in self.over or point.damping in multiples

    def _deaths(self, entries: Sequence[Entry], since: int) -> Counter[Point]:
        dead = [entry for entry in entries if entry.state == LOST and entry.reason == WORKER_DIED]
        return Counter(entry.point for entry in dead if entry.number >= since)

    def _rho(self, scheme: str, multiple: float) -> float | None:
        """A multiple of the scheme's own damping number."""
        number = own_number(scheme, self.config.method)
        return None if number is None else _plain(number * multiple)

    def ranges(self, scheme: str) -> dict[str, tuple[float, float]]:
        """The lowest and highest that are tried."""
        ranges = {"lr": (self.lr[0], self.lr[-1])}
        if unit := self._rho(scheme, 1.0):
            ranges["damping"] = (_plain(unit * self.damping[0]), _plain(unit * self.damping[-1]))
        return ranges

    def _grid(self) -> dict[tuple[str, float], list[Setting]]:
        return {
            (scheme, width): [(lr, self._rho(scheme, damping)) for lr in self.lr for damping in self.damping]
            for scheme, width in self.slices
        }

    def _found(self, entries: Sequence[Entry]) -> dict[tuple[str, float], list[Setting]]:
        """The settings within the ranges that were tried so far."""
        found: dict[tuple[str, float], dict[Setting, None]] = {}
        for entry in entries:
            point = entry.point
            if point.scheme in self.schemes and self._within(point):
                found.setdefault((point.scheme, point.width), {})[point.lr, point.damping] = None
        return {where: list(settings) for where, settings in found.items()}

    def _within(self, point: Point) -> bool:
        ranges = self.ranges(point.scheme)
        return all(low <= (getattr(point, axis) or low) <= high for axis, (low, high) in ranges.items())

    def _proposal(self, search: Search, entries: Sequence[Entry]) -> Point | None:
        found = self._found(entries)
        for scheme, width in sorted(self.slices, key=lambda where: len(found.get(where, ()))):  # widths side by side
            if len(found.get((scheme, width), ())) >= search.trials:
                continue
            known = found.get((scheme, width), ())
            history = [
                entry
                for entry in entries
                if (entry.point.scheme, entry.point.width) == (scheme, width) and self._within(entry.point)
            ]
            for again in range(RETRIES):  # a narrow range has few numbers
                lr, damping = propose(search.sampler, self.ranges(scheme), history, self.metric, again)
                setting = _plain(lr), self._rho(scheme, 1.0) if damping is None else _plain(damping)
                if setting not in known:
                    return Point(scheme, width, *setting, self.seeds[0])
        return None

    def to_dict(self) -> dict[str, Any]:
        axes = {name: list(getattr(self, name)) for name in ("widths", "schemes", "lr", "damping", "seeds")}
        search = None if self.search is None else asdict(self.search)
        return {**axes, "config": self.config.to_dict(), "search": search, "metric": self.metric}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Design:
        axes = {name: tuple(data[name]) for name in ("widths", "schemes", "lr", "damping", "seeds")}
        search = None if data["search"] is None else Search(**data["search"])
        return cls(RunConfig.from_dict(data["config"]), search=search, metric=data["metric"], **axes)


def usual_schemes(method: str) -> tuple[str, ...]:
    """What people do today, against muP."""
    spec = spec_of(method)
    dampings = {"sp": spec.sp_damping or spec.damping, "mup": spec.damping}
    return tuple(scheme if rule is None else f"{scheme}/{rule.text()}" for scheme, rule in dampings.items())


@cache
def own_number(scheme: str, method: str) -> float | None:
    return read_scheme(scheme, method)[1]


def _numbers(name: str, values: Sequence[float]) -> list[float]:
    if not len(values) or not all(isinstance(value, Real) and 0 < value < math.inf for value in values):
        raise StudyError(f"{name}: expected numbers above 0, got {values!r}")
    return [_plain(value) for value in values]


def _plain(number: float) -> float:
    """The number that a person would write: 0.1 * 3 and 0.3 are one point."""
    return float(f"{float(number):.15g}")
