"""Which optimizer for this GPT: the loss after equal steps and after equal time, each at its best learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import fmean

from mukron.bench.gpt.options import GPTOptions, title_of
from mukron.bench.gpt.result import GPTResult, train_missing
from mukron.bench.gpt.task import WARMUP, GPTRun, step_milliseconds
from mukron.table import Table

COUNTED = 60  # steps that the cost of a step is averaged over: a multiple of usual intervals


def check_equal_time(options: GPTOptions, seconds: float) -> None:
    """Refuse what runs of equal time cannot do.

    Args:
        options: What is to be run.
        seconds: The time.

    Raises:
        ValueError: There are several sizes, or methods are to have other settings than their defaults.
    """
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"--seconds {seconds:g}: expected a positive number")
    if len(options.widths) > 1 or len(options.depths) > 1:
        raise ValueError("--seconds compares methods at one size: give one of --widths and one of --depths")
    if options.schemes != ("mup",) or options.weight_decay or any(options.dampings):
        raise ValueError(
            "--seconds compares methods by their defaults: leave out --schemes, --weight-decay, --dampings"
        )


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

    Raises:
        ValueError: There are no runs of equal steps of a method at this size.
    """
    (width,), (depth,) = options.widths, options.depths
    best = {run.method: run for run in best_runs(result, width, depth, options.steps)}
    if missing := [method for method in options.methods if method not in best]:
        raise ValueError(
            f"no learning rate of {', '.join(missing)} is stored for width {width}, {depth} blocks and {options.steps} "
            "steps: try some first, by the same command with --rates"
        )
    chosen = [best[method] for method in options.methods]
    for run in chosen:
        if cost_key(run) not in result.costs:
            counted = replace(run, steps=WARMUP + COUNTED)
            cost = step_milliseconds(counted, options.file, options.device, options.precision)
            result.costs[cost_key(run)] = cost
            result.save(folder)
            say(f"  {title_of(run.method)}: {cost:.1f} ms per step")
    timed = [
        replace(run, steps=max(1, round(1e3 * seconds / result.costs[cost_key(run)])), seconds=seconds, seed=seed)
        for run in chosen
        for seed in range(options.seeds)
    ]
    train_missing(sorted(timed, key=lambda run: -run.steps), options, result, folder, say)


def best_runs(result: GPTResult, width: int, depth: int, steps: int) -> list[GPTRun]:
    """For every method with its defaults, a run at its best learning rate.

    Args:
        result: Stored runs.
        width: The width, which is that of the parametrization's base.
        depth: The number of blocks, likewise.
        steps: The number of steps.

    Returns:
        Runs with seed 0, the lowest mean loss first.
    """
    found: list[tuple[float, GPTRun]] = []
    for group, sizes in result.groups().items():
        usual = group.scheme == "mup" and not group.weight_decay and not group.damping
        if usual and (group.base, group.base_depth, group.steps) == (width, depth, steps) and (width, depth) in sizes:
            rates = sizes[width, depth]
            losses = {lr: fmean(outcome.validation for outcome in outcomes) for lr, outcomes in rates.items()}
            lr = min(losses, key=lambda lr: losses[lr])
            found.append((losses[lr], GPTRun(group.method, width, width, lr, 0, steps, depth, depth)))
    return [run for _, run in sorted(found, key=lambda pair: pair[0])]


def cost_key(run: GPTRun) -> str:
    """Under which the cost of a step is stored: method, width and depth.

    Args:
        run: The run.
    """
    return f"{run.method} {run.width} {run.depth}"


def choice_tables(result: GPTResult) -> list[Table]:
    """The tables, one for each size and time that was tried: a line for each method.

    Args:
        result: Stored runs, and costs of steps.

    Returns:
        The tables, the lowest loss after equal steps first in each.
    """
    tried = sorted({(run.width, run.depth, run.seconds) for run in result.runs if run.seconds})
    return [_choice_table(result, *size) for size in tried]


def _choice_table(result: GPTResult, width: int, depth: int, seconds: float) -> Table:
    timed = {
        run: outcome
        for run, outcome in result.runs.items()
        if (run.width, run.depth, run.seconds) == (width, depth, seconds)
    }
    steps = _usual_steps(result, width, depth)
    lines, costs = [], [result.costs[cost_key(run)] for run in timed]
    for run in best_runs(result, width, depth, steps):
        own = {other: outcome for other, outcome in timed.items() if (other.method, other.lr) == (run.method, run.lr)}
        if own:
            equal: dict[float, list[float]] = {}
            for other, outcome in result.runs.items():
                if replace(other, lr=run.lr, seed=0) == run:
                    equal.setdefault(other.lr, []).append(outcome.validation)
            edge = "" if min(equal) < run.lr < max(equal) else " (edge)"
            cost = result.costs[cost_key(run)]
            cells = [title_of(run.method), f"{run.lr:g}{edge}", f"{fmean(equal[run.lr]):.3f}", str(len(equal[run.lr]))]
            cells += [f"{cost:.1f}", f"{cost / min(costs):.1f}", f"{fmean(o.validation for o in own.values()):.3f}"]
            lines.append((*cells, str(next(iter(own)).steps), str(len(own))))
    of_steps = ("best lr", f"loss after {steps} steps", "seeds", "ms per step", "times the cheapest")
    columns = ("method", *of_steps, f"loss after {seconds:g} s", "steps in that time", "seeds")
    notes = (
        "Best lr: of those tried, the one with the lowest mean loss after equal steps; (edge): a rate beyond them may "
        "be better. Runs of equal time use it too, with the schedule stretched to their steps.",
        "ms per step: passes, refreshes of inverses, optimizer and schedule, with nothing else on the device.",
    )
    return Table(f"Which optimizer? Width {width}, {depth} blocks", columns, tuple(lines), notes)


def _usual_steps(result: GPTResult, width: int, depth: int) -> int:
    """The number of steps that most methods were run with at this size."""
    methods: dict[int, set[str]] = {}
    for run in result.runs:
        if not run.seconds and (run.width, run.base, run.depth) == (width, width, depth):
            methods.setdefault(run.steps, set()).add(run.method)
    return max(methods, key=lambda steps: (len(methods[steps]), steps), default=0)
