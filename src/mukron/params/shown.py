"""How base shapes and plans show themselves: in a few lines, and in notebooks as a table with a row per kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from mukron.notebook import Shown
from mukron.params.explanation import overview, sizes_text
from mukron.params.merging import ParameterRow, merged
from mukron.params.parameter_plan import ParameterPlan
from mukron.table import Table
from mukron.theory import Scheme

if TYPE_CHECKING:
    from mukron.params.depth import BlockStack
    from mukron.params.parametrization import Parametrization
    from mukron.params.shapes import BaseParameter

GROWING = ("r_in", "r_out", "L")  # what a growth says


class ShownShapes(Shown):
    """What base shapes have beside their data."""

    parameters: Mapping[str, BaseParameter]
    width: float | None
    depth: int | None
    stacks: tuple[BlockStack, ...]

    def _summary(self) -> list[str]:
        at = [f"{name} {size:g}" for name, size in (("width", self.width), ("depth", self.depth)) if size is not None]
        entries = self.parameters.values()
        numbers = sum(math.prod(entry.base.shape) for entry in entries)
        if any(entry.wider is None for entry in entries):
            grows = "what grows with the width is seen when a wider network is parametrized"
        else:
            growing = sum(entry.wider is not None and entry.wider.shape != entry.base.shape for entry in entries)
            grows = f"{growing} of them grow with the width"
        declared = sum(entry.role is not None for entry in entries)
        blocks = ", ".join(f"{stack.container} ({len(stack.blocks)})" for stack in self.stacks)
        return [
            f"Base shapes: {len(self.parameters)} parameters{' at ' if at else ''}{', '.join(at)}",
            f"{numbers:,} numbers; {grows}",
            *([f"declared roles: {declared}"] if declared else []),
            *([f"residual blocks: {blocks}"] if blocks else []),
        ]

    def _tables(self) -> list[Table]:
        rows = [
            ParameterRow(
                name,
                (
                    sizes_text(entry.base.shape),
                    "-" if entry.wider is None else sizes_text(entry.wider.shape),
                    "-" if entry.role is None else str(entry.role),
                ),
                entry.spread.std,
                entry.spread.numbers,
                digits=3,
            )
            for name, entry in self.parameters.items()
        ]
        columns = ("parameter", "base shape", "wider", "declared role", "initial std")
        return [Table("Parameters", columns, tuple((row.name, *row.cells, row.std_text) for row in merged(rows)))]


class ShownPlan(Shown):
    """What a plan has beside its data."""

    scheme: Scheme
    parameters: Mapping[str, ParameterPlan]
    output_exponent: Fraction | str | None
    base_width: float | None
    decay: Fraction
    embedding_lr: Fraction

    def _summary(self) -> list[str]:
        base = "" if self.base_width is None else f", base width {self.base_width:g}"
        roles = Counter(str(plan.role) for plan in self.parameters.values())
        growths = [plan.growth for plan in self.parameters.values()]
        sides = {name: max((getattr(growth, name) or 1 for growth in growths), default=1) for name in GROWING}
        grew = ", ".join(f"{name} up to {float(largest):.4g}" for name, largest in sides.items() if largest != 1)
        chosen = {"output_exponent": self.output_exponent, "decay": self.decay, "embedding_lr": self.embedding_lr}
        lines = [
            f"Parametrization: {self.scheme}{base}, {len(self.parameters)} parameters",
            f"roles: {', '.join(f'{count} {role}' for role, count in roles.items())}",
            f"growth since the base shapes: {grew or 'none'}",
            *(f"{name} {value} by request" for name, value in chosen.items() if value),
        ]
        return [*lines, "explain(method) has each parameter's multipliers; parameters has the plan of each"]

    def _tables(self) -> list[Table]:
        return [overview(cast("Parametrization", self))]
