"""The next setting to try, proposed by a sampler of Optuna."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mukron.study.points import lowest_is_best
from mukron.train.records import FINISHED

if TYPE_CHECKING:
    from mukron.study.store import Entry

SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "halving")


def propose(
    sampler: str, ranges: Mapping[str, tuple[float, float]], history: Sequence[Entry], metric: str, again: int = 0
) -> tuple[float, float | None]:
    """Propose a learning rate and a damping, given one width's trials so far.

    Every proposal creates a sampler and adds all trials to it, so it needs no state and works on any machine. Settings
    that are being trained count as poor, so that workers try different ones; settings that diverged count as the worst.

    Args:
        sampler: "tpe" or "random".
        ranges: The lowest and highest value of every setting.
        history: The trials so far.
        metric: The metric that decides which setting is best.
        again: The number of the attempt; another number gives another proposal for the same history.

    Returns:
        The learning rate, and the damping where it has a range.
    """
    import optuna

    directions = optuna.study.StudyDirection
    direction = directions.MINIMIZE if lowest_is_best(metric) else directions.MAXIMIZE
    settings: dict[tuple[float, float | None], list[Entry]] = {}
    for entry in history:
        settings.setdefault((entry.point.lr, entry.point.damping), []).append(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(direction=direction, sampler=_sampler(sampler, len(settings) + 1000 * again))
        distributions: dict[str, Any] = {
            name: optuna.distributions.FloatDistribution(low, high, log=True) for name, (low, high) in ranges.items()
        }
        for setting, entries in settings.items():
            params = _named(setting)
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, **_ending(entries, metric))
            )
        params = study.ask(distributions).params
    return params["lr"], params.get("damping")


def pruner(name: str, epochs: int) -> Any:
    """Return Optuna's pruner of this name, for runs with this number of epochs."""
    import optuna

    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=epochs // 4)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // 8))
    return optuna.pruners.NopPruner()


def _sampler(name: str, seed: int) -> Any:
    import optuna

    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _named(setting: tuple[float, float | None]) -> dict[str, float]:
    lr, damping = setting
    return {"lr": lr} if damping is None else {"lr": lr, "damping": damping}


def _ending(entries: Sequence[Entry], metric: str) -> dict[str, Any]:
    """The state of a setting's trial in Optuna: complete with its mean over seeds, running, or pruned."""
    from optuna.trial import TrialState

    results = [entry.result for entry in entries if entry.result is not None]
    values = [value for result in results if (value := result.value(metric)) is not None and result.status == FINISHED]
    if results and len(values) == len(results):
        return {"state": TrialState.COMPLETE, "value": statistics.fmean(values)}
    return {"state": TrialState.PRUNED if results else TrialState.RUNNING}
