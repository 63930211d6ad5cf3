"""Parameter groups for other people's optimizers: learning rates, eps and weight decay that follow the width.

    lr            <- lr m,  m the method's multiplier, corrected for what the optimizer scales by itself
                     (SOAP's is that of training, not of its first step: docs/theory.md, "SOAP in training")
    weight_decay  <- weight_decay r_in^-k / m,  so that a step takes lr weight_decay r_in^-k off; k is the plan's decay
    eps           <- eps times the growth of what it is added to

docs/optimizers.md, "Other people's optimizers", says what each optimizer is taken to do by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from mukron.arguments import check_number, check_whole
from mukron.params.errors import ParametrizationError
from mukron.params.inventory import Found
from mukron.params.shape_factor import ADJUSTMENTS, SCALINGS, check_scaling, shape_factor
from mukron.theory import METHODS, SP, Method, get_method, method_title, soap

if TYPE_CHECKING:
    from mukron.params.parametrization import Parametrization

LARGEST_SIDE = 10_000  # that pytorch_optimizer's SOAP preconditions by default


@dataclass(frozen=True)
class GroupFormat:
    """What the optimizers of a method take, and what they call it.

    Attributes:
        eps_key: The entry of a group that is their eps; None: they have none.
        eps: Their usual eps.
        matrices: Whether they are for matrices inside a network alone.
        kernels: Whether these may have more than two dimensions, as kernels of convolutions.
        entries: What else their groups must say.
        entries_beside: What groups of all other parameters must say.
    """

    eps_key: str | None = None
    eps: float = 0.0
    matrices: bool = False
    kernels: bool = True
    entries: Mapping[str, Any] = field(default_factory=dict)
    entries_beside: Mapping[str, Any] = field(default_factory=dict)


FORMATS = {
    "sgd": GroupFormat(),
    "adam": GroupFormat("eps", 1e-8),
    "lion": GroupFormat(),
    # pytorch_optimizer's Muon, which trains all parameters, asks in which way; torch's takes two dimensions alone
    "muon": GroupFormat("eps", 1e-7, True, False, {"use_muon": True}, {"use_muon": False}),
    "soap": GroupFormat("eps", 1e-8, True, False),  # its law is that of two sides, and a kernel has four
    # its eps is added to the factors once, at the start; decay would be a part of the gradient otherwise
    "shampoo": GroupFormat("matrix_eps", 1e-6, True, entries={"weight_decouple": True}),
}
MATRIX_METHODS = tuple(name for name, known in FORMATS.items() if known.matrices)


@dataclass(frozen=True)
class GroupRequest:
    """What groups are asked for; ``Parametrization.param_groups`` describes it."""

    method: Method | str
    lr: float
    weight_decay: float
    eps: float | None
    beside: str | None
    scaling: str | None
    max_precondition_dim: int | None

    def __post_init__(self) -> None:
        get_method(self.method)  # refuses what is none, before anything else
        for argument, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{argument} must be a number, got {value!r:.80}")
            if not 0 <= value < math.inf:
                raise ParametrizationError(f"{argument} must be finite and must not be negative, got {value}")
        if str(getattr(self.method, "name", self.method)).strip().lower() == "adam" and self.weight_decay:
            raise ParametrizationError(
                "Adam mixes weight decay into its normalized gradient, where no width-independent scale exists; "
                'use param_groups("adamw", ...) with torch.optim.AdamW'
            )
        if self.beside is not None and self.beside not in MATRIX_METHODS:
            expected = ", ".join(f'"{name}"' for name in MATRIX_METHODS)
            raise ParametrizationError(f"beside={self.beside!r}: expected one of {expected}, which take matrices alone")
        if self.beside is not None and self.format.matrices:
            raise ParametrizationError(
                f"beside={self.beside!r}: groups for {self.law.title} hold matrices inside the network "
                "alone. Leave beside out; it is for the optimizer of all other parameters, as in "
                f'param_groups("adamw", lr=..., beside="{self.beside}")'
            )
        for argument, method in (("scaling", "muon"), ("max_precondition_dim", "soap")):
            if (value := getattr(self, argument)) is not None and self.law.name != method:
                raise ParametrizationError(
                    f'{argument}={value!r} is for "{method}" alone, not for {method_title(self.method)}'
                )
        if self.max_precondition_dim is not None:
            check_whole("max_precondition_dim", self.max_precondition_dim)
            if self.max_precondition_dim < 1:
                raise ParametrizationError(f"max_precondition_dim must be at least 1, got {self.max_precondition_dim}")
        if self.scaling is not None:
            check_scaling("scaling", self.scaling, SCALINGS)
        if self.eps is not None:
            check_number("eps", self.eps)
            if self.format.eps_key is None:
                raise ParametrizationError(f"eps={self.eps!r}: {self.law.title} has no eps; leave it out")
            if not self.eps >= 0:
                raise ParametrizationError(f"eps must not be negative, got {self.eps}")

    @property
    def law(self) -> Method:
        """The method whose multipliers apply."""
        return get_method(self.method)

    @property
    def format(self) -> GroupFormat:
        """That of a method above, or of one that users have added: with an eps it is taken for an Adam."""
        law = self.law
        if law.name not in FORMATS and law.layerwise:
            raise ParametrizationError(
                f"there are no groups for {law.title}. Use mukron's own optimizer, which takes the plan itself. "
                f"Groups are for {', '.join(map(repr, FORMATS)).replace('adam', 'adamw')}"
            )
        return FORMATS.get(law.name) or FORMATS["adam" if law.has_eps else "sgd"]


def groups_of(plan: Parametrization, found: Mapping[str, Found], request: GroupRequest) -> list[dict[str, Any]]:
    """The groups, one for each role and set of multipliers. found: the model's parameters by name."""
    return [{**group, "lr": request.lr * lr_scale} for lr_scale, group in scaled_groups(plan, found, request)]


def scaled_groups(
    plan: Parametrization, found: Mapping[str, Found], request: GroupRequest
) -> list[tuple[float, dict[str, Any]]]:
    """The groups with the learning rate at the base width, and before each what it is multiplied by."""
    law, own = request.law, request.format
    other = None if request.beside is None else FORMATS[request.beside]
    taken = [
        name
        for name in plan.parameters
        if (not own.matrices or _takes(own, plan, name, found))
        and (other is None or not _takes(other, plan, name, found))
    ]
    if not taken:
        kinds = "matrices" if own.kernels else "matrices of two dimensions"
        raise ParametrizationError(
            f"this network has no parameters for {law.title} here: it takes {kinds} between layers that grow"
        )
    laws = dict.fromkeys(taken, law)
    if law.name == "soap" and plan.scheme != SP:
        laws = _laws_of_soap(plan, {name: found[name] for name in taken}, request.max_precondition_dim or LARGEST_SIDE)
    scales = {one: plan.scales(one) for one in set(laws.values())}
    members, scaling, adam = defaultdict(list), request.scaling or "original", plan.scales("adam")
    for name in taken:
        entry, scale = plan.parameters[name], scales[laws[name]][name]
        lr_scale = scale.lr
        if law.name == "muon" and plan.scheme != SP:  # it multiplies by a function of the sizes at hand
            lr_scale *= shape_factor(entry.base_shape, scaling) / shape_factor(entry.shape, scaling)
        eps_scale = scale.eps if law.has_eps else scale.damping.get("L", 1.0)  # Shampoo's is damping
        if laws[name].name == "soap" and plan.scheme != SP:  # in training; its own law is that of the first step
            lr_scale /= max(entry.growth.r_in, entry.growth.r_out) ** 0.5  # the spectral norm of a matrix of noise
            eps_scale = adam[name].eps  # and the size of its entries
        members[entry.role, lr_scale, eps_scale, scale.decay].append(found[name].parameter)
    said = {**own.entries, **({} if other is None else other.entries_beside)}
    if law.name == "muon" and scaling in ADJUSTMENTS:
        said["adjust_lr_fn"] = scaling  # torch's Muon reads it in its groups: the two cannot disagree
    eps = own.eps if request.eps is None else request.eps
    return [
        (
            lr_scale,
            {
                "params": parameters,
                "lr": request.lr,
                "weight_decay": request.weight_decay * decay / lr_scale,
                **({} if own.eps_key is None else {own.eps_key: eps * eps_scale}),
                **said,
                "role": role.value,
            },
        )
        for (role, lr_scale, eps_scale, decay), parameters in members.items()
    ]


def _takes(matrices: GroupFormat, plan: Parametrization, name: str, found: Mapping[str, Found]) -> bool:
    """Whether a parameter is a matrix inside the network: no vector, embedding, output layer or tied weight.

    Nor one that stacks several matrices, as queries, keys and values: others would take it for one.
    """
    entry, fans = plan.parameters[name], found[name].uses.get(name)
    known = not (entry.fallback or entry.tied or plan.falls_back(name, None, "muon"))
    stacks = fans is not None and fans.fan_in * fans.fan_out != math.prod(entry.shape)
    return known and not stacks and (matrices.kernels or len(entry.shape) == 2)


def _laws_of_soap(plan: Parametrization, matrices: Mapping[str, Found], largest: int) -> dict[str, Method]:
    """SOAP's law for each matrix: a side longer than the largest is not turned into its eigenbasis."""
    laws = {(True, True): soap(), (False, True): soap("input"), (True, False): soap("output")}
    sides = {}
    for name, found in matrices.items():
        entry, fans = plan.parameters[name], found.uses[name]
        transposed = fans is not None and (fans.fan_in, fans.fan_out) == found.shape  # [in, out]
        shapes = [shape[::-1] if transposed else shape for shape in (entry.base_shape, entry.shape)]
        sides[name] = [(d_out <= largest, d_in <= largest) for d_out, d_in in shapes]
    apart = [name for name, (at_base, here) in sides.items() if at_base != here]
    if apart:
        longest = max(max(plan.parameters[name].shape) for name in apart)
        listed = ", ".join(f'"{name}" {list(plan.parameters[name].shape)}' for name in apart)
        raise ParametrizationError(
            f"SOAP preconditions no side longer than max_precondition_dim={largest}, so that it follows one law at the "
            f"base width and another here: {listed}. Give both SOAP and param_groups a max_precondition_dim of at "
            f"least {longest}"
        )
    return {name: laws.get(here, METHODS["adam"]) for name, (_, here) in sides.items()}
