"""Which layers of a model an optimizer preconditions, and what it must know of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import Parameter

from mukron.curvature import Layout, layout
from mukron.damping import Sides
from mukron.params import Parametrization
from mukron.params.inventory import clean_name, inventory, unwrap
from mukron.params.resolve import Growth
from mukron.theory import Method

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True)
class Slot:
    """A layer with a weight, a bias or both to be trained."""

    name: str
    layout: Layout
    parameters: Mapping[str, Parameter]  # by block: "weight", "bias"
    sides: Mapping[str, Sides] = field(default_factory=dict)

    @property
    def anchor(self) -> Parameter:
        """The parameter whose optimizer state holds the layer's curvature."""
        return next(iter(self.parameters.values()))

    def sides_of(self, block: str) -> Sides:
        return self.sides.get(block, self.sides[next(iter(self.sides))])

    def matrix(self, block: str, values: Tensor) -> Tensor:
        """As a matrix [groups, d_out, d_in]; a bias has one column."""
        if block == WEIGHT:
            return self.layout.matrix(values)
        return values.reshape(self.layout.groups, self.layout.d_out, 1)

    def values(self, block: str, matrix: Tensor) -> Tensor:
        """The inverse of ``matrix``."""
        return self.layout.weight(matrix) if block == WEIGHT else matrix.reshape(-1)


def find_slots(
    model: nn.Module, owned: Collection[int], exclude: Collection[str], plan: Parametrization | None, method: Method
) -> Iterator[Slot]:
    """Every layer of a known type whose parameters the optimizer owns (ids in ``owned``) and that is not excluded."""
    uses = {id(found.parameter): list(found.uses) for found in inventory(model).values()}
    names = {id(found.parameter): name for name, found in inventory(model).items()}
    scales = plan.scales(method) if plan is not None else {}
    for module_name, module in unwrap(model).named_modules():
        name = clean_name(module_name)
        known = layout(module)
        if known is None or _excluded(name, exclude):
            continue
        parameters = {
            block: parameter
            for block in (WEIGHT, BIAS)
            if isinstance(parameter := getattr(module, block, None), Parameter) and id(parameter) in owned
        }
        for parameter in parameters.values():
            if len(uses[id(parameter)]) > 1:
                tied = ", ".join(f'"{use}"' for use in uses[id(parameter)])
                raise ValueError(
                    f"tied parameter {tied}: the curvature of one use is not that of the other. Leave it to the "
                    f'fallback rule, exclude=("{name}", ...) with every layer that uses it'
                )
        if plan is not None and WEIGHT in parameters:
            _refuse_growing_groups(name, known, plan.parameters[names[id(parameters[WEIGHT])]].growth, method)
        if parameters:
            sides = {block: _sides(plan, names[id(parameter)], scales) for block, parameter in parameters.items()}
            yield Slot(name, known, parameters, sides)


def _refuse_growing_groups(name: str, known: Layout, growth: Growth, method: Method) -> None:
    """The law is about factors of a whole layer. A depthwise convolution's are of one channel each, and others grow."""
    out_side = any(factor.delta for factor, _ in method.factors)
    if known.groups > 1 and growth.r_in == 1 and growth.r_out > 1 and out_side:
        raise ValueError(
            f'layer "{name}" has {known.groups} groups, and their number grows with the width; the factors of '
            f"{method.title} are those of one group, for which muP has no exponents. Leave it to the fallback rule: "
            f'exclude=("{name}",)'
        )


def _sides(plan: Parametrization | None, name: str, scales: Mapping[str, object]) -> Sides:
    if plan is None:
        return Sides({}, {})
    growth = plan.parameters[name].growth
    r_in, r_out = float(growth.r_in), float(growth.r_out)
    return Sides({"A": r_in, "R": r_in, "B": r_out, "L": r_out}, scales[name].damping)  # type: ignore[attr-defined]


def _excluded(name: str, exclude: Collection[str]) -> bool:
    """A layer by its own name, or by that of a module it is in."""
    return any(name == each or name.startswith(f"{each}.") for each in exclude)
