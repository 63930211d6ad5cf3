"""What the commands ``mukron tune``, ``mukron transfer`` and ``mukron plan`` do, as functions.

They are ``mukron.tune``, ``mukron.transfer`` and ``mukron.plan``. They take what the commands take, under the names of
their options. Fields of a run, which have options of their own or ``--set FIELD=VALUE``, are keyword arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from mukron import figures
from mukron.arguments import check_type
from mukron.data import Dataset
from mukron.imports import path_of
from mukron.optim.prediction import RanksPrediction
from mukron.optim.shapes import NetworkShapes
from mukron.readers import nearest
from mukron.report import write_report
from mukron.study.design import Search
from mukron.study.errors import StudyError
from mukron.study.functions import (
    FolderPath,
    best_run,
    load_study,
    scheme_of,
    study_run,
    transfer_study,
    tuning_study,
)
from mukron.study.planning import WidePlan, plan_for
from mukron.study.progress import StudyProgress
from mukron.study.ranks import OwnNetwork, plan_for_ranks
from mukron.study.record import StudyRecord
from mukron.study.transfer import TrackerName
from mukron.train import RunConfig

__all__ = ["plan", "transfer", "tune"]

StudyListener = Callable[[StudyProgress], None] | bool | None

FIELDS = tuple(field.name for field in dataclasses.fields(RunConfig))
FUNCTION_FIELDS = ("model", "data", "loss")  # of a run, which may be functions of the user's
# Arguments of ``plan``.
PLAN_OF_STUDY = ("tuned", "scheme", "tuned_at", "device", "steps", "dataset", "data_dir", "trust")
PLAN_OF_RANKS = (
    *("model", "factory", "shapes", "model_options", "sample", "method", "method_options"),
    *("batch", "positions", "sharding", "communication", "bandwidth", "speed"),
)


def tune(
    width: float,
    *,
    trials: int = 50,
    factory: OwnNetwork | None = None,
    scheme: str | None = None,
    lr: float | Sequence[float] | None = None,
    damping: float | Sequence[float] | None = None,
    seeds: int = 1,
    sampler: str = "tpe",
    pruner: str = "median",
    metric: str = "train_loss",
    config: RunConfig | None = None,
    folder: FolderPath = "tuned",
    storage: str | None = None,
    name: str | None = None,
    workers: int | str = "auto",
    keep_runs: bool = False,
    tracker: TrackerName | Sequence[TrackerName] = (),
    report: bool = True,
    data_dir: FolderPath | None = None,
    progress: StudyListener = None,
    **fields: Any,
) -> StudyRecord:
    """Search for the best learning rate and damping at a narrow width, as ``mukron tune`` does.

    Called again with the same folder it continues the search; more trials extend it.

    Args:
        width: The narrow width to tune at.
        trials: The number of settings to try.
        factory: Your own network, a function of the width in a module, or its "MODULE:FUNCTION".
        scheme: SCHEME or SCHEME/DAMPING to tune in; by default that of ``config``, or muP.
        lr: The lowest and the highest learning rate; by default the method's usual ones.
        damping: The lowest and the highest damping, as multiples of the scheme's own; a single number is not tuned.
        seeds: The number of seeds.
        sampler: "tpe" or "random".
        pruner: Of runs that fall behind: "median", "halving" or "none".
        metric: What decides which setting is best.
        config: The run to begin with, in place of the usual one.
        folder: Where the study is kept, for ``plan``.
        storage: postgresql://USER@HOST/DATABASE, to share the study with other machines; password: ~/.pgpass.
        name: The study's name in ``storage``; by default it is derived from the folder.
        workers: The number of processes; "auto": one on each GPU, or this one alone. See ``TransferStudy.run``.
        keep_runs: Also keep every run's records and checkpoints.
        tracker: "wandb", "mlflow", "tensorboard", a class of your own in a module, or several: they get all runs.
        report: Write figures and report.html to the folder.
        data_dir: Where data sets are kept.
        progress: Called with the study's progress. None: a bar on a terminal and in notebooks; False: none.
        fields: Other fields of the run, as ``RunConfig`` has them, such as ``model``, ``data`` and ``method``. Your own
            functions are defined in a module, since other processes import them by their names.

    Returns:
        The record of the study; ``best()`` is the best run.

    Raises:
        ValueError: The request is wrong; the message names the argument.

    Example:
        >>> import mukron
        >>> record = mukron.tune(16, trials=2, method="sgd", epochs=1, samples=128, folder="tuned-sgd", report=False)
        >>> len(record.results)
        2
    """
    run = study_run(config, _fields(tune, config, factory, fields), width)
    study = tuning_study(
        run,
        *(width, trials, scheme or (None if config is None else scheme_of(config)), lr, damping, seeds),
        *(sampler, pruner, metric, folder),
        storage=storage,
        name=name,
        keep_runs=keep_runs,
        tracker=tracker,
        data_dir=data_dir,
    )
    record = study.run(workers, progress)
    if report:
        _write_report(record, study.folder)
    return record


def transfer(
    *,
    widths: Sequence[float] | None = None,
    over: str = "lr",
    factory: OwnNetwork | None = None,
    schemes: str | Sequence[str] | None = None,
    lr: float | Sequence[float] | None = None,
    damping: float | Sequence[float] | None = None,
    seeds: int = 3,
    search: int | None = None,
    sampler: str = "tpe",
    metric: str = "train_loss",
    config: RunConfig | None = None,
    folder: FolderPath | None = None,
    storage: str | None = None,
    name: str | None = None,
    workers: int | str = "auto",
    keep_runs: bool = False,
    tracker: TrackerName | Sequence[TrackerName] = (),
    one_by_one: bool = False,
    report: bool = True,
    data_dir: FolderPath | None = None,
    progress: StudyListener = None,
    **fields: Any,
) -> StudyRecord:
    """Train at several widths and test whether the best setting stays the same, as ``mukron transfer`` does.

    Called again with the same folder it continues the study; more widths, learning rates or seeds extend it.

    Args:
        widths: The widths; by default 1, 2, 4 and 8 times the base width.
        over: What is tuned: "lr", "damping" or "lr,damping".
        factory: Your own network, a function of the width in a module, or its "MODULE:FUNCTION".
        schemes: SCHEME or SCHEME/DAMPING, one or several; by default usual practice and muP, or that of ``config``.
        lr: The learning rates; by default the method's usual ones.
        damping: The dampings, as multiples of the scheme's own.
        seeds: The number of seeds.
        search: The number of settings per width, proposed by a sampler instead of a grid.
        sampler: That of ``search``: "tpe" or "random".
        metric: What decides which setting is best.
        config: The run to begin with, in place of the usual one.
        folder: Where the study is kept; by default in "studies".
        storage: postgresql://USER@HOST/DATABASE, to share the study with other machines; password: ~/.pgpass.
        name: The study's name in ``storage``; by default it is derived from the folder.
        workers: The number of processes; "auto": one on each GPU, or this one alone. See ``TransferStudy.run``.
        keep_runs: Also keep every run's records and checkpoints.
        tracker: "wandb", "mlflow", "tensorboard", a class of your own in a module, or several: they get all runs.
        one_by_one: Do not train many narrow networks at once.
        report: Write figures and report.html to the folder.
        data_dir: Where data sets are kept.
        progress: Called with the study's progress. None: a bar on a terminal and in notebooks; False: none.
        fields: Other fields of the run, as ``RunConfig`` has them, such as ``model``, ``data`` and ``method``. Your own
            functions are defined in a module, since other processes import them by their names.

    Returns:
        The record of the study with its certificate.

    Raises:
        ValueError: The request is wrong; the message names the argument.

    Example:
        >>> import mukron
        >>> small = {"method": "sgd", "epochs": 1, "samples": 128, "base_width": 16, "report": False}
        >>> record = mukron.transfer(widths=(16, 32), lr=(0.1, 0.2, 0.4), schemes="mup", seeds=1, folder="s", **small)
        >>> record.certificate.judgements[0].axis
        'lr'
    """
    run = study_run(config, _fields(transfer, config, factory, fields), None, widths)
    study = transfer_study(
        run,
        *(widths, over, schemes or (None if config is None else scheme_of(config)), lr, damping, seeds),
        *(None if search is None else Search(search, sampler), metric, folder),
        storage=storage,
        name=name,
        keep_runs=keep_runs,
        tracker=tracker,
        one_by_one=one_by_one,
        data_dir=data_dir,
    )
    record = study.run(workers, progress)
    if record.certificate is None:
        raise StudyError("only runs of one width have ended, so there is nothing to compare")
    if report:
        _write_report(record, study.folder)
    return record


@overload
def plan(
    width: float,
    tuned: StudyRecord | RunConfig | FolderPath = "tuned",
    *,
    scheme: str | None = None,
    tuned_at: float | None = None,
    device: str | None = None,
    steps: int = 3,
    dataset: Dataset | None = None,
    data_dir: FolderPath | None = None,
    trust: bool = False,
) -> WidePlan: ...


@overload
def plan(
    width: float | None = None,
    *,
    ranks: int,
    model: str | None = None,
    factory: OwnNetwork | None = None,
    shapes: str | NetworkShapes | None = None,
    model_options: Mapping[str, Any] | None = None,
    sample: Sequence[int] | None = None,
    method: str = "kfac",
    method_options: Mapping[str, Any] | None = None,
    batch: int,
    positions: int | None = None,
    sharding: str = "ddp",
    communication: str = "auto",
    bandwidth: float | None = None,
    speed: float | None = None,
) -> RanksPrediction: ...


def plan(
    width: float | None = None,
    tuned: StudyRecord | RunConfig | FolderPath = "tuned",
    *,
    scheme: str | None = None,
    tuned_at: float | None = None,
    device: str | None = None,
    steps: int = 3,
    dataset: Dataset | None = None,
    data_dir: FolderPath | None = None,
    trust: bool = False,
    ranks: int | None = None,
    model: str | None = None,
    factory: OwnNetwork | None = None,
    shapes: str | NetworkShapes | None = None,
    model_options: Mapping[str, Any] | None = None,
    sample: Sequence[int] | None = None,
    method: str = "kfac",
    method_options: Mapping[str, Any] | None = None,
    batch: int | None = None,
    positions: int | None = None,
    sharding: str = "ddp",
    communication: str = "auto",
    bandwidth: float | None = None,
    speed: float | None = None,
) -> WidePlan | RanksPrediction:
    """Turn settings tuned at a narrow width into those of a wide network, as ``mukron plan`` does.

    With ``ranks``: predict what a step of a network in many processes costs, without a study and without building it.
    Then ``width``, ``batch`` and one of ``model``, ``factory`` and ``shapes`` say of which network.

    Args:
        width: The width to train at.
        tuned: The record of a study, its folder, or a run.
        scheme: The scheme to choose from the study: SCHEME or SCHEME/DAMPING.
        tuned_at: The width of the study whose best run is taken; by default the narrowest.
        device: The device to measure on; by default that of the run.
        steps: How many steps to measure at that width; 0 measures nothing.
        dataset: The run's data, if it is loaded already.
        data_dir: Where data sets are kept.
        trust: Whether "module:function" in the files of a study may be imported.
        ranks: Plan for so many processes instead: what travels, who owns what, time and memory.
        model: With ``ranks``: a built-in network by name.
        factory: With ``ranks``: your own network, a function of the width, or its "MODULE:FUNCTION".
        shapes: With ``ranks``: a network of known shapes, "llama-7b", "llama-13b" or "llama-70b", or the shapes.
        model_options: With ``ranks``: other arguments of the network.
        sample: With ``ranks``: the shape of a sample, as in (3, 32, 32), where layers see different positions.
        method: With ``ranks``: "kfac", "foof" or "gauss-newton".
        method_options: With ``ranks``: options of the method, as in {"factor_every": 10}.
        batch: With ``ranks``: samples of all ranks together.
        positions: With ``ranks``: positions of a sample that share each weight: tokens of a sequence; by default the
            usual number of a built-in network of tokens, and 1 for one without tokens.
        sharding: With ``ranks``: "ddp" (DistributedDataParallel), "fsdp" (fully_shard), or "plain" (the optimizer
            averages gradients).
        communication: With ``ranks``: how curvature travels: "auto", "rows", "owner" or "factors".
        bandwidth: With ``ranks``: bytes a second that arrive on a rank; by default 5e10.
        speed: With ``ranks``: multiplications a second of a rank; by default 5e13.

    Returns:
        The plan: its settings, the cost of a step, and the code. With ``ranks``: the prediction.

    Raises:
        ValueError: The request is wrong; the message names the argument.

    Example:
        >>> import mukron
        >>> from mukron.train import RunConfig
        >>> tuned = RunConfig(method="kfac", width=16, base_width=16, lr=0.1, samples=64)
        >>> mukron.plan(64, tuned, steps=0).config.width
        64
        >>> prediction = mukron.plan(ranks=64, shapes="llama-7b", batch=512, positions=2048, sharding="fsdp")
        >>> prediction.total < 2 * prediction.sgd
        True
    """
    given = _given(plan, locals())
    if ranks is not None:
        if wrong := [name for name in PLAN_OF_STUDY if name in given]:
            raise StudyError(f"{', '.join(wrong)}: of a plan from a study; leave out ranks=")
        return plan_for_ranks(ranks, width=width, **{name: given[name] for name in PLAN_OF_RANKS if name in given})
    if wrong := [name for name in PLAN_OF_RANKS if name in given]:
        raise StudyError(f"{', '.join(wrong)}: needs ranks=, the number of processes; a plan from a study has its own")
    if width is None:
        raise StudyError("width= is missing: the width to train at")
    if isinstance(tuned, RunConfig):
        if scheme is not None or tuned_at is not None:
            raise StudyError("scheme= and tuned_at= choose a run of a study; tuned= is a run already")
        run = tuned
    else:
        check_type("tuned", tuned, (StudyRecord, str, os.PathLike), "the record of a study, its folder or a run")
        run, _ = best_run(tuned if isinstance(tuned, StudyRecord) else load_study(tuned), scheme, tuned_at)
    run = (run.trusted() if trust else run).replace(**({} if device is None else {"device": device}))
    return plan_for(run, width, dataset=dataset, data_dir=data_dir, steps=steps)


def _given(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not the defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: arguments[name] for name, default in defaults.items() if not _same(arguments[name], default)}


def _same(value: object, default: object) -> bool:
    return value is default or (isinstance(value, (int, str)) and value == default)


def _fields(
    function: Callable[..., Any], config: object, factory: OwnNetwork | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of the run, with functions by the names that they can be imported by."""
    if not isinstance(config, (RunConfig, type(None))):
        raise StudyError(f"config={config!r:.80}: expected a RunConfig; RunConfig.load(path) reads a file")
    own = [name for name in inspect.signature(function).parameters if name != "fields"]
    for name in given:
        if name not in FIELDS:
            raise StudyError(
                f"mukron.{function.__name__} has no argument {name!r}{nearest(name, (*own, *FIELDS))}; "
                f"its arguments: {', '.join(own)}; and the fields of a run: {', '.join(FIELDS)}"
            )
    fields = dict(given)
    if factory is not None:
        if fields.get("model") is not None:
            raise StudyError("give model= or factory=, not both")
        fields["model"] = path_of(factory, "factory")
    functions = {name: path_of(value, name) for name in FUNCTION_FIELDS if callable(value := fields.get(name))}
    return {**fields, **functions}


def _write_report(record: StudyRecord, folder: FolderPath) -> None:
    """Write the page of a study, or warn that there is none."""
    if figures.available():
        write_report(record, folder)
    else:
        warnings.warn(
            "no figures and no page: they need matplotlib (pip install 'mukron[studies]'); report=False asks for none",
            stacklevel=3,
        )
