"""The plan: what each parameter of a network is, and what every method's numbers are multiplied by."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import nn

from mukron.params.errors import ParametrizationError
from mukron.params.excluded import Excluded, covers, names_excluded
from mukron.params.explanation import explanation
from mukron.params.groups import GroupRequest, groups_of
from mukron.params.inventory import inventory, unwrap
from mukron.params.parameter_plan import ParameterPlan, parameter_from_dict, parameter_to_dict
from mukron.params.resolve import check_names
from mukron.params.scaled import Scaled
from mukron.params.shown import ShownPlan
from mukron.params.storage import Data, check_stamp, damaged, read_json, stamp, write_json
from mukron.params.training import ForTraining
from mukron.readers import exact_number
from mukron.table import Table
from mukron.theory import SP, Method, Power, Role, Scheme, get_method, get_scheme, initial_exponent, solve
from mukron.trust import USUAL, StepRule, Trust
from mukron.typed import fields_of, read_as

KIND, VERSION = "parametrization", 2  # 2: with the growth of the depth, and the laws of decay and of embeddings
ZERO = "zero"


@dataclass(frozen=True)
class Scales:
    """What a method's numbers are multiplied by for one parameter.

    Attributes:
        lr: Multiplies the learning rate.
        damping: Multiplies the damping of each factor, by its name: {"A": ..., "B": ...} for K-FAC.
        eps: Multiplies the method's eps, as Adam has one; 1 if it has none.
        decay: Multiplies learning rate times weight decay, the part of a weight that a step takes off.
        chosen: The part of ``lr`` that was chosen for embeddings and is not the method's own law.

    Example:
        >>> Scales(lr=1.0, damping={"A": 4.0, "B": 0.25}).damping["A"]
        4.0
    """

    lr: float
    damping: Mapping[str, float]
    eps: float = 1.0
    decay: float = 1.0
    chosen: float = 1.0


@dataclass(frozen=True, repr=False)
class Parametrization(ForTraining, ShownPlan):
    """A network's plan: plain data keyed by parameter name. Made by ``parametrize``; saves to and loads from JSON.

    It holds no tensor and marks none, so it outlives copies, checkpoints and wrappers of the model. It remembers the
    model it was made for (weakly), so that ``param_groups`` need not be told; another copy is passed as ``model=``.
    A warning says if it meets another copy, whose weights nobody has scaled; ``bind`` says that this is meant.

    Attributes:
        scheme: muP, SP, NTK or a scheme between them.
        parameters: The plan of every parameter, by name.
        output_exponent: Replaces the exponent b of the output weights; "zero": they start at zero. None: the scheme's.
        base_width: The width that settings are tuned at; None if it is not known.
        decay: The exponent k of weight decay: learning rate times weight decay is multiplied by r_in^-k.
        embedding_lr: The exponent k of embeddings' learning rates, which are multiplied by r_out^k.

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
    decay: Fraction = Fraction(0)
    embedding_lr: Fraction = Fraction(0)
    _model: weakref.ref[nn.Module] | None = field(default=None, compare=False, repr=False)
    _scaled: Scaled | None = field(default=None, compare=False, repr=False)

    def initial_exponent(self, role: Role) -> Fraction | None:
        """b: the initial std is the base width's times r_in^-b. None: the initial values are zero.

        Args:
            role: A role.
        """
        if role is Role.OUTPUT and self.output_exponent is not None:
            return None if self.output_exponent == ZERO else Fraction(self.output_exponent)
        return initial_exponent(role, self.scheme.s)

    def scales(self, method: Method | str, fallback: str = "adamw") -> dict[str, Scales]:
        """The method's own multipliers of learning rate, damping, eps and weight decay, for every parameter.

        Args:
            method: A method or its name.
            fallback: The rule of parameters that a second-order method cannot precondition, "sgd" or "adamw".
        """
        method = get_method(method)
        rows = {False: solve(method, self.scheme), True: solve(fallback if method.layerwise else method, self.scheme)}
        scales = {}
        for name, plan in self.parameters.items():
            own, growth = rows[not plan.suits(method)][plan.role], plan.growth
            chosen = Power(fan_out=self.embedding_lr) if plan.embedding and self.scheme != SP else Power()
            decays = Power(fan_in=-self.decay if self.scheme != SP else Fraction(0))
            damping = {factor: growth.factor(-d) for factor, d in own.d.items()}
            lr, eps = growth.factor(chosen + -own.c), 1.0 if own.eps is None else growth.factor(-own.eps)
            scales[name] = Scales(lr, damping, eps, decay=growth.factor(decays), chosen=growth.factor(chosen))
        return scales

    def param_groups(
        self,
        method: Method | str,
        lr: float,
        *,
        weight_decay: float = 0.0,
        eps: float | None = None,
        model: nn.Module | None = None,
        beside: str | None = None,
        scaling: str | None = None,
        max_precondition_dim: int | None = None,
    ) -> list[dict[str, Any]]:
        """Parameter groups for other people's optimizers: ``torch.optim.AdamW(p.param_groups("adamw", lr=1e-3))``.

        The groups carry learning rate, weight decay and eps, so give them here: what the optimizer itself is given is
        not used. Each group also says the ``role`` of its parameters. What is assumed of each optimizer stands in
        docs/optimizers.md, "Other people's optimizers".

        Args:
            method: "sgd", "adamw" or "lion", which take all parameters; "muon", "soap" or "shampoo", which take
                matrices inside the network alone.
            lr: The learning rate at the base width.
            weight_decay: A step shrinks a weight by ``lr`` times this at the base width, and by the plan's law of
                ``decay`` at others.
            eps: The optimizer's eps at the base width. None: its usual one, 1e-8 for AdamW and SOAP, 1e-7 for Muon,
                1e-6 for Shampoo.
            model: The model, if it is another copy than the one that was parametrized.
            beside: "muon", "soap" or "shampoo": only those parameters that its groups do not hold.
            scaling: What a Muon itself multiplies learning rates by: "original", max(1, out / in)^1/2, the default of
                torch's, Keller Jordan's and pytorch_optimizer's; "match_rms_adamw" or "rms_norm", 0.2 max(out, in)^1/2;
                "spectral_norm", (out / in)^1/2, dion's default; "none". The groups correct for what of it comes from
                the growth of the network. None: "original".
            max_precondition_dim: SOAP's, beyond which it leaves a side of a matrix as it is. None: 10000.
        """
        request = GroupRequest(method, lr, weight_decay, eps, beside, scaling, max_precondition_dim)
        return groups_of(self, inventory(self._checked(model)), request)

    def falls_back(self, name: str, exclude: tuple[Excluded, ...] | None, method: Method | str) -> bool:
        """Whether a method that works layer by layer leaves a parameter to its fallback rule.

        Args:
            name: The parameter's name.
            exclude: Layers that are left to the fallback rule, as optimizers take them; None: embeddings, and those
                that the method is not for. Embeddings that are tied to something are left to it in any case, unless it
                is a head and the method is K-FAC. By methods that need more than gradients, a weight that several
                layers use as the same matrix is preconditioned, and all else in layers that use a tied parameter is
                left.
            method: The method or its name.
        """
        plan, layer, method = self.parameters[name], name.rpartition(".")[0], get_method(method)
        uses = (name, *plan.tied)
        named = any(covers(entry, use) for entry in exclude or () for use in uses)
        left = plan.embedding if exclude is None else named
        left = left or (method.matrices_only and exclude is None and plan.role is Role.OUTPUT)
        tied = bool(plan.tied and plan.embedding) and not plan.sums_transposed(method)
        if not method.gradients_alone and not (plan.tied and len(plan.shape) > 1):
            tied = layer in self._layers_with_tied
        return left or tied or not plan.suits(method)

    def explain(
        self,
        method: Method | str,
        fallback: str | StepRule | None = None,
        trust: str | Trust | None = USUAL,
        exclude: tuple[Excluded, ...] | None = None,
        *,
        whole: bool = False,
    ) -> Table:
        """For every parameter: role, sizes, initial std, multipliers of learning rate, eps, damping and decay, and why.

        The columns of eps and damping are there if some parameter has one. That of decay multiplies learning rate times
        weight decay, and is there for every method but Adam, which has no decoupled decay ("adamw" has).

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
        left = names_excluded(exclude, self.parameters, lambda: self._checked(None))
        return explanation(self, method, fallback, Trust.of(trust), left, whole)

    def check(self, saved: Parametrization | Mapping[str, Any]) -> None:
        """Refuse a plan, such as one from a checkpoint, that was made with other base shapes or another scheme.

        Args:
            saved: A plan, or the plain data of one.
        """
        other = saved if isinstance(saved, Parametrization) else Parametrization.from_dict(saved)
        for what in ("scheme", "output_exponent", "decay", "embedding_lr"):
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
        return replace(self, _model=weakref.ref(unwrap(model)), _scaled=None)

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
        parameters = {name: parameter_to_dict(plan) for name, plan in self.parameters.items()}
        exponent = None if self.output_exponent is None else str(self.output_exponent)
        content = {"scheme": self.scheme.name, "output_exponent": exponent, "base_width": self.base_width}
        chosen = {"decay": str(self.decay), "embedding_lr": str(self.embedding_lr)}
        return stamp(KIND, VERSION, {**content, **chosen, "parameters": parameters})

    @classmethod
    def from_dict(cls, data: object, source: str = "parametrization") -> Parametrization:
        """Read the data of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.
            source: Names the data in errors.
        """
        content = check_stamp(data, KIND, VERSION, source, oldest=1)
        with damaged(source):
            entries = fields_of(content["parameters"], "parameters")
            parameters = {name: parameter_from_dict(entry, f'parameter "{name}"') for name, entry in entries.items()}
            exponent = content["output_exponent"]
            exponent = exponent if exponent in (None, ZERO) else exact_number(exponent)
            decay, embedding_lr = (exact_number(content.get(name, 0)) for name in ("decay", "embedding_lr"))
            scheme, width = get_scheme(content["scheme"]), read_as(float | None, content["base_width"], "base_width")
            return cls(scheme, parameters, exponent, width, decay, embedding_lr)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "_scaled": None}  # plain data travels; the model goes its own way

    @cached_property
    def _layers_with_tied(self) -> set[str]:
        uses = [(name, *plan.tied) for name, plan in self.parameters.items() if plan.tied]
        return {use.rpartition(".")[0] for names in uses for use in names}

    def _checked(self, model: nn.Module | None) -> nn.Module:
        model = self._bound(model)
        self.bind(model)
        warn_if_not_scaled(self, model, stacklevel=4)
        return model


# The plan that was applied to a model, as plain data on the model itself: a second parametrization must change nothing.
MARK = "_mukron_parametrization"


def mark(model: nn.Module, plan: Parametrization) -> None:
    unwrap(model).__dict__[MARK] = plan.to_dict()


def plan_of(model: nn.Module) -> Parametrization | None:
    """The plan that was applied to this model, if one was."""
    data = unwrap(model).__dict__.get(MARK)
    return None if data is None else Parametrization.from_dict(data)


def warn_if_not_scaled(plan: Parametrization | None, model: nn.Module, stacklevel: int) -> None:
    """Warn of a plan for a second copy of the model that was parametrized, if that copy was forgotten.

    Args:
        plan: What ``parametrize`` returned; None: no plan is used.
        model: The model that it is used with.
        stacklevel: Of the warning.
    """
    own, scaled = unwrap(model), None if plan is None else plan._scaled
    if scaled is None or MARK in own.__dict__ or not scaled.forgotten_in(inventory(model)):
        return
    warnings.warn(
        f"the weights of this {type(own).__name__} are not scaled: the plan was made with another copy of the model, "
        "and mukron.parametrize scales the weights of the copy that it is given. Parametrize the model that you train: "
        "p = mukron.parametrize(model, shapes). To train this one as it is: p.bind(model)",
        UserWarning,
        stacklevel=stacklevel,
    )
