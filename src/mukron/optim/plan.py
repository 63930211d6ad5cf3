"""What an optimizer does with each layer, as a table for people."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mukron.curvature import EVERY_RANK, Exact
from mukron.curvature.fisher import Drawn
from mukron.damping import Rescaled, Rule
from mukron.layers import WEIGHT, layer_of
from mukron.optim.communication import sgd_numbers, traffic_of
from mukron.optim.direction import IN_SIDE
from mukron.optim.exchange import Owners
from mukron.params.inventory import clean_name, pattern_of, unwrap
from mukron.table import Table, bytes_
from mukron.theory import SP
from mukron.trust import law_of

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.table import LayerEntry

PLAN_COLUMNS = ("layer", "out x in", "form", "rank", "rows", "memory", "work", "owner", "arrives")
RANK, ROW_COUNTS, WORK = map(PLAN_COLUMNS.index, ("rank", "rows", "work"))
FORM_NOTE = "matrix: d x d, made of all rows; sample space: N rows, no d x d matrix; work: multiplications to apply it"
RANK_NOTE = "rank: the effective rank (tr M)^2 / tr M^2, about how many directions carry a factor's trace"
ROWS_NOTE = (
    "rows: those that a factor is made of (samples x positions x remembered batches, of B for each draw), beside its "
    "size, where that grows with the width"
)
FEW_ROWS_NOTE = "where rows are fewer (<), eigenvalues grow with the width, and so must damping (Rescaled)"
RANKS_NOTE = (
    "where ranks do not grow with the width, damping must grow like the trace (Rescaled); where they grow like the "
    'width, it must stay (MeanEigenvalue); see "Damping and the number of rows" in docs/theory.md'
)
MANY_ROWS_NOTE = f"where rows are as many or more (>=), ranks decide: {RANKS_NOTE}"
DAMPING_RULES = {  # what a damping number means
    "Rescaled": "that many times a factor's trace over its size at the base width",
    "MeanEigenvalue": "that many times a factor's trace over its actual size",
    "MaxEigenvalue": "that many times a factor's largest eigenvalue",
    "Fixed": "its numbers for the two sides, times the theory's factors ('rho x' in tables)",
    "Heuristic": "its root, balanced between A and B by their mean eigenvalues",
    "Constant": "that number itself, in every layer",
}
DEPTHWISE_NOTE = "their groups have one channel each, and muP has no exponents for groups whose number grows"
DOES_NOT_FOLLOW = "does not follow the width"


def plan_table(optimizer: SecondOrder) -> Table:
    """Factor sizes, form, memory and work of every layer; blocks with factors of their own are named."""
    rows = [row for layer in optimizer.layers.values() for row in _rows(optimizer, layer)]
    others = [name for name, entry in optimizer.entries.items() if not entry.preconditioned]
    notes = [FORM_NOTE] if any(row[WORK] for row in rows) else []
    ranked, together = any(row[RANK] for row in rows), isinstance(optimizer.exchange, Owners)
    counts = " ".join(row[ROW_COUNTS] for row in rows).split()
    notes += [*([RANK_NOTE] if ranked else []), *([ROWS_NOTE] if counts else [])]
    if any(isinstance(Rule.of_group(group), Rescaled) for group in optimizer.param_groups):
        notes += [note for sign, note in (("<", FEW_ROWS_NOTE), (">=", MANY_ROWS_NOTE)) if sign in counts]
        notes += [RANKS_NOTE] if ranked and not counts else []
    notes += [law_of(optimizer.options.trust, optimizer.method), *_rules(optimizer), *optimizer.notes()]
    notes += _of_ranks(optimizer)
    if others:
        notes.append(f"by the fallback rule ({optimizer.options.fallback.name}): {', '.join(others)}")
        notes += _of_depthwise(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        if adaptive := group.get("adaptive"):
            which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
            ratio = "" if adaptive["ratio"] is None else f", last reduction ratio {adaptive['ratio']:.3g}"
            notes.append(f"adaptive damping{which}: {Rule.of_group(group).rho:.4g} now{ratio}")
    rescued = sum(optimizer.rescues.values())
    title = f"{type(optimizer).__name__}: {optimizer.skipped} steps skipped, {rescued} factorizations rescued"
    shown = {"rank": ranked, "rows": counts, "owner": together, "arrives": together}
    kept = [place for place, column in enumerate(PLAN_COLUMNS) if shown.get(column, True)]
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


def _of_ranks(optimizer: SecondOrder) -> list[str]:
    """What arrives in a step, beside data-parallel SGD."""
    exchange = optimizer.exchange
    if not isinstance(exchange, Owners) or not exchange.traffic:
        return []
    ours, k = sum(_arrives(exchange, name) for name in exchange.traffic), exchange.size
    numbers = [(entry.parameter.numel(), entry.parameter.element_size()) for entry in optimizer.entries.values()]
    sgd = sum(sgd_numbers(n, k, bool(exchange.shards)) * size for n, size in numbers) / k
    others = 0.0 if not exchange.gradients.averages else sum(
        2 * (k - 1) * entry.parameter.numel() * entry.parameter.element_size() / k
        for entry in optimizer.entries.values()
        if not entry.preconditioned
    )  # fmt: skip
    beside = f"in place of the {bytes_(sgd)} of data-parallel SGD"
    if not exchange.gradients.averages:
        wrapper = "fully_shard" if exchange.shards else "DistributedDataParallel"
        beside = f"in addition to the {bytes_(sgd)} of data-parallel SGD, which {wrapper} moves"
    return [
        "owner: the rank that has a layer's curvature; arrives: bytes in an average step, per rank; "
        "rows, owner, factors: how curvature travels",
        f"in all {bytes_(ours + others)} arrive per step and rank, {beside}",
    ]


def _arrives(exchange: Owners, layer: str) -> float:
    """Bytes per step and rank."""
    traffic, schemes = exchange.traffic[layer], exchange.schemes or {}
    owner = max(exchange.owner[layer], 0)
    return traffic_of(traffic, schemes[layer].name, owner).total * traffic.element / exchange.size


def _owner_cells(optimizer: SecondOrder, layer: str) -> tuple[str, str]:
    exchange = optimizer.exchange
    if not isinstance(exchange, Owners) or layer not in exchange.traffic or exchange.schemes is None:
        return "", ""
    owner = "all" if exchange.owner[layer] == EVERY_RANK else str(exchange.owner[layer])
    return owner, f"{bytes_(_arrives(exchange, layer))}, {exchange.schemes[layer].name}"


def _rows(optimizer: SecondOrder, entry: LayerEntry) -> list[tuple[str, ...]]:
    """One row a block that has factors of its own."""
    layer, owner = entry.layer, _owner_cells(optimizer, entry.name)
    operators = optimizer.state.get(entry.anchor, {}).get("operators", {})
    groups = "" if layer.groups == 1 else f" ({layer.groups} groups)"
    if not operators:
        form = "after the first step" if optimizer.by_block or optimizer.method.damped else "no factors"
        form = "on its owner" if owner[0] not in ("", "all") and optimizer.steps and form != "no factors" else form
        return [(entry.name, f"{layer.d_out} x {layer.d_in}{groups}", form, "", "", "", "", *owner)]
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
            _row_counts(optimizer, entry, block, sides),
            f"{size / 2**20:.3g} MiB",
            f"{work / 1e6:.3g} M",
            *(owner if not rows else ("", "")),
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


def _row_counts(optimizer: SecondOrder, entry: LayerEntry, block: str, sides: Iterable[str]) -> str:
    """How many rows each factor is made of, and whether these are fewer than its size."""
    layer, state = entry.layer, optimizer.state[entry.anchor]
    if "rows" not in state or not optimizer.capture_options.inputs:  # factors of gradients, or of Jacobians
        return ""
    fewest, fisher = float(torch.as_tensor(state["rows"]).min()), optimizer.capture_options.fisher  # of several maps
    diagonal = layer.one_hot and all(other.one_hot for other in entry.others.values())
    cells = []
    for name in _growing(optimizer, entry, sides):
        of_input, kept = name in IN_SIDE, state.get("memory", {}).get(block, {}).get(name, {})
        number = fewest * optimizer.options.memory.batches_in(kept)
        if of_input and diagonal:
            continue
        if not of_input and isinstance(fisher, Exact):
            cells.append(f"{name}: {number:.0f} for each output")
            continue
        number *= fisher.draws if isinstance(fisher, Drawn) and not of_input else 1
        d = layer.d_in if of_input else layer.d_out
        cells.append(f"{name}: {number:.0f} {'<' if round(number) < d else '>='} {d}")
    return ", ".join(cells)


def _of_depthwise(optimizer: SecondOrder) -> list[str]:
    """How many depthwise convolutions are left alone, and where they are."""
    modules = unwrap(optimizer.model).named_modules()
    names = [pattern_of(clean_name(name)) for name, module in modules if layer_of(module).depthwise]
    where = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(names).items())
    return [f"{len(names)} depthwise convolutions are among these: {where}; {DEPTHWISE_NOTE}"] if names else []


def _growing(optimizer: SecondOrder, entry: LayerEntry, sides: Iterable[str]) -> list[str]:
    """The factors whose size grows with the width; all of them, where there is no plan to say so."""
    plan, weight = optimizer.parametrization, entry.blocks.get(WEIGHT)
    if plan is None or plan.scheme == SP or weight is None:
        return list(sides)
    role = plan.parameters[weight.name].role
    return [name for name in sides if (role.fan_in if name in IN_SIDE else role.fan_out)]
