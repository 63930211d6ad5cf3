"""From what was asked for to a study and back to its best run: what commands and their functions share."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mukron.imports import default_width, import_function
from mukron.models import get_model
from mukron.study.certificate import MOVES
from mukron.study.design import Design, Search
from mukron.study.errors import StudyError
from mukron.study.record import StudyRecord
from mukron.study.store import NOT_COMPARED
from mukron.study.transfer import RECORD, TransferStudy
from mukron.train import RunConfig, base_width_of

FIELDS_SET_BY_STUDY = ("width", "seed", "lr", "scheme", "damping")  # fields of a run that a study sets itself
STUDY_EPOCHS = 5  # fewer than those of a single run
STUDY_BATCH = 128  # of a network of one's own
USUAL_DAMPING = (-4, 4)  # factors on the scheme's damping in a grid, as exponents of two
SEARCHED_DAMPING = (-8, 4)  # the same in a search

FolderPath = str | os.PathLike[str]


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
    if base_width is not None and not (isinstance(base_width, (int, float)) and base_width > 0):
        raise StudyError(f"width={base_width!r}: expected a number above 0")
    chosen = study_fields(fields, config, base_width, widths)
    start = {**RunConfig().to_dict(), "data": ""} if config is None else config.to_dict()
    return RunConfig.from_dict({**start, **chosen}, "arguments", trust=True)


def study_fields(
    fields: Mapping[str, Any], start: RunConfig | None, base_width: float | None, widths: Sequence[float] | None
) -> dict[str, Any]:
    """Add what studies do unless they are told otherwise.

    Args:
        fields: The fields of the run that were given.
        start: The config that the run begins with; None: the usual one.
        base_width: The width that settings are tuned at.
        widths: The widths of the study.
    """
    chosen, model = dict(fields), fields.get("model") or "mlp"
    if not isinstance(model, str):
        raise StudyError(f'model: expected a name or "MODULE:FUNCTION", got {model!r:.80}')
    own = ":" in model
    if start is None:
        chosen = {"epochs": STUDY_EPOCHS, "batch": STUDY_BATCH if own else get_model(model).batch, **chosen}
    base_width = chosen.get("base_width") if base_width is None else base_width
    if base_width is None and own and (start is None or start.base_width is None):
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
