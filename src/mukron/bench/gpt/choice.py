"""Which optimizer for this GPT: the loss after equal steps and after equal time, each at its best learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from mukron.bench.gpt.options import GPTOptions, title_of
from mukron.bench.gpt.result import GPTResult, train_missing
from mukron.bench.gpt.task import WARMUP, GPTRun, step_milliseconds
from mukron.table import Table

COUNTED = 60  # steps that the cost of a step is averaged over: a multiple of usual intervals


def run_equal_time(
    options: GPTOptions, seconds: float, result: GPTResult, folder: Path, say: Callable[[str], None]
) -> None:
    """Measure what a step of each method costs, then train each for that time at its best learning rate.

    The cost is measured one method after the other, with nothing beside them. Runs take as many steps as fit into the
    time, with the schedule stretched to them, and may share the device.

    Args:
        options: The methods, and the runs of equal steps whose best learning rates are taken.
        seconds: The time.
        result: Where costs and runs are added; those that it has are not repeated.
        folder: Where the result is saved.
        say: Is told what was done, in lines.
    """
    best = {
        run.method: run for run in best_runs(result) if run.method in options.methods and run.width in options.widths
    }
    for method, run in best.items():
        key = cost_key(run)
        if key not in result.costs:
            counted = replace(run, steps=WARMUP + COUNTED)
            result.costs[key] = step_milliseconds(counted, options.file, options.device, options.precision)
            result.save(folder)
            say(f"  {title_of(method)}: {result.costs[key]:.1f} ms per step")
    timed = [
        replace(run, steps=max(1, round(1e3 * seconds / result.costs[cost_key(run)])), seconds=seconds, seed=seed)
        for run in best.values()
        for seed in range(options.seeds)
    ]
    train_missing(sorted(timed, key=lambda run: -run.steps), options, result, folder, say)


def best_runs(result: GPTResult) -> list[GPTRun]:
    """For every method at its base width and depth, without decay and with its own damping, a run at its best rate.

    Args:
        result: Stored runs.

    Returns:
        Runs with seed 0, the lowest mean loss first; those of the largest width that most methods have.
    """
    found: list[tuple[float, GPTRun]] = []
    for group, sizes in result.groups().items():
        rates = sizes.get((group.base, group.base_depth), {})
        if rates and group.scheme == "mup" and not group.weight_decay and not group.damping:
            losses = {lr: fmean(outcome.validation for outcome in outcomes) for lr, outcomes in rates.items()}
            lr = min(losses, key=lambda lr: losses[lr])
            depths = (group.base_depth, group.base_depth)
            found.append((losses[lr], GPTRun(group.method, group.base, group.base, lr, 0, group.steps, *depths)))
    widths = [(run.width, run.depth, run.steps) for _, run in found]
    usual = max(set(widths), key=lambda size: (widths.count(size), size), default=None)
    return [run for _, run in sorted(found, key=lambda pair: pair[0]) if (run.width, run.depth, run.steps) == usual]


def cost_key(run: GPTRun) -> str:
    """Under which the cost of a step is stored: method and width.

    Args:
        run: The run.
    """
    return f"{run.method} {run.width}"


def choice_table(result: GPTResult) -> Table:
    """The table: a line for each method, the lowest loss after equal steps first.

    Args:
        result: Stored runs, and costs of steps.

    Returns:
        The table; without lines if no costs were measured.
    """
    best = [run for run in best_runs(result) if cost_key(run) in result.costs]
    lines = []
    fastest = min((result.costs[cost_key(run)] for run in best), default=1.0)
    for run in best:
        cost, equal = result.costs[cost_key(run)], _outcomes(result, replace(run, seed=0))
        timed = {
            other: outcome for other, outcome in result.runs.items() if other.seconds and other.method == run.method
        }
        timed = {other: outcome for other, outcome in timed.items() if cost_key(other) == cost_key(run)}
        steps = next((str(other.steps) for other in timed), "")
        loss = f"{fmean(outcome.validation for outcome in timed.values()):.3f}" if timed else ""
        rates = [other.lr for other in result.runs if replace(other, lr=run.lr, seed=0) == run]
        edge = "" if min(rates) < run.lr < max(rates) else " (edge)"
        numbers = (f"{run.lr:g}{edge}", f"{fmean(equal):.3f}", str(len(equal)), f"{cost:.1f}", f"{cost / fastest:.1f}")
        lines.append((title_of(run.method), *numbers, loss, steps, str(len(timed) or "")))
    size = best[0] if best else None
    seconds = next((f"{run.seconds:g}" for run in result.runs if run.seconds), "")
    columns = ["method", "best lr", f"loss after {size.steps if size else ''} steps", "seeds", "ms per step"]
    columns += ["times the cheapest", f"loss after {seconds} s", "steps in that time", "seeds"]
    notes = (
        "Best lr: of those tried, the one with the lowest mean loss after equal steps; (edge): a rate beyond them may "
        "be better. Runs of equal time use it too, with the schedule stretched to their steps.",
        "ms per step: passes, refreshes of inverses, optimizer and schedule, with nothing else on the device.",
    )
    title = f"Which optimizer? Width {size.width}, {size.depth} blocks" if size else "Which optimizer?"
    return Table(title, tuple(columns), tuple(lines), notes if lines else ())


def _outcomes(result: GPTResult, run: GPTRun) -> list[float]:
    return [outcome.validation for other, outcome in result.runs.items() if replace(other, seed=0) == run]
