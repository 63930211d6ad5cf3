"""From the sizes of one parameter at two widths to its role and to how much each of its sides has grown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mukron.layers import Fans, Shape
from mukron.params.errors import ParametrizationError
from mukron.params.inventory import Reparametrized
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
    part = _part_of(base, here)
    if part:
        raise ParametrizationError(
            f'the parameters {where_base} are those of a part of this network, "{part}": pass that part, '
            f'model.get_submodule("{part}"), instead of the whole'
        )
    for names, others, where in ((base, here, where_base), (here, base, where_here)):
        missing = [name for name in names if name not in set(others)]
        if missing:
            other = where_here if where == where_base else where_base
            raise ParametrizationError(
                f"parameter {listed(missing)} exists {where} but not {other}; "
                "both must be the same network at two widths (same options, and the same depth unless the base shapes "
                "were made with depth=, as in base_shapes(factory, width=64, depth=4))"
            )


def _part_of(names: Sequence[str], here: Sequence[str]) -> str:
    """The module of a larger network that all of these parameters are in, by the names that they have there."""
    first = names[0] if names else ""
    outer = [name.removesuffix(f".{first}") for name in here if first and name.endswith(f".{first}")]
    found = [part for part in outer if {f"{part}.{name}" for name in names} <= set(here)]
    return "" if set(names) <= set(here) or len(found) != 1 else found[0]


def listed(names: Sequence[str]) -> str:
    """The first three names in quotes, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f'"{name}"' for name in names[:3]) + more


@dataclass(frozen=True)
class Unresolved:
    """A parameter at three widths, and what is said of it, from which its role follows.

    Attributes:
        base, wider: Its sizes at two widths; what differs grows.
        here: Its sizes in the network at hand.
        declared: The role that the user declared.
        owner: The type of the first module that owns it, for messages.
        bare: Whether its shape alone may say that it is a vector or is broadcast over samples: no known module owns it.
        part_of: The weight that the forward pass computes from it; None: it is used as it is.
    """

    base: Sizes
    wider: Sizes
    here: Sizes
    declared: Role | None
    owner: str
    bare: bool
    part_of: Reparametrized | None = None


class _UnknownRoleError(ParametrizationError):
    """One line of the error that lists all parameters whose role is not known."""


class _WrongRoleError(ParametrizationError):
    """A paragraph of that error: a declaration that does not hold, or uses that disagree."""


class _PartError(ParametrizationError):
    """A part of a reparametrized weight, of which that error has one line a weight."""


def resolve_all(
    parameters: Mapping[str, Unresolved], misdeclared: Mapping[str, str] | None = None
) -> dict[str, Growth]:
    """The role and growth of every parameter; one error names all whose role cannot be determined.

    misdeclared: what is wrong with the user's declarations, by the name that each is for.
    """
    misdeclared = misdeclared or {}
    for name, each in parameters.items():
        check_shapes(name, each.base.shape, each.wider.shape, each.here.shape)
    growths: dict[str, Growth] = {}
    unknown, wrong, parts = [], list(misdeclared.values()), dict[Reparametrized, list[str]]()
    for name, each in parameters.items():
        if name in misdeclared:
            continue
        try:
            growths[name] = resolve(name, each)
        except _UnknownRoleError as error:
            unknown.append(str(error))
        except _WrongRoleError as error:
            wrong.append(str(error))
        except _PartError as error:
            assert each.part_of is not None
            parts.setdefault(each.part_of, []).append(str(error))
    if parts:
        wrong.insert(0, _of_parts(parts))
    if unknown:
        title = f"the roles of {len(unknown)} of {len(parameters)} parameters are not known:"
        wrong.insert(0, "\n  ".join([title, *unknown, DECLARE]))
    if wrong:
        raise ParametrizationError("\n".join(wrong))
    return growths


DECLARE = (
    'Declare the role of each by its name, base_shapes(..., roles={"NAME": "ROLE"}), or in mukron_roles of the module '
    "that owns it, or register the type of that module (mukron.layers.register). input: only the side of the features "
    "that it gives grows, as of embeddings; output: only the side that it sums over; hidden: both; vector: a bias or "
    "gain; scalar: it is never scaled"
)


def _of_parts(parts: Mapping[Reparametrized, Sequence[str]]) -> str:
    """The paragraph on reparametrized weights, with a line to paste for each."""
    lines = ["no role is known for what reparametrized weights are computed from:"]
    for weight, names in parts.items():
        module = f'model.get_submodule("{weight.layer}")' if weight.layer else "model"
        line = f'  "{weight.name}", by {weight.kinds} from {" and ".join(names)}'
        lines.append(": ".join(filter(None, [line, weight.removal(module)])))
    lines.append(
        "Build the model without them, or take them off where it is built, by these lines, and leave them off: the "
        "plan is for the weights themselves"
    )
    if not all(weight.of_torch for weight in parts):
        lines[-1] += (
            ". Where a reparametrization of your own multiplies each entry by a number that does not depend on the "
            "width, as a mask does, declare the weight's role for the parameter that it is computed from"
        )
    return "\n".join(lines)


def resolve(name: str, parameter: Unresolved) -> Growth:
    """The role follows from what differs between ``base`` and ``wider``, the growth from ``base`` to ``here``."""
    base, wider, here = parameter.base, parameter.wider, parameter.here
    growing = _growing(base.shape, wider.shape)
    part_of = parameter.part_of
    if part_of is not None and growing and (part_of.of_torch or parameter.declared is None):
        raise _PartError(f'"{name}" {list(here.shape)}')
    growths = _growths_of_uses(name, parameter, len(growing))
    if parameter.declared is not None:
        return _declared_growth(name, parameter, growing, growths)
    if not growing and growths is None:
        return Growth(Role.SCALAR)  # whoever owns it: no side grows
    if growths is None:
        growth = _bare_growth(base.shape, here.shape, growing) if parameter.bare else None
        if growth is None:
            possible = _possible_roles(base.shape, here.shape, growing)
            raise _UnknownRoleError(
                f'parameter "{name}" {list(here.shape)}: its owner {parameter.owner} is not a known module; '
                f"{_dimensions(growing)}: {possible}"
            )
        return growth
    if len(set(growths.values())) > 1:
        raise _WrongRoleError(_disagreement(name, growths))
    return next(iter(growths.values()))


def _growths_of_uses(name: str, parameter: Unresolved, growing: int) -> dict[str, Growth] | None:
    """What every use says; None: some owner is not known."""
    growths: dict[str, Growth] = {}
    for use, base_fans in parameter.base.uses.items():
        wider_fans, here_fans = parameter.wider.uses.get(use), parameter.here.uses.get(use)
        if base_fans is None or wider_fans is None or here_fans is None:
            return None
        growths[use] = _growth(base_fans, wider_fans, here_fans)
        if here_fans.inputs > 1 and growths[use].role is Role.OUTPUT and growing > 1:
            raise _WrongRoleError(
                f'parameter "{name}": an output layer over the product of two growing inputs follows a law of its own, '
                "which is not covered; keep one of its inputs finite"
            )
    return growths


def _bare_growth(base: Shape, here: Shape, growing: Sequence[int]) -> Growth | None:
    """The role of a parameter without a known owner, where its shape leaves one law; None: it does not.

    A parameter of which one dimension grows and all others have size 1 has one number per unit: a gain, a bias, a class
    token. One with a first dimension of size 1 is broadcast over the samples, and is added to their features or joined
    with them, as position embeddings [1, N, d]: nothing is summed over a growing side, so that its law is that of an
    input weight with a finite fan-in, like an embedding's.
    """
    if len(growing) != 1:
        return None
    ratio = Fraction(here[growing[0]], base[growing[0]])
    if all(size == 1 for dimension, size in enumerate(base) if dimension not in growing):
        return Growth(Role.VECTOR, r_out=ratio)
    if len(base) >= 3 and base[0] == 1 and growing[0] != 0:
        return Growth(Role.INPUT, r_out=ratio)
    return None


def _possible_roles(base: Shape, here: Shape, growing: Sequence[int]) -> str:
    if len(growing) == 1:
        return "input, output or vector"
    if len({Fraction(here[dimension], base[dimension]) for dimension in growing}) > 1:
        return "hidden, but by different ratios: register the type of its owner"
    return "hidden"


def _dimensions(growing: Sequence[int]) -> str:
    """``dimension 1 grows``, ``dimensions 0 and 1 grow``."""
    if len(growing) == 1:
        return f"dimension {growing[0]} grows"
    return f"dimensions {', '.join(map(str, growing[:-1]))} and {growing[-1]} grow"


def _disagreement(name: str, growths: Mapping[str, Growth]) -> str:
    """What to do about a tied parameter whose uses disagree; of an embedding and heads that is known."""
    roles = ", ".join(f'{growth.role} as "{use}"' for use, growth in growths.items())
    found = f'parameter "{name}" is tied and its uses disagree: {roles}; no one scale serves both. '
    if {growth.role for growth in growths.values()} != {Role.INPUT, Role.OUTPUT}:
        return (
            found + "If they differ in how much they grow, no role serves both: untie them. Otherwise declare the role "
            f"of one of these uses by the name {name}, roles= of base_shapes, and let the forward pass scale the others"
        )
    heads = [use.rpartition(".")[0] for use, growth in growths.items() if growth.role is Role.OUTPUT]
    hooks = "; ".join(
        f'model.get_submodule("{head}").register_forward_pre_hook(lambda module, x: (x[0] * base_width / width,))'
        for head in heads
    )
    return (
        f'{found}Declare it an input, base_shapes(..., roles={{"{name}": "input"}}), and divide the logits by width / '
        "base width, unless the forward pass already scales them by the width (where it multiplies them by "
        "width**-0.5, as T5's does, write (base_width / width)**0.5 for base_width / width): in the forward pass, or "
        f"by a hook in the function that builds the model, {hooks}"
    )


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


def _growing(base: Shape, wider: Shape) -> list[int]:
    """The dimensions that grow with the width."""
    return [dimension for dimension, size in enumerate(base) if wider[dimension] != size]


def _growth(base: Fans, wider: Fans, here: Fans) -> Growth:
    grows_in, grows_out = wider.fan_in != base.fan_in, wider.fan_out != base.fan_out
    return Growth(
        Role.of(fan_in_grows=grows_in, fan_out_grows=grows_out, vector=here.vector),
        Fraction(here.fan_in, base.fan_in) if grows_in else ONE,
        Fraction(here.fan_out, base.fan_out) if grows_out else ONE,
    )


def _declared_growth(
    name: str, parameter: Unresolved, growing: Sequence[int], growths: Mapping[str, Growth] | None
) -> Growth:
    """The role must be that of a known use, or fit the dimensions that grow, which then must do so by one ratio."""
    role, base, here = parameter.declared, parameter.base.shape, parameter.here.shape
    assert role is not None
    if role is Role.SCALAR:
        return Growth(role)
    declared = f'parameter "{name}" {list(here)}: declared {role}'
    if not growing:
        raise _WrongRoleError(f"{declared}, but none of its dimensions grows")
    if growths is not None:
        sides = (role.fan_in, role.fan_out)
        for growth in growths.values():
            if (growth.role.fan_in, growth.role.fan_out) == sides:
                return Growth(role, growth.r_in, growth.r_out)
        known = " and ".join(f'{growth.role} as "{use}"' for use, growth in growths.items())
        raise _WrongRoleError(
            f"{declared}, but its owner is {parameter.owner}, which shows that it is {known}; leave it out"
        )
    if role is Role.HIDDEN and len(growing) == 1:
        raise _WrongRoleError(
            f"{declared}, which grows on both sides, but only dimension {growing[0]} grows; "
            "declare it input, output or vector"
        )
    if role is not Role.HIDDEN and len(growing) > 1:
        raise _WrongRoleError(
            f"{declared}, which grows on one side alone, but {_dimensions(growing)}; declare it hidden, or register "
            f"the type of its owner, {parameter.owner} (mukron.layers.register)"
        )
    ratios = {dimension: Fraction(here[dimension], base[dimension]) for dimension in growing}
    if len(set(ratios.values())) > 1:
        listed = ", ".join(f"dimension {dimension} by {ratio}" for dimension, ratio in ratios.items())
        raise _WrongRoleError(
            f'parameter "{name}": declared {role}, which needs one ratio, but its dimensions grow by different ones '
            f"({listed}); register the layer type of the module that owns it instead (mukron.layers.register)"
        )
    ratio = ratios[growing[0]]
    return Growth(role, ratio if role.fan_in else ONE, ratio if role.fan_out else ONE)
