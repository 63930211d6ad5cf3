"""The plan: what each parameter of a network is, and what every method's numbers are multiplied by."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import nn

from mukron.layers import Shape
from mukron.params.errors import ParametrizationError
from mukron.params.explanation import explanation
from mukron.params.inventory import inventory, unwrap
from mukron.params.resolve import Growth, check_names
from mukron.params.shape_factor import check_adjustment, shape_factor
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.table import Table
from mukron.theory import Method, Role, Scheme, get_method, get_scheme, initial_exponent, solve
from mukron.trust import USUAL, StepRule, Trust

KIND, VERSION = "parametrization", 2  # 2: with the growth of the depth
ZERO = "zero"


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its role, how much its sides grew, and its initial spread.

    Attributes:
        growth: Its role, how much its fan-in and fan-out have grown since the base width, and the depth since the base
            depth if it is inside of a residual block.
        shape: Its shape here.
        base_shape: Its shape at the base width.
        base_std: Standard deviation of its initial values at the base width; 0 if they are all equal.
        std: Standard deviation of its initial values here, once parametrized; None: as drawn, not known (SP on the meta
            device).
        tied: The other names of the same tensor.
        fallback: True if second-order methods do not precondition it (a norm's gain, a bare parameter).
        embedding: True if it belongs to an embedding, which optimizers with a ``trust`` leave to the fallback rule.

    Example:
        >>> import mukron
        >>> from mukron.models import MLP
        >>> shapes = mukron.base_shapes(MLP, width=16)
        >>> p = mukron.parametrize(MLP(64), shapes)
        >>> str(p.parameters["fc2.weight"].role)
        'hidden'
    """

    growth: Growth
    shape: Shape
    base_shape: Shape
    base_std: float
    std: float | None
    tied: tuple[str, ...] = ()
    fallback: bool = False
    embedding: bool = False

    @property
    def role(self) -> Role:
        """The parameter's role: what grows with the width, its fan-in, its fan-out, both or neither."""
        return self.growth.role


@dataclass(frozen=True)
class Scales:
    """What a method's numbers are multiplied by for one parameter.

    Attributes:
        lr: Multiplies the learning rate.
        damping: Multiplies the damping of each factor, by its name: {"A": ..., "B": ...} for K-FAC.

    Example:
        >>> Scales(lr=1.0, damping={"A": 4.0, "B": 0.25}).damping["A"]
        4.0
    """

    lr: float
    damping: Mapping[str, float]


@dataclass(frozen=True)
class Parametrization:
    """A network's plan: plain data keyed by parameter name. Made by ``parametrize``; saves to and loads from JSON.

    It holds no tensor and marks none, so it outlives copies, checkpoints and wrappers of the model. It remembers the
    model it was made for (weakly), so that ``param_groups`` need not be told; another copy is passed as ``model=``.

    Attributes:
        scheme: muP, SP, NTK or a scheme between them.
        parameters: The plan of every parameter, by name.
        output_exponent: Replaces the exponent b of the output weights; "zero": they start at zero. None: the scheme's.
        base_width: The width that settings are tuned at; None if it is not known.

    Example:
        >>> from mukron import base_shapes, models, parametrize
        >>> p = parametrize(models.MLP(64), base_shapes(models.MLP, width=16))
        >>> p.scales("sgd")["fc1.weight"].lr
        4.0
    """

    scheme: Scheme
    parameters: Mapping[str, ParameterPlan]
    output_exponent: Fraction | str | None = None
    base_width: float | None = None
    _model: weakref.ref[nn.Module] | None = field(default=None, compare=False, repr=False)

    def initial_exponent(self, role: Role) -> Fraction | None:
        """b: the initial std is the base width's times r_in^-b. None: the initial values are zero.

        Args:
            role: A role.
        """
        if role is Role.OUTPUT and self.output_exponent is not None:
            return None if self.output_exponent == ZERO else Fraction(self.output_exponent)
        return initial_exponent(role, self.scheme.s)

    def scales(self, method: Method | str, fallback: str = "adamw") -> dict[str, Scales]:
        """The method's own multipliers of the learning rate and of each damping term, for every parameter.

        Args:
            method: A method or its name.
            fallback: The rule of parameters that a second-order method cannot precondition, "sgd" or "adamw".
        """
        method = get_method(method)
        rows = {False: solve(method, self.scheme), True: solve(fallback if method.layerwise else method, self.scheme)}
        scales = {}
        for name, plan in self.parameters.items():
            falls_back = plan.fallback or (method.matrices_only and len(plan.shape) < 2)
            own, growth = rows[falls_back][plan.role], plan.growth
            scales[name] = Scales(
                lr=growth.factor(-own.c), damping={factor: growth.factor(-d) for factor, d in own.d.items()}
            )
        return scales

    def param_groups(
        self,
        method: Method | str,
        lr: float,
        *,
        weight_decay: float = 0.0,
        model: nn.Module | None = None,
        beside: str | None = None,
        adjust_lr_fn: str = "original",
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer of torch: ``torch.optim.AdamW(p.param_groups("adamw", lr=1e-3))``.

        Weight decay goes here: the groups carry it, so what the optimizer itself is given is not used. ``lr *
        weight_decay``, by which a step shrinks the weights, is kept the same in every layer at every width. Each group
        also says the ``role`` of its parameters.

        Args:
            method: "sgd", "adamw" or "muon".
            lr: The learning rate at the base width.
            weight_decay: A step shrinks each weight by the learning rate ``lr`` times this.
            model: The model, if it is another copy than the one that was parametrized.
            beside: "muon": only those parameters that torch's Muon does not take, which is for inner matrices alone.
            adjust_lr_fn: What torch's Muon is given. It multiplies learning rates by a function of a matrix's sizes;
                the groups correct for what of that comes from the growth of the network.
        """
        if not (lr >= 0 and weight_decay >= 0):
            raise ParametrizationError(f"lr and weight_decay must not be negative, got {lr} and {weight_decay}")
        if get_method(method).damped:
            raise ParametrizationError(
                f"{method!r} is none of torch's own optimizers, and its damping scales too; use mukron's, which takes "
                'the plan itself. Groups are for "sgd", "adamw" and "muon"'
            )
        if str(getattr(method, "name", method)).strip().lower() == "adam" and weight_decay:
            raise ParametrizationError(
                "Adam mixes weight decay into its normalized gradient, where no width-independent scale exists; "
                'use param_groups("adamw", ...) with torch.optim.AdamW'
            )
        found, inner = inventory(self._checked(model)), get_method(method).matrices_only
        if beside is not None and (beside != "muon" or inner):
            raise ParametrizationError(f'beside={beside!r}: expected "muon", beside groups for "sgd" or "adamw"')
        check_adjustment(adjust_lr_fn)
        members = defaultdict(list)
        for name, scale in self.scales(method).items():
            plan = self.parameters[name]
            of_muon = len(plan.shape) == 2 and not self.falls_back(name, None, "muon")
            if of_muon if inner else beside is None or not of_muon:
                multiplier = scale.lr
                if inner:  # torch's Muon multiplies it by a function of the sizes at hand
                    multiplier *= shape_factor(plan.base_shape, adjust_lr_fn) / shape_factor(plan.shape, adjust_lr_fn)
                members[plan.role, multiplier].append(found[name].parameter)
        return [
            {"params": parameters, "lr": lr * scale, "weight_decay": weight_decay / scale, "role": role.value}
            for (role, scale), parameters in members.items()
        ]

    def falls_back(self, name: str, exclude: tuple[str, ...] | None, method: Method | str) -> bool:
        """Whether a method that works layer by layer leaves a parameter to its fallback rule.

        Args:
            name: The parameter's name.
            exclude: Layers that are left to the fallback rule, as optimizers take them; None: embeddings, and those
                that the method is not for. Layers that use a tied parameter are left to it in any case.
            method: The method or its name.
        """
        plan, layer, inner = self.parameters[name], name.rpartition(".")[0], get_method(method).matrices_only
        left = plan.embedding if exclude is None else any(name.startswith(f"{each}.") for each in exclude)
        left = left or (inner and (len(plan.shape) < 2 or (exclude is None and plan.role is Role.OUTPUT)))
        return plan.fallback or left or layer in self._layers_with_tied

    def explain(
        self,
        method: Method | str,
        fallback: str | StepRule | None = None,
        trust: str | Trust | None = USUAL,
        exclude: tuple[str, ...] | None = None,
        *,
        whole: bool = False,
    ) -> Table:
        """For every parameter: role, sizes, initial std, learning-rate and damping multipliers, and why.

        ``fallback``, ``trust`` and ``exclude`` are the optimizers' arguments, with the same defaults.

        Args:
            method: A method or its name.
            fallback: The rule of parameters that a second-order method does not precondition, "sgd" or "adamw". None:
                "adamw" with a ``trust``, else "sgd".
            trust: The bound on a layer's move, which decides whose learning-rate multipliers apply. None: no bound.
            exclude: Layers that are left to the fallback rule. None: those that use a tied parameter, and with a
                ``trust`` embeddings.
            whole: One row a parameter. Otherwise equal rows are one, as ``blocks.0-3.mlp.up.weight``.
        """
        return explanation(self, get_method(method), fallback, Trust.of(trust), exclude, whole)

    def check(self, saved: Parametrization | Mapping[str, Any]) -> None:
        """Refuse a plan, such as one from a checkpoint, that was made with other base shapes or another scheme.

        Args:
            saved: A plan, or the plain data of one.
        """
        other = saved if isinstance(saved, Parametrization) else Parametrization.from_dict(saved)
        for what in ("scheme", "output_exponent"):
            theirs, ours = getattr(other, what), getattr(self, what)
            if theirs != ours:
                raise ParametrizationError(f"the saved plan has {what} {theirs}, this one {ours}")
        check_names(other.parameters, self.parameters, "in this network", "in the saved plan")
        for name, plan in self.parameters.items():
            theirs = other.parameters[name]
            if theirs.shape != plan.shape:
                raise ParametrizationError(
                    f'parameter "{name}": {list(plan.shape)} here, {list(theirs.shape)} in the saved plan'
                )
            if (theirs.base_shape, theirs.growth) != (plan.base_shape, plan.growth):
                raise ParametrizationError(
                    f'parameter "{name}": the saved plan has base shape {list(theirs.base_shape)} as {theirs.growth}, '
                    f"this one {list(plan.base_shape)} as {plan.growth}; learning rates would change their meaning: "
                    "use the same base shapes"
                )

    def bind(self, model: nn.Module) -> Parametrization:
        """The same plan for that model, which must have the same parameters and shapes.

        Args:
            model: The model.
        """
        found = inventory(model)
        check_names(self.parameters, found, "in this network", "in the plan")
        for name, plan in self.parameters.items():
            if found[name].shape != plan.shape:
                raise ParametrizationError(
                    f'parameter "{name}": {list(found[name].shape)} in this network, {list(plan.shape)} in the plan'
                )
        return replace(self, _model=weakref.ref(unwrap(model)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Args:
            path: The path of the JSON file.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Parametrization:
        """Read a saved plan.

        Args:
            path: The path of the JSON file.
            model: The plan is checked against this model and how it was parametrized, and bound to it. None: neither.
        """
        plan = cls.from_dict(read_json(path), source=str(path))
        if model is None:
            return plan
        bound = plan.bind(model)
        if (applied := plan_of(model)) is not None:
            applied.check(plan)
        return bound

    def to_dict(self) -> Data:
        """Plain JSON data, as ``save`` writes it; may go into a checkpoint beside the ``state_dict``."""
        parameters = {name: _parameter_to_dict(plan) for name, plan in self.parameters.items()}
        exponent = None if self.output_exponent is None else str(self.output_exponent)
        content = {"scheme": self.scheme.name, "output_exponent": exponent, "base_width": self.base_width}
        return stamp(KIND, VERSION, {**content, "parameters": parameters})

    @classmethod
    def from_dict(cls, data: object, source: str = "parametrization") -> Parametrization:
        """Read the data of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.
            source: Names the data in errors.
        """
        content = check_stamp(data, KIND, VERSION, source, oldest=1)
        with damaged(source):
            parameters = {name: _parameter_from_dict(entry) for name, entry in content["parameters"].items()}
            exponent = content["output_exponent"]
            if exponent not in (None, ZERO):
                exponent = Fraction(exponent)
            return cls(get_scheme(content["scheme"]), parameters, exponent, content["base_width"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # plain data travels; the model goes its own way

    @cached_property
    def _layers_with_tied(self) -> set[str]:
        uses = [(name, *plan.tied) for name, plan in self.parameters.items() if plan.tied]
        return {use.rpartition(".")[0] for names in uses for use in names}

    def _checked(self, model: nn.Module | None) -> nn.Module:
        if model is None and self._model is not None:
            model = self._model()
        if model is None:
            raise ParametrizationError("this plan is not bound to a model (or the model is gone); pass model=...")
        self.bind(model)
        return model


def _parameter_to_dict(plan: ParameterPlan) -> Data:
    return {
        "role": plan.role.value,
        "r_in": str(plan.growth.r_in),
        "r_out": str(plan.growth.r_out),
        "L": None if plan.growth.L is None else str(plan.growth.L),
        "shape": list(plan.shape),
        "base_shape": list(plan.base_shape),
        "base_std": plan.base_std,
        "std": plan.std,
        "tied": list(plan.tied),
        "fallback": plan.fallback,
        "embedding": plan.embedding,
    }


def _parameter_from_dict(entry: Mapping[str, Any]) -> ParameterPlan:
    return ParameterPlan(
        growth=Growth(
            *(Role(entry["role"]), Fraction(entry["r_in"]), Fraction(entry["r_out"])),
            None if entry.get("L") is None else Fraction(entry["L"]),
        ),
        shape=tuple(entry["shape"]),
        base_shape=tuple(entry["base_shape"]),
        base_std=entry["base_std"],
        std=entry["std"],
        tied=tuple(entry["tied"]),
        fallback=entry["fallback"],
        embedding=entry.get("embedding", False),
    )


# The plan that was applied to a model, as plain data on the model itself: a second parametrization must change nothing.
MARK = "_mukron_parametrization"


def mark(model: nn.Module, plan: Parametrization) -> None:
    unwrap(model).__dict__[MARK] = plan.to_dict()


def plan_of(model: nn.Module) -> Parametrization | None:
    """The plan that was applied to this model, if one was."""
    data = unwrap(model).__dict__.get(MARK)
    return None if data is None else Parametrization.from_dict(data)
