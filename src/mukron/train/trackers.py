"""Trackers: Weights & Biases, MLflow and TensorBoard, which show the numbers of runs.

``tracker=`` (``--tracker``) takes names of ``TRACKERS``, and "MODULE:CLASS" for one of your own. A tracker is called
with the run and then sees it through three methods:

    start(config) -> log(step, metrics), once per epoch -> finish(summary)

``mukron.train.tracking`` makes these calls, and keeps their failures away from the run. Packages are imported when a
tracker is asked for, and none of them is needed otherwise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from mukron.imports import import_function
from mukron.train.errors import RunError

PROJECT = "mukron"  # of W&B, and MLflow's experiment, unless their own environment variables name another
TRACKER_METHODS = ("start", "log", "finish")
MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "pruned": "KILLED"}  # FAILED otherwise


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is called with.

    Attributes:
        name: The run's name: that of its folder, or what a study calls it.
        group: The study that the run belongs to; empty for a run by itself.
        folder: Where the tracker may keep files; None if the run keeps none.
        id: What ``start`` returned before the run was stopped; None at its beginning.

    Example:
        >>> TrackedRun("mlp-w64").id is None
        True
    """

    name: str
    group: str = ""
    folder: Path | None = None
    id: str | None = None


class Tracker(Protocol):
    """What a tracker can do.

    A class of your own needs no base: it is called with a ``TrackedRun``, on the first of several processes alone.
    All calls come from one thread, which is not the main one. An error in any of them drops the tracker with a warning,
    and the run goes on.

    Args:
        run: The run.

    Example:
        >>> class Printed:
        ...     def __init__(self, run):
        ...         self.name = run.name
        ...     def start(self, config):
        ...         print(self.name, config["method"])
        ...     def log(self, step, metrics):
        ...         print(step, sorted(metrics)[:2])
        ...     def finish(self, summary):
        ...         print(summary["status"])
        >>> from mukron.train import RunConfig, train
        >>> run = train(RunConfig(width=64, method="sgd", samples=64, epochs=1), tracker=Printed)
        mlp-w64-sgd-mup sgd
        1 ['epoch', 'lr']
        finished
    """

    def __init__(self, run: TrackedRun) -> None: ...

    def start(self, config: Mapping[str, Any]) -> str | None:
        """Begin the run, or go on with it if ``TrackedRun.id`` is given.

        Args:
            config: The fields of the run's config, as JSON has them.

        Returns:
            The tracker's name of the run, by which it is continued later; None if it needs none.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take an epoch's numbers. Each epoch comes once, in order, also when the run was stopped and continued.

        Args:
            step: Steps taken so far.
            metrics: The numbers of the epoch's row, without those that are not finite.
        """

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run, or this sitting of it.

        Args:
            summary: ``status`` is "finished", "diverged", "interrupted", "failed" (by an error) or "pruned" (by a
                study), ``reason`` says why it is not "finished", ``seconds`` and ``best`` are those of result.json.
        """


TrackerFactory: TypeAlias = Callable[[TrackedRun], Tracker]


class TensorBoard:
    """Event files in the run's folder, under ``tensorboard``.

    Args:
        run: The run.
    """

    modules: ClassVar = ("torch.utils.tensorboard",)
    install = "tensorboard"
    needs_folder = True

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def start(self, config: Mapping[str, Any]) -> str | None:
        """Open the files; the config is written as text at the beginning."""
        from torch.utils.tensorboard import SummaryWriter

        assert self.run.folder is not None
        self.writer: Any = SummaryWriter(str(self.run.folder / "tensorboard"))
        if self.run.id is None:
            self.writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")
        return self.run.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers, so that TensorBoard sees them at once."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the files."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases, whose variables say where: WANDB_PROJECT ("mukron" if it is not set), WANDB_MODE, ...

    A run that the caller has begun by ``wandb.init`` is left alone. What wandb writes goes to the run's folder, unless
    WANDB_DIR names another. Offline, every sitting of a run leaves a folder of its own with the run's id.

    Args:
        run: The run.
    """

    modules: ClassVar = ("wandb",)
    install = "'wandb>=0.19.11'"

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def start(self, config: Mapping[str, Any]) -> str | None:
        """Begin the run, or go on with it by its id."""
        wandb: Any = import_module("wandb")
        folder = None if "WANDB_DIR" in os.environ else self.run.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.tracked: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.run.name,
            group=self.run.group or None,
            id=self.run.id,
            resume="allow",
            dir=folder,
            reinit="create_new",
            settings=wandb.Settings(console="off"),  # what the run prints is the user's
        )
        self.tracked.config.update(dict(config), allow_val_change=True)  # a run may be given more epochs
        return str(self.tracked.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers at this step."""
        self.tracked.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the summary and end the run, as failed if it diverged or failed."""
        self.tracked.summary.update(dict(summary))
        self.tracked.finish(exit_code=1 if summary["status"] in ("diverged", "failed") else 0)


class MLflow:
    """A run of MLflow. Its variables say where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ("mukron" if not set), ...

    The client is used directly, so the caller's active run and experiment are left alone.

    Args:
        run: The run.
    """

    modules: ClassVar = ("mlflow",)
    install = "'mlflow>=2.10'"

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def start(self, config: Mapping[str, Any]) -> str | None:
        """Create the run with the config's fields as its parameters, or go on with it."""
        mlflow: Any = import_module("mlflow")
        self.client = mlflow.MlflowClient()
        if self.run.id is not None:
            self.id = self.run.id
            self.client.update_run(self.id, status="RUNNING")
            return self.id
        tags = {"mukron.group": self.run.group} if self.run.group else {}
        self.id = self.client.create_run(self._experiment(), run_name=self.run.name, tags=tags).info.run_id
        self.client.log_batch(self.id, params=[mlflow.entities.Param(name, value) for name, value in _flat(config)])
        return self.id

    def _experiment(self) -> str:
        """The experiment's number; it is created if it is not there, perhaps by another worker meanwhile."""
        if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return number
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        for last in (False, True):
            found = self.client.get_experiment_by_name(name)
            if found is not None:
                return str(found.experiment_id)
            try:
                return str(self.client.create_experiment(name))
            except Exception:
                if last:
                    raise
        raise AssertionError("the second attempt returns or raises")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers at this step."""
        metric: Any = import_module("mlflow").entities.Metric
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.id, metrics=[metric(name, float(value), now, step) for name, value in metrics.items()]
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary as tags and end the run."""
        for name, value in _flat({"mukron": summary}):
            self.client.set_tag(self.id, name, value)
        self.client.set_terminated(self.id, MLFLOW_STATUS.get(summary["status"], "FAILED"))


TRACKERS: dict[str, TrackerFactory] = {"wandb": WandB, "mlflow": MLflow, "tensorboard": TensorBoard}


@dataclass(frozen=True)
class Trackers:
    """The trackers that a run was asked to have, or all runs of a study in this process.

    Attributes:
        factories: What makes them, by name.
        name: The run's name; empty: that of its folder.
        group: The study.
        folder: Where trackers keep files; None: in the run's folder.
        lost: The names of those that have failed, which are not tried again.
    """

    factories: Mapping[str, TrackerFactory]
    name: str = ""
    group: str = ""
    folder: Path | None = None
    lost: set[str] = field(default_factory=set)

    def check(self, folder: Path | None) -> None:
        """Import what they need.

        Args:
            folder: The run's folder.

        Raises:
            RunError: A package is missing, or a tracker writes files and there is no folder.
        """
        for name, factory in self.factories.items():
            if getattr(factory, "needs_folder", False) and (self.folder or folder) is None:
                raise RunError(f"tracker={name!r} needs a folder to write to")
            for module in getattr(factory, "modules", ()):
                _import(module, name, getattr(factory, "install", module))


def _import(module: str, name: str, install: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise RunError(f"tracker={name!r}: {error}; pip install {install} brings it") from error


TrackerChoice: TypeAlias = str | TrackerFactory | Trackers | Sequence[str | TrackerFactory]


def read_trackers(choice: TrackerChoice) -> Trackers:
    """Read ``tracker=``.

    Args:
        choice: Names of ``TRACKERS``, "MODULE:CLASS", or what makes a tracker when it is called with a ``TrackedRun``;
            one of these or several.

    Returns:
        The trackers by name.

    Raises:
        RunError: A name is unknown, or a class lacks one of a tracker's methods.

    Example:
        >>> list(read_trackers(["wandb", "tensorboard"]).factories)
        ['wandb', 'tensorboard']
    """
    if isinstance(choice, Trackers):
        return choice
    if not isinstance(choice, (str, Sequence)) and not callable(choice):
        raise RunError(f"tracker={choice!r:.80}: expected a name, what makes a tracker, or a list of these")
    several = [choice] if isinstance(choice, str) or callable(choice) else list(choice)
    return Trackers(dict(map(_named, several)))


def _named(choice: str | TrackerFactory) -> tuple[str, TrackerFactory]:
    if isinstance(choice, str):
        name = choice
        if ":" not in name and name not in TRACKERS:
            raise RunError(f"tracker={name!r}: unknown; known: {', '.join(TRACKERS)}, or MODULE:CLASS, one of your own")
        try:
            factory: Any = TRACKERS[name] if name in TRACKERS else import_function(name, "tracker")
        except ValueError as error:
            raise RunError(str(error)) from error
    else:
        factory = choice
        name = f"{getattr(choice, '__module__', '')}:{getattr(choice, '__qualname__', type(choice).__qualname__)}"
    if not callable(factory):
        raise RunError(f"tracker={factory!r:.80}: expected a name, or what makes a tracker when called with a run")
    missing = [method for method in TRACKER_METHODS if not callable(getattr(factory, method, None))]
    if isinstance(factory, type) and missing:
        raise RunError(
            f"tracker={name!r}: the class has no {', '.join(missing)}; a tracker has {', '.join(TRACKER_METHODS)}"
        )
    return name, factory


def _flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested data as text by dotted names; what is empty is left out."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif value not in (None, "", [], ()):
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
