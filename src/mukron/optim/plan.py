"""What an optimizer does with each layer, as a table for people."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from mukron.damping import Rescaled, Rule
from mukron.optim.direction import IN_SIDE
from mukron.table import Table
from mukron.theory import SP
from mukron.trust import law_of

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.table import LayerEntry

PLAN_COLUMNS = ("layer", "out x in", "form", "rank", "memory", "work")
RANK, WORK = PLAN_COLUMNS.index("rank"), PLAN_COLUMNS.index("work")
FORM_NOTE = "matrix: d x d, made of all rows; sample space: N rows, no d x d matrix; work: multiplications to apply it"
RANK_NOTE = "rank: the effective rank (tr M)^2 / tr M^2, about how many directions carry a factor's trace"
REGIME_NOTE = (
    "where ranks do not grow with the width, damping must grow like the trace (Rescaled); where they grow like the "
    "width, it must stay (MeanEigenvalue)"
)
DAMPING_RULES = {  # what a damping number means
    "Rescaled": "that many times a factor's trace over its size at the base width",
    "MeanEigenvalue": "that many times a factor's trace over its actual size",
    "MaxEigenvalue": "that many times a factor's largest eigenvalue",
    "Fixed": "its numbers for the two sides, times the theory's factors ('rho x' in tables)",
    "Heuristic": "its root, balanced between A and B by their mean eigenvalues",
    "Constant": "that number itself, in every layer",
}
DOES_NOT_FOLLOW = "does not follow the width"


def plan_table(optimizer: SecondOrder) -> Table:
    """Factor sizes, form, memory and work of every layer; blocks with factors of their own are named."""
    rows = [row for layer in optimizer.layers.values() for row in _rows(optimizer, layer)]
    others = [name for name, entry in optimizer.entries.items() if not entry.preconditioned]
    notes = [FORM_NOTE] if any(row[WORK] for row in rows) else []
    ranked = any(row[RANK] for row in rows)
    if ranked:
        relative = any(isinstance(Rule.of_group(group), Rescaled) for group in optimizer.param_groups)
        notes += [RANK_NOTE, *([REGIME_NOTE] if relative else [])]
    notes += [law_of(optimizer.options.trust, optimizer.method), *_rules(optimizer), *optimizer.notes()]
    if others:
        notes.append(f"by the fallback rule ({optimizer.options.fallback.name}): {', '.join(others)}")
    for number, group in enumerate(optimizer.param_groups):
        if adaptive := group.get("adaptive"):
            which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
            ratio = "" if adaptive["ratio"] is None else f", last reduction ratio {adaptive['ratio']:.3g}"
            notes.append(f"adaptive damping{which}: {Rule.of_group(group).rho:.4g} now{ratio}")
    rescued = sum(optimizer.rescues.values())
    title = f"{type(optimizer).__name__}: {optimizer.skipped} steps skipped, {rescued} factorizations rescued"
    kept = [place for place in range(len(PLAN_COLUMNS)) if ranked or place != RANK]
    columns = tuple(PLAN_COLUMNS[place] for place in kept)
    return Table(title, columns, tuple(tuple(row[place] for place in kept) for row in rows), tuple(notes))


def warn_of_damping(optimizer: SecondOrder, rule: Rule | None) -> None:
    """Tell once that settings tuned at the base width do not carry over with a damping rule, though there is a plan."""
    if rule is None or _follows(optimizer, rule) or DOES_NOT_FOLLOW in optimizer.told:
        return
    optimizer.told.add(DOES_NOT_FOLLOW)
    name, usual = type(optimizer).__name__, type(optimizer.spec.damping).__name__
    warnings.warn(
        f"damping {rule.text()} {DOES_NOT_FOLLOW}: settings that are tuned at the base width do not carry over to "
        f"others, although {name} has a plan. Give a number, which means {usual}, or leave damping out",
        UserWarning,
        stacklevel=7,
    )


def _follows(optimizer: SecondOrder, rule: Rule) -> bool:
    plan = optimizer.parametrization
    return rule.transfers or rule.rho == 0 or plan is None or plan.scheme == SP


def _rules(optimizer: SecondOrder) -> list[str]:
    """The damping rules in use, in words."""
    rules = dict.fromkeys(Rule.of_group(group) for group in optimizer.param_groups if group["damping"] is not None)
    words = {rule: [DAMPING_RULES.get(type(rule).__name__, "a rule of your own")] for rule in rules}
    for rule in rules:
        words[rule] += [] if _follows(optimizer, rule) else [f"it {DOES_NOT_FOLLOW}"]
    return [f"damping {rule.text()}: {'; '.join(words[rule])}" for rule in rules]


def _rows(optimizer: SecondOrder, entry: LayerEntry) -> list[tuple[str, ...]]:
    """One row a block that has factors of its own."""
    layer = entry.layer
    operators = optimizer.state.get(entry.anchor, {}).get("operators", {})
    groups = "" if layer.groups == 1 else f" ({layer.groups} groups)"
    if not operators:
        form = "after the first step" if optimizer.by_block or optimizer.method.damped else "no factors"
        return [(entry.name, f"{layer.d_out} x {layer.d_in}{groups}", form, "", "", "")]
    rows: list[tuple[str, ...]] = []
    for block, sides in operators.items():
        d_in = layer.d_in if block == "weight" else 1
        forms = ", ".join(f"{name}: {operator.form}" for name, operator in sides.items())
        size = sum(operator.memory for operator in sides.values())
        work = sum(operator.work(layer.d_out, d_in, name in IN_SIDE) for name, operator in sides.items())
        name = entry.name if len(operators) == 1 else f"{entry.name}.{block}"
        precision = ", float64" if optimizer.state[entry.anchor].get("double") else ""
        cells = (
            forms + precision,
            _ranks(optimizer, entry, block),
            f"{size / 2**20:.3g} MiB",
            f"{work / 1e6:.3g} M",
        )
        rows.append((name, f"{layer.d_out} x {d_in}{groups}", *cells))
    return rows


def _ranks(optimizer: SecondOrder, entry: LayerEntry, block: str) -> str:
    """The effective rank of each factor that is kept as a matrix, the mean over a layer's groups."""
    memory = optimizer.state[entry.anchor].get("memory", {}).get(block, {})
    matrices = {name: kept["M"].double() for name, kept in memory.items() if isinstance(kept.get("M"), Tensor)}
    ranks = {
        name: (M.diagonal(dim1=-2, dim2=-1).sum(-1).square() / M.square().sum((-2, -1)).clamp_min(1e-300)).mean()
        for name, M in matrices.items()
    }
    return ", ".join(
        f"{name}: {float(rank):.{0 if rank >= 10 else 1}f} of {matrices[name].shape[-1]}"
        for name, rank in ranks.items()
    )
