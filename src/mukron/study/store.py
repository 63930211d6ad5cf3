"""The storage of a study: an Optuna storage, SQLite in a file or PostgreSQL for several machines.

A point of the study is a trial in Optuna. The next point is chosen under a lock that all workers share, so
every point is trained once, however many workers there are:

    lock -> fail trials without heartbeats -> which points have no trial? -> create a trial for the first -> unlock

A worker that trains many points at once creates several trials.

A worker that was killed leaves a trial without heartbeats, which fails after ``GRACE`` seconds. Its point then has no
trial, and another worker trains it. There is no queue that could be out of date.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mukron.params.storage import sealed, unsealed
from mukron.study.database import UnreachableError, checked_address, open_rdb, optuna_package, readable, storage_errors
from mukron.study.errors import StudyError
from mukron.study.points import POINT_FIELDS, Point, Result, lowest_is_best
from mukron.study.presence import Presence
from mukron.train import RunConfig
from mukron.train.records import FINISHED
from mukron.train.rows import EpochRow
from mukron.typed import read_as
from mukron.workers.locks import locked, wait_for

P = ParamSpec("P")
T = TypeVar("T")
RETRY_SECONDS = 60  # how long to retry while a database is unreachable
BEAT, GRACE = 15, 60  # seconds between two heartbeats of a trial; seconds without one after which it is lost
RUNNING, ENDED, LOST = "running", "ended", "lost"
NOT_COMPARED = (*POINT_FIELDS, "device")  # fields that may differ between runs of one study; workers choose the device
WORKER_DIED = "its worker died"
QUESTION = "mukron"  # the attribute that holds what a study trains
TOOK = "seconds"  # the attribute that holds how long a trial took; Optuna takes differences of local times


@dataclass(frozen=True)
class Entry:
    """A trial as a study sees it."""

    number: int
    point: Point
    state: str  # "running", "ended", or "lost": by its worker's death, an error or Ctrl-C
    result: Result | None = None
    reason: str = ""  # why it was lost
    seconds: float = 0.0  # how long the trial took; of a stack, divided by its size
    together: int = 1  # the number of trials that were trained together in a stack


@dataclass(frozen=True)
class ClaimedPoint:
    """A point that this worker has claimed, so that no other worker trains it."""

    point: Point
    trial: Any  # Optuna's
    trial_id: int
    began: float = field(default_factory=time.monotonic)


def _patient(act: Callable[P, T]) -> Callable[P, T]:
    """Retry a method of a store for ``RETRY_SECONDS``, so that a restart of the database does not end the study."""

    @wraps(act)
    def with_retries(*args: P.args, **kwargs: P.kwargs) -> T:
        url, end = args[0].url, time.monotonic() + RETRY_SECONDS  # type: ignore[attr-defined]
        while True:
            try:
                with storage_errors(url):
                    return act(*args, **kwargs)
            except UnreachableError:  # noqa: PERF203
                if time.monotonic() > end or url.startswith("sqlite"):
                    raise
                time.sleep(1)

    return with_retries


class Store:
    """A study in a storage: opened if it exists, created if not. A study that trains something else is refused."""

    def __init__(
        self, url: str, name: str, config: RunConfig, metric: str, *, beat: int = BEAT, grace: int = GRACE
    ) -> None:
        self.url, self.name, self.beat, self.grace = checked_address(url), name, beat, grace
        self.presence = Presence(self.url, name)
        weakref.finalize(self, self.presence.leave)
        self._ended: dict[int, Entry] = {}
        with storage_errors(self.url), self.exclusive():  # one process creates the tables
            with readable(self.url):
                self._rdb = open_rdb(self.url, beat, grace)
                weakref.finalize(self, self._rdb.engine.dispose)  # closes connections
                self._open(config, metric)
                self._storage = self.study._storage  # caches trials that have ended, as ``_rdb`` does not
                self._id = self._rdb.get_study_id_from_name(name)
            self.presence.enter()

    def _open(self, config: RunConfig, metric: str) -> None:
        """Store the config and metric, or compare them with the stored ones.

        A study of something else is replaced if nothing was trained and nobody has it open: a wrong request left it.
        """
        optuna = optuna_package()
        states = optuna.trial.TrialState
        direction = "minimize" if lowest_is_best(metric) else "maximize"
        wanted = {"study_name": self.name, "storage": self._rdb, "direction": direction, "load_if_exists": True}
        self.study = optuna.create_study(**wanted)
        stored = self._question()
        different = {} if stored is None else self._differences(stored["config"], config)
        if stored is not None and (different or stored["metric"] != metric):
            trained = (states.COMPLETE, states.PRUNED, states.RUNNING)
            if not self.study.get_trials(deepcopy=False, states=trained) and self.presence.alone():
                optuna.delete_study(study_name=self.name, storage=self._rdb)
                self.study, stored, different = optuna.create_study(**wanted), None, {}
        if different:
            listed = ", ".join(f"{field} {old!r} there and {new!r} here" for field, (old, new) in different.items())
            raise StudyError(f"{self._place} trains something else: {listed}. Choose another folder (folder=, --out)")
        if stored is None:
            if any("point" in trial.user_attrs for trial in self.study.get_trials(deepcopy=False)):
                raise ValueError("there are trials, but not what they train")
            stored = {"config": config.to_dict(), "metric": metric}
            self.study.set_user_attr(QUESTION, sealed(stored))
        if (self.study.direction.name == "MINIMIZE") != lowest_is_best(stored["metric"]):
            raise ValueError(f"it is to {self.study.direction.name.lower()} {stored['metric']}")
        self._stored, self.metric = self._question(), stored["metric"]

    def _question(self) -> Any:
        return unsealed(self.study.user_attrs.get(QUESTION), "the study's config")

    @property
    def _place(self) -> str:
        """Where the study is, for messages: its folder if that has nothing else, or its name in a database."""
        from sqlalchemy import make_url

        file = Path(make_url(self.url).database or "")
        in_folder = self.url.startswith("sqlite") and file.stem == self.name
        return f"the study in {file.parent}" if in_folder else f"study {self.name!r}"

    def _differences(self, stored: Any, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        fields = RunConfig.from_dict(stored, f"study {self.name}").differences(config)
        return {field: values for field, values in fields.items() if field not in NOT_COMPARED}

    def _check_that_it_is_there(self) -> None:
        """Refuse to go on if another command has replaced this study, which trained nothing, by its own."""
        try:
            stored = self._question()
        except KeyError:  # no study has this number any more
            stored = None
        if stored != self._stored:
            raise StudyError(f"study {self.name!r} was replaced by another command. Choose another folder (--out)")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the study's lock, which one worker on any machine has at a time; it is released if its process dies."""
        from sqlalchemy import make_url, text

        if self.url.startswith("sqlite"):
            with locked(Path(f"{make_url(self.url).database}.lock")):
                yield
            return
        with self._locks.begin() as connection:
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))  # if a machine dies
            ask, name = text("SELECT pg_try_advisory_xact_lock(hashtext(:name))"), {"name": f"mukron {self.name}"}
            wait_for(lambda: bool(connection.execute(ask, name).scalar()), f"study {self.name!r}")
            yield

    @cached_property
    def _locks(self) -> Any:
        from sqlalchemy import NullPool, create_engine

        return create_engine(self.url, poolclass=NullPool)

    # Trials.

    @_patient
    def entries(self) -> list[Entry]:
        """All trials, in the order in which they began."""
        with readable(self.url):
            trials = self.study.get_trials(deepcopy=False)
            return [entry for trial in trials if (entry := self._entry(trial)) is not None]

    def _entry(self, trial: Any) -> Entry | None:
        if trial.number in self._ended:
            return self._ended[trial.number]
        attributes = trial.user_attrs
        if "point" not in attributes:  # a trial that another program added to the study
            return None
        place = f"trial {trial.number}"
        point: Point = read_as(Point, unsealed(attributes["point"], place), place)
        together = read_as(int, attributes.get("together", 1), f"{place}: together")
        if not trial.state.is_finished():
            return Entry(trial.number, point, RUNNING, together=together)
        seconds = max(0.0, read_as(float, attributes.get(TOOK, 0.0), f"{place}: {TOOK}")) / max(1, together)
        if "result" in attributes and trial.state.name != "FAIL":
            result = Result.from_dict({**asdict(point), **unsealed(attributes["result"], place)})
            entry = Entry(trial.number, point, ENDED, result, seconds=seconds, together=together)
        else:
            reason = attributes.get("reason", WORKER_DIED)
            entry = Entry(trial.number, point, LOST, reason=reason, seconds=seconds, together=together)
        self._ended[trial.number] = entry
        return entry

    # Operations of a worker.

    def claim(self, choose: Callable[[Sequence[Entry]], Point | None]) -> ClaimedPoint | None:
        """Claim the point that ``choose`` returns, given all trials; None if it returns none."""

        def choose_one(entries: Sequence[Entry]) -> list[Point]:
            point = choose(entries)
            return [] if point is None else [point]

        return next(iter(self.claim_many(choose_one)), None)

    @_patient
    def claim_many(self, choose: Callable[[Sequence[Entry]], Sequence[Point]]) -> list[ClaimedPoint]:
        """Claim the points that ``choose`` returns, given all trials."""
        with self.exclusive():
            self.presence.enter()
            self._check_that_it_is_there()
            self._fail_dead_trials()
            points = choose(self.entries())
            return [self._claim(point, len(points)) for point in points]

    def _claim(self, point: Point, together: int) -> ClaimedPoint:
        optuna = optuna_package()
        attributes = {"scheme": point.scheme, "point": sealed(asdict(point)), "worker": f"{_host()}:{os.getpid()}"}
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params=(params := _params(point)),
            distributions={name: _distribution(optuna, name, value) for name, value in params.items()},
            user_attrs=attributes if together == 1 else {**attributes, "together": together},
        )
        # The first heartbeat comes before the trial runs: a worker killed between these lines leaves no running trial.
        trial_id = self._storage.create_new_trial(self._id, template_trial=template)
        self._rdb.record_heartbeat(trial_id)
        self._storage.set_trial_state_values(trial_id, optuna.trial.TrialState.RUNNING)
        return ClaimedPoint(point, optuna.trial.Trial(self.study, trial_id), trial_id)

    def _fail_dead_trials(self) -> None:
        """Fail the trials whose workers have died."""
        optuna = optuna_package()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        waiting = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
        for trial in waiting:  # trials wait only while their worker holds the lock, which this process holds now
            if "point" in trial.user_attrs:
                self._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)

    @contextmanager
    def alive(self, *claims: ClaimedPoint) -> Iterator[None]:
        """Record heartbeats of these trials until the block ends."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self.beat):
                for claim in claims:
                    with suppress(Exception):  # the next one may succeed; if none does, the trial counts as lost
                        self._rdb.record_heartbeat(claim.trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @_patient
    def report(self, claim: ClaimedPoint, value: float, epoch: int) -> None:
        """Report the metric after an epoch, for the dashboard and for pruners."""
        with _unless_lost(claim, self.grace):
            claim.trial.report(value, epoch)

    @_patient
    def fell_behind(self, claim: ClaimedPoint) -> bool:
        """Whether the study's pruner would prune the trial."""
        with _unless_lost(claim, self.grace):  # some pruners store what they have seen
            return bool(claim.trial.should_prune())
        return False

    def end(self, claim: ClaimedPoint, status: str, rows: Sequence[EpochRow], reason: str, seconds: float) -> None:
        """Store a run's result. A run that diverged has no value and is marked as pruned in Optuna."""
        states = optuna_package().trial.TrialState
        content = {"status": status, "reason": reason, "seconds": seconds, "rows": [dict(row) for row in rows]}
        value = rows[-1].get(self.metric) if rows and status == FINISHED else None
        if status == FINISHED and value is None:
            known = ", ".join(name for name in (rows[-1] if rows else {}) if name not in ("epoch", "step", "seconds"))
            raise StudyError(f"metric {self.metric!r}: runs of this study do not have it; they have {known}")
        self._close(claim, states.COMPLETE if status == FINISHED else states.PRUNED, value, "result", sealed(content))

    def give_up(self, claim: ClaimedPoint, reason: str) -> None:
        """Fail the trial, so that its point can be claimed again."""
        self._close(claim, optuna_package().trial.TrialState.FAIL, None, "reason", reason)

    @_patient
    def give_up_of(self, worker: int, reason: str = WORKER_DIED) -> bool:
        """Give up all points of a process of this machine that has ended; return whether it had any."""
        states = optuna_package().trial.TrialState
        with self.exclusive():
            trials = [
                trial
                for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING,))
                if trial.user_attrs.get("worker") == f"{_host()}:{worker}"
            ]
            for trial in trials:
                self._storage.set_trial_user_attr(trial._trial_id, "reason", reason)
                self._storage.set_trial_state_values(trial._trial_id, states.FAIL)
        return bool(trials)

    @_patient
    def _close(self, claim: ClaimedPoint, state: Any, value: float | None, attribute: str, content: Any) -> None:
        """End the trial, unless it was marked as lost meanwhile: another worker then trains the point."""
        with _unless_lost(claim, self.grace):
            self._storage.set_trial_user_attr(claim.trial_id, attribute, content)
            self._storage.set_trial_user_attr(claim.trial_id, TOOK, time.monotonic() - claim.began)
            self._storage.set_trial_state_values(claim.trial_id, state, None if value is None else [value])


@contextmanager
def _unless_lost(claim: ClaimedPoint, grace: int) -> Iterator[None]:
    """Drop what comes too late: others gave the trial up, since this worker did not run for a while."""
    try:
        yield
    except optuna_package().exceptions.UpdateFinishedTrialError:
        warnings.warn(
            f"{claim.point.text()}: this worker gave no sign of life for more than {grace} s (it was paused, "
            "or the clock was set), so its trial was given up; what it reports of the trial is dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def _params(point: Point) -> dict[str, Any]:
    """A trial's parameters in Optuna. The scheme is an attribute, since a parameter cannot get new choices."""
    params = {"width": float(point.width), "lr": point.lr, "seed": point.seed}
    return {**params, "damping": point.damping} if point.damping else params


def _distribution(optuna: Any, name: str, value: float) -> Any:
    if name == "seed":
        return optuna.distributions.IntDistribution(0, 2**31)
    return optuna.distributions.FloatDistribution(min(1e-12, value), max(1e12, value), log=True)


def _host() -> str:
    import socket

    return socket.gethostname()
