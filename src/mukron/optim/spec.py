"""One record a method: all that the rest of the library knows of an optimizer stands here and nowhere else.

The run configuration reads its options and default damping, the command line its name and range of learning rates, the
cost model the size of its state, the stacked engine what it can train at once, the writer of scripts its arguments.
A method's record stands in the file of its optimizer, as ``@register(MethodSpec(...))``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer

from mukron.damping import Constant, Rule
from mukron.optim import sizes
from mukron.optim.docs import arguments_of
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import ADAMS_RATE, Trust, usual_interval
from mukron.optim.run_options import Option
from mukron.optim.sizes import LayerSize
from mukron.theory import FAMILIES, METHODS, Family, Method, get_method
from mukron.theory.methods import ALIASES, TITLES

CAPTURED = ("inputs", "signals", "jacobian")
THEORYS_OWN = frozenset((*METHODS, *ALIASES, *FAMILIES))

Kind = TypeVar("Kind", bound=SecondOrder)


class RunFields(Protocol):
    """What a record may read of a run; ``mukron.train.RunConfig`` has it."""

    @property
    def method(self) -> str: ...
    @property
    def method_options(self) -> Mapping[str, Any]: ...
    @property
    def loss(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def seed(self) -> int: ...


def with_momentum(run: RunFields, options: dict[str, Any]) -> dict[str, Any]:
    """The options, and the run's momentum."""
    return {"momentum": run.momentum, **options}


def with_fisher(run: RunFields, options: dict[str, Any]) -> dict[str, Any]:
    """Likewise, for methods with a Fisher: its likelihood follows from the loss, its draws from the seed."""
    likelihood = "gaussian" if run.loss == "mse" else "categorical"
    return {"likelihood": likelihood, **with_momentum(run, options), "seed": run.seed}


@dataclass(frozen=True)
class MethodSpec:
    """The record of a method.

    Attributes:
        name: The name in ``RunConfig.method`` and on the command line.
        method: The exponents, from ``mukron.theory``.
        optimizer: The class, which ``register`` fills in: a ``SecondOrder`` or one of torch's.
        options: The optimizer's arguments that ``RunConfig.method_options`` may give.
        damping: The damping if none is given; a bare number means another number of the same rule. None: no damping.
        sp_damping: The damping that people use with it today, without muP. None: ``damping``.
        lr: A learning rate small enough for the first steps to follow the theory at every width.
        bounded_lr: The learning rate if none is given and steps have a trust that leaves the method its own units.
        lr_range: The learning rates to search, as powers of two: (-11, -2) is 2^-11 to 2^-2.
        plain_lr_range: The same for steps without a trust. None: ``lr_range``.
        captures: What it records of a pass: some of "inputs", "signals" and "jacobian".
        arguments: From a run and its parsed options to the optimizer's keyword arguments.
        state_size: From a layer's sizes and all options to the numbers that its factors and inverses hold.
        moments: From a run to the number of copies of the weights that momentum and moments take.
        stacks: Whether many runs can be trained as one stack; each option says with which of its values.
        samples: How many samples suit a quick check.
        largest_side: The longest side of a layer that suits a quick check. None: any.
        family: Variants with other exponents, as in "shampoo:1/4"; the optimizer takes the exponents by their names.

    Example:
        >>> from mukron.optim.spec import spec_of
        >>> spec = spec_of("kfac")
        >>> spec.optimizer.__name__, spec.damping, spec.lr_range
        ('KFAC', Rescaled(rho=1.0, floor=0.01), (-7, 1))
        >>> [option.name for option in spec_of("adamw").options]
        ['beta2', 'eps']
    """

    name: str
    method: Method
    lr: float
    lr_range: tuple[int, int]
    optimizer: type[Optimizer] = Optimizer
    options: tuple[Option, ...] = ()
    damping: Rule | None = None
    sp_damping: Rule | None = None
    plain_lr_range: tuple[int, int] | None = None
    bounded_lr: float = 0.1
    captures: tuple[str, ...] = ()
    arguments: Callable[[RunFields, dict[str, Any]], dict[str, Any]] = with_momentum
    state_size: Callable[[LayerSize, Mapping[str, Any]], int] = sizes.nothing
    moments: Callable[[RunFields], int] = sizes.momentum_and_graft
    stacks: bool = False
    samples: int = 32
    largest_side: int | None = None
    family: Family | None = None

    def __post_init__(self) -> None:
        low, high = self.lr_range
        if not low < high:
            raise ValueError(
                f"method {self.name!r}: lr_range={self.lr_range} must rise: powers of two, as in (-11, -2)"
            )
        for captured in self.captures:
            if captured not in CAPTURED:
                raise ValueError(f"method {self.name!r}: captures={captured!r}; known: {', '.join(CAPTURED)}")

    @property
    def title(self) -> str:
        """The name for people: "K-FAC"."""
        return TITLES.get(self.name, self.method.title)

    @property
    def layerwise(self) -> bool:
        """Whether it takes the model and works layer by layer; torch's own optimizers take parameter groups."""
        return issubclass(self.optimizer, SecondOrder)

    @property
    def known_options(self) -> dict[str, Option]:
        """The options by name."""
        return {option.name: option for option in self.options}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's arguments that have a default."""
        arguments = arguments_of(self.optimizer)
        return {name: given.default for name, given in arguments.items() if given.default is not given.empty}

    def parsed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as the optimizer takes them: "ema:0.95" becomes ``EMA(0.95)``.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        known = self.known_options
        return {name: known[name].parse(value) for name, value in options.items()}

    def all_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Likewise, with the optimizer's defaults for those that are not given.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        defaults = {name: self.defaults[name] for name in self.known_options if name in self.defaults}
        return {**defaults, **self.parsed(options)}

    def bounded(self, options: Mapping[str, Any]) -> bool:
        """Whether steps have a trust, with these options or by default.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        return Trust.of(options.get("trust", self.defaults.get("trust"))) is not None

    def rates(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """The learning rates to search with these options, as powers of two.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        return self.lr_range if self.bounded(options) else self.plain_lr_range or self.lr_range

    def usual_lr(self, options: Mapping[str, Any]) -> float:
        """The learning rate where none is given. With a trust whose steps are of Adam's length it is Adam's.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        trust = Trust.of(options.get("trust", self.defaults.get("trust")))
        if not self.layerwise or trust is None:
            return self.lr
        return ADAMS_RATE if trust.rates == "adamw" else self.bounded_lr

    def interval(self, options: Mapping[str, Any]) -> int:
        """How many steps there are from one refresh of the inverses to the next.

        Args:
            options: Options by name, as a run's configuration has them.
        """
        if "inverse_every" not in self.known_options:
            return 1
        given: int | None = options.get("inverse_every")
        return given or usual_interval(self.bounded(options), options.get("factor_every", 1))

    def keywords(self, run: RunFields) -> dict[str, Any]:
        """The optimizer's keyword arguments that follow from the run's method, options, loss, momentum and seed.

        Args:
            run: The run's configuration.
        """
        return self.arguments(run, {**self.parsed(run.method_options), **self.variant(run.method)})

    def variant(self, method: str) -> dict[str, Any]:
        """The optimizer's arguments in the name of a variant: {"sides": "input"} of "soap:input".

        Args:
            method: The name, as a run's configuration has it.
        """
        _, _, settings = method.partition(":")
        return self.family.read(settings) if self.family is not None and settings else {}


SPECS: dict[str, MethodSpec] = {}  # by name


def register(spec: MethodSpec) -> Callable[[type[Kind]], type[Kind]]:
    """Make a method known by name: to ``RunConfig``, the command line, studies, and ``mukron.theory``.

    Decorates the optimizer's class, which gets the record as ``spec``, and from it ``method`` and ``rule``.

    Args:
        spec: The method's record, without its ``optimizer``.

    Returns:
        A decorator that returns the class.

    Raises:
        ValueError: Another method has that name.

    Example:
        A method with the exponents of Adam, whose steps are the signs of the gradient::

            @register(MethodSpec("signsgd", Method("signsgd", "signSGD", ADAM.factors), lr=0.001, lr_range=(-12, -3)))
            class SignSGD(SecondOrder):
                ...

            RunConfig(method="signsgd")

        K-FAC's class was decorated with its record:

        >>> from mukron.optim import KFAC
        >>> KFAC.spec is spec_of("kfac")
        True
    """

    def decorate(cls: type[Kind]) -> type[Kind]:
        cls.spec = replace(spec, optimizer=cls)
        cls.method = spec.method
        cls.rule = Constant if spec.damping is None else type(spec.damping)  # without factors nothing is damped
        add(cls.spec)
        return cls

    return decorate


def add(spec: MethodSpec) -> MethodSpec:
    """Make known a record that names its optimizer itself, such as one of torch's. ``register`` does it for a class."""
    before = SPECS.get(spec.name)
    if before is not None and before.optimizer.__qualname__ != spec.optimizer.__qualname__:
        raise ValueError(f"method {spec.name!r} is registered already, by {before.optimizer.__name__}")
    if METHODS.setdefault(spec.method.name, spec.method) != spec.method:
        raise ValueError(f"method {spec.method.name!r}: mukron.theory knows other exponents by that name")
    if spec.name not in METHODS:
        ALIASES[spec.name] = spec.method.name
    if spec.family is not None:
        FAMILIES.setdefault(spec.family.name, spec.family)
    SPECS[spec.name] = spec
    return spec


def unregister(name: str) -> None:
    """Undo ``register``. The rows that ``mukron.theory`` has by itself stay."""
    spec = SPECS.pop(name)
    kept = THEORYS_OWN | {other.method.name for other in SPECS.values()}
    if spec.method.name not in kept:
        METHODS.pop(spec.method.name)
    if name not in kept:
        ALIASES.pop(name, None)
    if spec.family is not None and spec.family.name not in kept:
        FAMILIES.pop(spec.family.name)


def spec_of(name: str) -> MethodSpec:
    """The record of a method, or of the family of a variant.

    Args:
        name: A method as ``RunConfig`` takes it: a name, an alias such as "gn", or a variant such as "shampoo:1/4".

    Returns:
        Its record.

    Raises:
        ValueError: There is no such method, or none with an optimizer; the error lists those that there are.

    Example:
        >>> spec_of("shampoo:1/4").name, spec_of("Adam").name
        ('shampoo', 'adamw')
    """
    family = get_method(name).name.partition(":")[0]
    written = name.strip().lower().partition(":")[0]
    matching = [spec for spec in SPECS.values() if family in (spec.name, spec.method.name)]
    for spec in sorted(matching, key=lambda spec: spec.name != written):  # two may have the same exponents
        return spec
    raise ValueError(f"no optimizer of this library; known: {', '.join(method_names())}")


def method_names() -> list[str]:
    """What ``RunConfig.method`` may be, for help and errors: "soap" and "soap:SIDES"."""
    return [
        name for spec in SPECS.values() for name in (spec.name, *([] if spec.family is None else [spec.family.pattern]))
    ]
