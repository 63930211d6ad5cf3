"""What the commands ``mukron tune``, ``mukron transfer`` and ``mukron plan`` do, as functions.

They are ``mukron.tune``, ``mukron.transfer`` and ``mukron.plan``.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mukron.data import Dataset
from mukron.imports import default_width, import_function
from mukron.models import get_model
from mukron.study.certificate import MOVES
from mukron.study.design import Design, Search
from mukron.study.errors import StudyError
from mukron.study.planning import WidePlan, plan_for
from mukron.study.progress import StudyProgress
from mukron.study.record import StudyRecord
from mukron.study.store import NOT_COMPARED
from mukron.study.transfer import RECORD, TransferStudy
from mukron.train import RunConfig, base_width_of

FIELDS_SET_BY_STUDY = ("width", "seed", "lr", "scheme", "damping")  # fields of a run that a study sets itself
STUDY_EPOCHS = 5  # fewer than those of a single run
STUDY_BATCH = 128  # of a network of one's own
USUAL_DAMPING = (-4, 4)  # factors on the scheme's damping in a grid, as exponents of two
SEARCHED_DAMPING = (-8, 4)  # the same in a search

StudyListener = Callable[[StudyProgress], None] | bool | None
FolderPath = str | os.PathLike[str]


def tune(
    width: float,
    *,
    trials: int = 50,
    config: RunConfig | None = None,
    scheme: str | None = None,
    lr: float | Sequence[float] | None = None,
    damping: float | Sequence[float] | None = None,
    seeds: int = 1,
    sampler: str = "tpe",
    pruner: str = "median",
    metric: str = "train_loss",
    folder: FolderPath = "tuned",
    workers: int | str = 1,
    progress: StudyListener = None,
    storage: Mapping[str, Any] | None = None,
    **fields: Any,
) -> StudyRecord:
    """Search for the best learning rate and damping at a narrow width, as ``mukron tune`` does.

    Called again with the same folder it continues the search; more trials extend it.

    Args:
        width: The narrow width to tune at.
        trials: The number of settings to try.
        config: The run to begin with, in place of the usual one.
        scheme: SCHEME or SCHEME/DAMPING to tune in; by default that of ``config``.
        lr: The lowest and the highest learning rate; by default the method's usual ones.
        damping: The lowest and the highest damping, as multiples of the scheme's own; a single number is not tuned.
        seeds: The number of seeds.
        sampler: "tpe" or "random".
        pruner: Of runs that fall behind: "median", "halving" or "none".
        metric: What decides which setting is best.
        folder: Where the study is kept, for ``plan``.
        workers: The number of processes, or "auto"; see ``TransferStudy.run``.
        progress: Called with the study's progress. None: a bar on a terminal and in notebooks; False: none.
        storage: Other arguments of ``TransferStudy``, such as ``storage``, ``name`` and ``data_dir``.
        fields: Other fields of the run, such as ``model`` (a name, or "MODULE:FUNCTION"), ``data`` and ``method``.

    Returns:
        The record of the study; ``best()`` is the best run.

    Example:
        >>> import mukron
        >>> record = mukron.tune(16, trials=2, method="sgd", epochs=1, samples=128, folder="tuned-sgd")
        >>> len(record.results)
        2
    """
    run = study_run(config, fields, width)
    study = tuning_study(
        run,
        *(width, trials, scheme or (None if config is None else scheme_of(config)), lr, damping, seeds),
        *(sampler, pruner, metric, folder),
        **(storage or {}),
    )
    return study.run(workers, progress)


def transfer(
    *,
    widths: Sequence[float] | None = None,
    over: str = "lr",
    config: RunConfig | None = None,
    schemes: str | Sequence[str] | None = None,
    lr: float | Sequence[float] | None = None,
    damping: float | Sequence[float] | None = None,
    seeds: int = 3,
    search: Search | None = None,
    metric: str = "train_loss",
    folder: FolderPath | None = None,
    workers: int | str = 1,
    progress: StudyListener = None,
    storage: Mapping[str, Any] | None = None,
    **fields: Any,
) -> StudyRecord:
    """Train at several widths and test whether the best setting stays the same, as ``mukron transfer`` does.

    Called again with the same folder it continues the study; more widths, learning rates or seeds extend it.

    Args:
        widths: The widths; by default 1, 2, 4 and 8 times the base width.
        over: What is tuned: "lr", "damping" or "lr,damping".
        config: The run to begin with, in place of the usual one.
        schemes: SCHEME or SCHEME/DAMPING, one or several; by default usual practice and muP, or that of ``config``.
        lr: The learning rates; by default the method's usual ones.
        damping: The dampings, as multiples of the scheme's own.
        seeds: The number of seeds.
        search: Propose settings by a sampler instead of a grid.
        metric: What decides which setting is best.
        folder: Where the study is kept; by default in "studies".
        workers: The number of processes, or "auto"; see ``TransferStudy.run``.
        progress: Called with the study's progress. None: a bar on a terminal and in notebooks; False: none.
        storage: Other arguments of ``TransferStudy``, such as ``storage``, ``name`` and ``data_dir``.
        fields: Other fields of the run, such as ``model`` (a name, or "MODULE:FUNCTION"), ``data`` and ``method``.

    Returns:
        The record of the study with its certificate.

    Example:
        >>> import mukron
        >>> small = {"method": "sgd", "epochs": 1, "samples": 128, "base_width": 16}
        >>> record = mukron.transfer(widths=(16, 32), lr=(0.1, 0.2, 0.4), schemes="mup", seeds=1, folder="s", **small)
        >>> record.certificate.judgements[0].axis
        'lr'
    """
    run = study_run(config, fields, None, widths)
    chosen = schemes or (None if config is None else scheme_of(config))
    study = transfer_study(run, widths, over, chosen, lr, damping, seeds, search, metric, folder, **(storage or {}))
    record = study.run(workers, progress)
    if record.certificate is None:
        raise StudyError("only runs of one width have ended, so there is nothing to compare")
    return record


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
) -> WidePlan:
    """Turn settings tuned at a narrow width into those of a wide network, as ``mukron plan`` does.

    Args:
        width: The width to train at.
        tuned: The record of a study, its folder, or a run.
        scheme: The scheme to choose from the study: SCHEME or SCHEME/DAMPING.
        tuned_at: The width of the study whose best run is taken; by default the narrowest.
        device: The device to measure on; by default that of the run.
        steps: How many steps to measure at that width; 0 measures nothing.
        dataset: The run's data, if it is loaded already.
        data_dir: Where data sets are kept.

    Returns:
        The plan: its settings, the cost of a step, and the code.

    Example:
        >>> import mukron
        >>> from mukron.train import RunConfig
        >>> tuned = RunConfig(method="kfac", width=16, base_width=16, lr=0.1, samples=64)
        >>> mukron.plan(64, tuned, steps=0).config.width
        64
    """
    if isinstance(tuned, RunConfig):
        if scheme is not None or tuned_at is not None:
            raise StudyError("scheme= and tuned_at= choose a run of a study; tuned= is a run already")
        run = tuned
    else:
        run, _ = best_run(tuned if isinstance(tuned, StudyRecord) else load_study(tuned), scheme, tuned_at)
    run = run if device is None else run.replace(device=device)
    return plan_for(run, width, dataset=dataset, data_dir=data_dir, steps=steps)


# What the commands share with these functions.


def study_run(
    config: RunConfig | None,
    fields: Mapping[str, Any],
    base_width: float | None = None,
    widths: Sequence[float] | None = None,
) -> RunConfig:
    """Return the run that a study varies, from the fields that were given."""
    for name in FIELDS_SET_BY_STUDY:
        if name in fields:
            raise StudyError(
                f"{name}: a study has its own; it has arguments for widths, seeds, lr, schemes and damping"
            )
    chosen = study_fields(fields, config is None, base_width, widths)
    start = {**RunConfig().to_dict(), "data": ""} if config is None else config.to_dict()
    return RunConfig.from_dict({**start, **chosen}, "arguments")


def study_fields(
    fields: Mapping[str, Any], usual: bool, base_width: float | None, widths: Sequence[float] | None
) -> dict[str, Any]:
    """Add what studies do unless they are told otherwise.

    Args:
        fields: The fields of the run that were given.
        usual: Whether the run begins with the usual one, not with a config.
        base_width: The width that settings are tuned at.
        widths: The widths of the study.
    """
    chosen, model = dict(fields), str(fields.get("model") or "mlp")
    own = ":" in model
    if usual:
        chosen = {"epochs": STUDY_EPOCHS, "batch": STUDY_BATCH if own else get_model(model).batch, **chosen}
    base_width = chosen.get("base_width") if base_width is None else base_width
    if base_width is None and own:
        base_width = default_width(import_function(model, "model")) or (min(widths) if widths else None)
        if base_width is None:
            raise StudyError(f"model={model!r}: its width has no default; give widths or base_width")
    return chosen if base_width is None else {**chosen, "base_width": base_width}


def scheme_of(config: RunConfig) -> str:
    """Return the scheme and the damping of a run, as studies write them."""
    return config.scheme if config.damping is None else f"{config.scheme}/{config.damping.text()}"


def at_base_width(config: RunConfig) -> RunConfig:
    """Return the run with an explicit base width, and without what studies vary."""
    base = base_width_of(config)
    return config.replace(base_width=base, width=base, seed=RunConfig().seed, scheme="mup", damping=None)


def tuning_study(
    run: RunConfig,
    width: float,
    trials: int,
    scheme: str | None,
    lr: float | Sequence[float] | None,
    damping: float | Sequence[float] | None,
    seeds: int,
    sampler: str,
    pruner: str,
    metric: str,
    folder: FolderPath,
    **storage: Any,
) -> TransferStudy:
    """Return the study that ``tune`` runs."""
    described = at_base_width(run)
    has_damping = described.spec.damping is not None
    lrs, dampings = axes("lr,damping" if has_damping else "lr", lr, damping, described, search=True)
    design = Design(
        described,
        widths=width,
        lr=lrs,
        damping=dampings,
        schemes=scheme or "mup",
        seeds=seeds,
        search=Search(trials, sampler, pruner),
        metric=metric,
    )
    return TransferStudy(design, folder=folder, **storage)


def transfer_study(
    run: RunConfig,
    widths: Sequence[float] | None,
    over: str,
    schemes: str | Sequence[str] | None,
    lr: float | Sequence[float] | None,
    damping: float | Sequence[float] | None,
    seeds: int,
    search: Search | None,
    metric: str,
    folder: FolderPath | None,
    **storage: Any,
) -> TransferStudy:
    """Return the study that ``transfer`` runs."""
    described = at_base_width(run)
    base = described.base_width or 1.0
    lrs, dampings = axes(over, lr, damping, described, search is not None)
    design = Design(
        described,
        widths=widths or [base * times for times in (1, 2, 4, 8)],
        lr=lrs,
        damping=dampings,
        schemes=schemes,
        seeds=seeds,
        search=search,
        metric=metric,
    )
    study = TransferStudy(design, folder=folder or Path("studies") / folder_of(described), **storage)
    if len({*study.design.widths, *(result.point.width for result in study.results())}) < 2:
        raise StudyError("a transfer study compares widths: give at least two, as in widths=(64, 512)")
    return study


def axes(
    over: str,
    lr: float | Sequence[float] | None,
    damping: float | Sequence[float] | None,
    run: RunConfig,
    search: bool,
) -> tuple[list[float], list[float]]:
    """Return the learning rates and the factors on the damping; for a search only the ends of their ranges."""
    tuned = over.split(",")
    if any(axis not in ("lr", "damping") for axis in tuned):
        raise StudyError(f"over={over!r}: expected lr, damping or lr,damping")
    low, high = run.spec.rates(run.method_options)
    usual_lr = _powers(low, high, search) if "lr" in tuned else [2.0 ** ((low + high) // 2)]
    usual_damping = _powers(*(SEARCHED_DAMPING if search else USUAL_DAMPING), search) if "damping" in tuned else [1.0]
    lrs, dampings = _list(lr, usual_lr), _list(damping, usual_damping)
    for name, values in (("lr", lrs), ("damping", dampings)):
        if len(values) > 1 and name not in tuned:
            raise StudyError(f"{name}: several, but over={over!r}; give over='lr,damping' for both")
    return lrs, dampings


def _powers(low: int, high: int, ends: bool) -> list[float]:
    return [2.0**low, 2.0**high] if ends else [2.0**exponent for exponent in range(low, high + 1)]


def _list(values: float | Sequence[float] | None, usual: list[float]) -> list[float]:
    return usual if values is None else [values] if isinstance(values, (int, float)) else list(values)


def folder_of(config: RunConfig) -> str:
    """Return the default folder of a study, the same for the same configuration."""
    key = config.key(without=NOT_COMPARED)
    return re.sub(r"[^\w.-]+", "_", f"{config.model}-{config.data}-{config.method}-{key}")


def load_study(folder: FolderPath) -> StudyRecord:
    """Read the record of a study from its folder."""
    path = Path(folder) / RECORD
    if not path.exists():
        raise StudyError(
            f"{folder}: there is no study (no {RECORD}); run mukron.tune(...) first, or name its folder: tuned=FOLDER"
        )
    return StudyRecord.load(path)


def best_run(record: StudyRecord, wanted: str | None, width: float | None) -> tuple[RunConfig, list[str]]:
    """Return the best run of a scheme and width, and lines that say where it comes from."""
    scheme = _choose_scheme(record, wanted)
    widths = sorted({result.point.width for result in record.results if result.point.scheme == scheme})
    width = widths[0] if width is None else width
    if width not in widths:
        raise StudyError(f"tuned_at={width:g}: the study has widths {', '.join(f'{known:g}' for known in widths)}")
    best = record.best(scheme, width)
    runs = [result for result in record.results if (result.point.scheme, result.point.width) == (scheme, width)]
    seeds_of_best = [result for result in runs if result.point.config(record.config).replace(seed=best.seed) == best]
    value = statistics.fmean(value for result in seeds_of_best if (value := result.value(record.metric)) is not None)
    seeds = f", mean of {len(seeds_of_best)} seeds" if len(seeds_of_best) > 1 else ""
    lines = [f"Best of {len(runs)} runs at width {width:g}: {record.metric} {value:.4g}{seeds}."]
    for judgement in record.certificate.judgements if record.certificate is not None else ():
        if judgement.scheme == scheme:
            lines.append(f"Transfer of {judgement.axis}: {judgement.verdict}. {'; '.join(judgement.reasons)}".rstrip())
            if judgement.verdict == MOVES:
                lines.append(
                    f"WARNING: by this study the best {judgement.axis} moves with the width; do not rely on it."
                )
    return best, lines


def _choose_scheme(record: StudyRecord, wanted: str | None) -> str:
    """Return one of the study's schemes; by default the only one besides SP, which does not transfer."""
    known = ", ".join(record.schemes)
    if not record.schemes:
        raise StudyError(f"{record.name}: nothing was run yet; run mukron.tune(...) to its end")
    if wanted is None:
        candidates = [name for name in record.schemes if name.partition("/")[0] != "sp"] or list(record.schemes)
    else:
        candidates = [
            name for name in record.schemes if name == wanted or name.startswith((f"{wanted}/", f"{wanted}:"))
        ]
    if len(candidates) != 1:
        problem = (
            "several schemes" if wanted is None else f"scheme={wanted!r}: {len(candidates)} of the study's schemes"
        )
        raise StudyError(f"{problem}; say which with scheme=: {known}")
    return candidates[0]
