"""A plan as a table for people: what every parameter is multiplied by under a method, and why."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from mukron.layers import Shape
from mukron.params.excluded import Excluded
from mukron.params.merging import ParameterRow, merged
from mukron.table import Table
from mukron.theory import SP, Method, Power, Role, Scheme, get_method, method_title
from mukron.trust import (
    FALLBACKS,
    Graft,
    StepRule,
    Trust,
    law_of,
    step_rule,
    takes_trust,
    usual_exclude,
    usual_fallback,
)

if TYPE_CHECKING:
    from mukron.params.parameter_plan import ParameterPlan
    from mukron.params.parametrization import Parametrization


def explanation(
    plan: Parametrization,
    asked: Method | str,
    fallback: str | StepRule | None,
    trust: Trust | None,
    exclude: tuple[Excluded, ...] | None,
    whole: bool = False,
) -> Table:
    """Torch's own methods have neither a trust nor a fallback rule, Muon has no trust. whole: one row a parameter."""
    method, title = get_method(asked), method_title(asked)
    preconditions, decays = method.layerwise, title != get_method("adam").title  # AdamW has weight decay, Adam none
    rule = usual_fallback(method, trust) if fallback is None else step_rule("fallback", fallback, FALLBACKS)
    left = usual_exclude(method, trust) if exclude is None else exclude
    bound = get_method(trust.rates) if takes_trust(method) and trust is not None and trust.rates else method
    others = get_method(rule.name)
    scales = {law: plan.scales(law) for law in (method, bound, others)}
    factors = [factor.name for factor in method.damped]
    fallen = {name for name in plan.parameters if preconditions and plan.falls_back(name, left, method)}
    grafted = bound if isinstance(trust, Graft) else method  # RMS takes Adam's rates, and has no eps
    with_eps = method if method.has_eps else grafted
    has_eps = any((others if name in fallen else with_eps).has_eps for name in plan.parameters)
    deep = _is_deep(plan)
    rows = []
    for name, entry in plan.parameters.items():
        falls_back, row = name in fallen, others if name in fallen else bound
        damped = () if falls_back else method.damped if len(entry.shape) > 1 else method.damped_in_vectors
        guarded = others if falls_back else with_eps
        scale, rho = scales[row][name], {factor.name: scales[method][name].damping[factor.name] for factor in damped}
        cells = (
            *_growth(entry, deep),
            _short(scale.lr),
            *((_short(scales[guarded][name].eps) if guarded.has_eps else "-",) if has_eps else ()),
            *(_short(rho[x]) if x in rho else "-" for x in factors),
            *((_short(scale.decay),) if decays else ()),
            (f"not preconditioned, {method_title(rule.name)}'s row: " if falls_back else "")
            + _reason(row, plan, entry),
        )
        rows.append(ParameterRow(name, cells, entry.std, prod(entry.base_shape), digits=4 if whole else 3))
    columns = (
        *(*_columns(deep), "lr x"),
        *(("eps x",) if has_eps else ()),
        *(f"rho_{factor} x" for factor in factors),
        *(("decay x",) if decays else ()),
        "why",
    )
    law = [law_of(trust, method)] if preconditions else []
    law += [OF_BLOCKS] if preconditions and method.gradients_alone and plan.scheme != SP else []
    law += [REGIME] if {"A", "B"} & set(factors) and plan.scheme != SP else []
    lines = _lines(rows if whole else merged(rows), deep)
    return Table(f"{title}, {plan.scheme}", columns, lines, (*_notes(plan, decays), *law), minor=("base shape",))


def overview(plan: Parametrization) -> Table:
    """What every parameter is and how it grew, without any method's multipliers. Equal rows are one."""
    deep = _is_deep(plan)
    rows = [
        ParameterRow(name, _growth(entry, deep), entry.std, prod(entry.base_shape), digits=3)
        for name, entry in plan.parameters.items()
    ]
    return Table("Parameters", _columns(deep), _lines(merged(rows), deep), minor=("base shape",))


def _is_deep(plan: Parametrization) -> bool:
    return any(entry.growth.L is not None for entry in plan.parameters.values())


def _columns(deep: bool) -> tuple[str, ...]:
    """The heads of the columns that no method matters to."""
    return ("parameter", "role", "shape", "base shape", "r_in", "r_out", *(["L"] if deep else []), "initial std")


def _growth(entry: ParameterPlan, deep: bool) -> tuple[str, ...]:
    """The cells between the name and the initial std."""
    return (
        *(str(entry.role), sizes_text(entry.shape), sizes_text(entry.base_shape)),
        *(_short(float(ratio)) for ratio in (entry.growth.r_in, entry.growth.r_out)),
        *([] if not deep else ["-" if entry.growth.L is None else _short(float(entry.growth.L))]),
    )


def _lines(rows: Sequence[ParameterRow], deep: bool) -> tuple[tuple[str, ...], ...]:
    place = len(_columns(deep)) - 2  # of the initial std among the cells after the name
    return tuple((row.name, *row.cells[:place], row.std_text, *row.cells[place:]) for row in rows)


REGIME = (
    "Damping: its multipliers hold where a factor is made of fewer rows (samples x positions x remembered batches) "
    "than the layer has inputs (A) or outputs (B); with more rows, if the factor's effective rank does not grow with "
    "the width. opt.plan() shows rows and ranks."
)

OF_BLOCKS = (
    "Multipliers are those of whole matrices. Where a weight is cut into more blocks than at the base width, by block= "
    'or by rows, split={"qkv": "rows:64"}, learning rate, eps and damping follow their number, too: see opt.rate(name).'
)


def _notes(plan: Parametrization, decays: bool) -> tuple[str, ...]:
    notes = ["r_in, r_out: fan-in and fan-out over those at the base width; 'x' columns multiply your own numbers."]
    if _is_deep(plan):
        notes.append(
            "L: residual blocks over those at the base depth, - outside of blocks. Your forward pass must multiply "
            "what each block adds by 1/L; mukron.diagnose.check_branches measures whether it does."
        )
    notes += [f"{name} is also {', '.join(entry.tied)}" for name, entry in plan.parameters.items() if entry.tied]
    if plan.output_exponent is not None:
        notes.append(f"b of the output weights is {plan.output_exponent} by request.")
    if decays:
        law = f"r_in^{-plan.decay} by request" if plan.decay and plan.scheme != SP else "1 in every layer"
        notes.append(
            "A step with decoupled weight decay takes off a part of each weight: learning rate times weight decay. "
            f"decay x multiplies that part; it is {law}."
        )
    return tuple(notes)


REASONS = {
    Role.INPUT: "fan-in does not grow",
    Role.HIDDEN: "both fans grow",
    Role.OUTPUT: "sums over a growing fan-in",
    Role.VECTOR: "one number per unit",
    Role.SCALAR: "no side grows: not scaled with the width",
}


def _reason(method: Method, whole: Parametrization, plan: ParameterPlan) -> str:
    role, scheme = plan.role, whole.scheme
    response = method.response(role, scheme.s)
    in_block = "" if plan.growth.L is None else _reason_of_depth(response.depth, scheme)
    if role is Role.SCALAR:
        return REASONS[role] + in_block
    move = response.total
    if scheme.r is None:
        step = f"SP leaves its step, which changes like M^{move}" if move else "its step keeps its size"
    elif move == -scheme.r * role.fan_out:
        step = "learning rate needs no scaling"
    else:
        step = f"unscaled, it would move like M^{move}"
    if plan.embedding and whole.embedding_lr:
        step += f", and r_out^{whole.embedding_lr} was chosen for embeddings"
    return f"{REASONS[role]}; {step}{in_block}"


def _reason_of_depth(move: Fraction, scheme: Scheme) -> str:
    if scheme.r is None:
        return "; in a residual block, whose depth SP leaves alone"
    return f"; in a residual block, where it would move like {Power(depth=move)}" if move else "; in a residual block"


def sizes_text(shape: Shape) -> str:
    """A shape as a cell."""
    return " x ".join(map(str, shape)) or "1"


def _short(number: float) -> str:
    return f"{number:.4g}"
