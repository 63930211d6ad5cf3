"""From the sizes of one parameter at two widths to its role and to how much each of its sides has grown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mukron.layers import Fans, Shape
from mukron.params.errors import ParametrizationError
from mukron.theory import Power, Role
from mukron.theory.methods import ONE


@dataclass(frozen=True)
class Sizes:
    """A parameter's shape, and its fans at every place that uses it."""

    shape: Shape
    uses: Mapping[str, Fans | None]


@dataclass(frozen=True)
class Growth:
    """A parameter's role, and its fan-in and fan-out over those at the base width (1 for a finite side).

    L is the number of residual blocks over that at the base depth, if it is inside of one; None: it is not, or depth
    was not asked for.
    """

    role: Role
    r_in: Fraction = ONE
    r_out: Fraction = ONE
    L: Fraction | None = None

    def factor(self, power: Power) -> float:
        """What a power of the growth is for this parameter."""
        return power.of(self.r_in, self.r_out, ONE if self.L is None else self.L)

    def __str__(self) -> str:
        """The role, and L inside of a residual block: ``hidden, L = 4``."""
        return str(self.role) if self.L is None else f"{self.role}, L = {self.L}"


def check_names(base: Iterable[str], here: Iterable[str], where_here: str, where_base: str) -> None:
    """Both networks must have the same parameters."""
    base, here = list(base), list(here)
    for names, others, where in ((base, here, where_base), (here, base, where_here)):
        missing = [name for name in names if name not in set(others)]
        if missing:
            other = where_here if where == where_base else where_base
            raise ParametrizationError(
                f"parameter {listed(missing)} exists {where} but not {other}; "
                "both must be the same network at two widths (same options, and the same depth unless the base shapes "
                "were made with depth=, as in base_shapes(factory, width=64, depth=4))"
            )


def listed(names: Sequence[str]) -> str:
    """The first three names in quotes, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f'"{name}"' for name in names[:3]) + more


def resolve(name: str, base: Sizes, wider: Sizes, here: Sizes, declared: Role | None, owner: str) -> Growth:
    """The role follows from what differs between ``base`` and ``wider``, the growth from ``base`` to ``here``."""
    check_shapes(name, base.shape, wider.shape, here.shape)
    if declared is not None:
        return _declared_growth(name, base.shape, wider.shape, here.shape, declared)
    if base.shape == wider.shape and None in base.uses.values():
        return Growth(Role.SCALAR)  # whoever owns it: no side grows
    growths: dict[str, Growth] = {}
    for use, base_fans in base.uses.items():
        wider_fans, here_fans = wider.uses.get(use), here.uses.get(use)
        if base_fans is None or wider_fans is None or here_fans is None:
            raise ParametrizationError(
                f'parameter "{name}" {list(here.shape)}: its owner {owner} is not a known module, so its fan-in and '
                f'fan-out are not known; declare its role, base_shapes(..., roles={{"{name}": "input"}}) '
                "(input, hidden, output, vector or scalar), or register the module's layer type "
                "(mukron.layers.register)"
            )
        growths[use] = _growth(base_fans, wider_fans, here_fans)
        if here_fans.inputs > 1 and growths[use].role is Role.OUTPUT and _growing(base.shape, wider.shape) > 1:
            raise ParametrizationError(
                f'parameter "{name}": an output layer over the product of two growing inputs follows a law of its own, '
                "which is not covered; keep one of its inputs finite"
            )
    if len(set(growths.values())) > 1:
        roles = ", ".join(f'{growth.role} as "{use}"' for use, growth in growths.items())
        raise ParametrizationError(
            f'parameter "{name}" is tied and its uses disagree: {roles}; no one scale serves both. Declare the role '
            f'that holds, base_shapes(..., roles={{"{name}": "input"}}), and let the forward pass scale the other use '
            "(for an embedding tied to the head: divide the logits by width / base width)"
        )
    return next(iter(growths.values()))


def check_shapes(name: str, base: Shape, wider: Shape, here: Shape) -> None:
    if not len(base) == len(wider) == len(here):
        raise ParametrizationError(
            f'parameter "{name}": {len(here)} dimensions here, {len(base)} at the base width; '
            "a parameter must keep its dimensions and change their sizes only"
        )
    for dimension, (size, size_wider, size_here) in enumerate(zip(base, wider, here, strict=True)):
        which = f'parameter "{name}", dimension {dimension}'
        if size_wider == size and size_here != size:
            raise ParametrizationError(
                f"{which}: {size_here} here and {size} at the base width, but it does not grow with the width; "
                "build both with the same input size, classes and options (if it is a width that is rounded, take a "
                "base width at which twice the width rounds to more)"
            )
        if size_wider < size or size_here < size:
            raise ParametrizationError(
                f"{which}: shrinks from {size} at the base width to {min(size_wider, size_here)}; the base must be the "
                "narrowest network: choose a smaller base width"
            )


def _growing(base: Shape, wider: Shape) -> int:
    return sum(size != other for size, other in zip(base, wider, strict=True))


def _growth(base: Fans, wider: Fans, here: Fans) -> Growth:
    grows_in, grows_out = wider.fan_in != base.fan_in, wider.fan_out != base.fan_out
    return Growth(
        Role.of(fan_in_grows=grows_in, fan_out_grows=grows_out, vector=here.vector),
        Fraction(here.fan_in, base.fan_in) if grows_in else ONE,
        Fraction(here.fan_out, base.fan_out) if grows_out else ONE,
    )


def _declared_growth(name: str, base: Shape, wider: Shape, here: Shape, role: Role) -> Growth:
    """A declared parameter has no known sides: all dimensions that grow must do so by one ratio."""
    if role is Role.SCALAR:
        return Growth(role)
    growing = [dimension for dimension, size in enumerate(base) if wider[dimension] != size]
    if role is Role.HIDDEN and len(growing) == 1:
        raise ParametrizationError(
            f'parameter "{name}" {list(here)}: declared hidden, which grows on both sides, but only dimension '
            f"{growing[0]} grows; declare it input, output or vector"
        )
    if not growing:
        raise ParametrizationError(
            f'parameter "{name}" {list(here)}: declared {role}, but none of its dimensions grows'
        )
    ratios = {dimension: Fraction(here[dimension], base[dimension]) for dimension in growing}
    if len(set(ratios.values())) > 1:
        listed = ", ".join(f"dimension {dimension} by {ratio}" for dimension, ratio in ratios.items())
        raise ParametrizationError(
            f'parameter "{name}": declared {role}, which needs one ratio, but its dimensions grow by different ones '
            f"({listed}); register the layer type of the module that owns it instead (mukron.layers.register)"
        )
    ratio = ratios[growing[0]]
    return Growth(role, ratio if role.fan_in else ONE, ratio if role.fan_out else ONE)
