"""Optimizers of other libraries for the GPT, without muP or with our groups, and our Shampoo with such settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mukron.damping import Constant
from mukron.memory import EMA
from mukron.optim import AdamStep, GradientMomentum, Graft, Shampoo
from mukron.params import Parametrization

MUON_ADAM_RATE = 1e-3  # for all but the hidden matrices
BETAS, ROOT_EPSILON, EVERY = (0.9, 0.99), 1e-12, 10  # of Distributed Shampoo: of averages, in its roots, between roots
GRAFTED_BETA, GRAFTED_EPSILON = 0.999, 1e-8


@dataclass(frozen=True)
class ReferenceMethod:
    """A method of the GPT's table that is not one of this library's own.

    Attributes:
        title: Its name in tables.
        optimizers: Makes the optimizers of a network for a learning rate; and for a plan, if there is one.
        missing: Why it cannot be run here; empty if it can.
        with_plan: Whether it is given a plan, of which it takes its groups: muP, or SP.

    Example:
        >>> REFERENCE_METHODS["torch-muon"].title
        'Muon (torch)'
    """

    title: str
    optimizers: Callable[..., list[Optimizer]]
    missing: Callable[[], str] = lambda: ""
    with_plan: bool = False


def _muon(model: nn.Module, lr: float) -> list[Optimizer]:
    hidden, others = _split(model, lambda name, p: name.startswith("branches") and p.ndim == 2)
    muon: Callable[..., Optimizer] = torch.optim.Muon
    return [muon(hidden, lr, weight_decay=0.0), AdamW(others, MUON_ADAM_RATE, weight_decay=0.0)]


def _muon_in_groups(model: nn.Module, lr: float, plan: Parametrization) -> list[Optimizer]:
    muon: Callable[..., Optimizer] = torch.optim.Muon
    return [muon(plan.param_groups("muon", lr=lr)), AdamW(plan.param_groups("adamw", lr=MUON_ADAM_RATE, beside="muon"))]


def _soap_in_groups(model: nn.Module, lr: float, plan: Parametrization) -> list[Optimizer]:
    library: Any = import_module("pytorch_optimizer")
    soap: Optimizer = library.SOAP(plan.param_groups("soap", lr=lr), weight_decay=0.0, precondition_frequency=EVERY)
    return [soap, AdamW(plan.param_groups("adamw", lr=MUON_ADAM_RATE, beside="soap"))]


def _distributed_shampoo(model: nn.Module, lr: float) -> list[Optimizer]:
    """The library itself; embeddings and norms are in a group with Adam's steps, as they are with our Shampoo."""
    library: Any = import_module("distributed_shampoo")
    matrices, others = _split(model, lambda name, p: p.ndim == 2 and "tokens" not in name and "positions" not in name)
    adam = library.AdamPreconditionerConfig(beta2=GRAFTED_BETA, epsilon=GRAFTED_EPSILON)
    groups = [{"params": matrices}, {"params": others, "preconditioner_config": adam, "grafting_config": None}]
    optimizer: Optimizer = library.DistributedShampoo(
        groups,
        lr=lr,
        betas=BETAS,
        epsilon=ROOT_EPSILON,
        precondition_frequency=EVERY,
        start_preconditioning_step=EVERY,
        max_preconditioner_dim=math.inf,
        distributed_config=library.SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
        grafting_config=adam,
    )
    return [optimizer]


def _like_distributed_shampoo(model: nn.Module, lr: float) -> list[Optimizer]:
    adam = AdamStep((BETAS[0], GRAFTED_BETA), GRAFTED_EPSILON)
    options: dict[str, Any] = {"momentum": GradientMomentum(BETAS[0]), "memory": EMA(BETAS[1])}
    options |= {"inverse_every": EVERY, "start": EVERY - 1, "refresh_warmup": 0}
    return [Shampoo(model, lr=lr, damping=Constant(ROOT_EPSILON), trust=Graft(adam), fallback=adam, **options)]


def _soap(model: nn.Module, lr: float) -> list[Optimizer]:
    """The library's SOAP for all parameters, as its users have it; vectors take its Adam steps."""
    library: Any = import_module("pytorch_optimizer")
    optimizer: Optimizer = library.SOAP(model.parameters(), lr=lr, weight_decay=0.0, precondition_frequency=EVERY)
    return [optimizer]


def _split(model: nn.Module, belongs: Callable[[str, Tensor], bool]) -> tuple[list[Tensor], list[Tensor]]:
    named = [*model.named_parameters()]
    return [p for name, p in named if belongs(name, p)], [p for name, p in named if not belongs(name, p)]


def _without_muon() -> str:
    return "" if hasattr(torch.optim, "Muon") else f"torch {torch.__version__} has no Muon; 2.9 has"


def _without_library() -> str:
    place = "github.com/facebookresearch/optimizers"
    return "" if find_spec("distributed_shampoo") else f"the package distributed_shampoo is not installed ({place})"


def _without_pytorch_optimizer() -> str:
    return "" if find_spec("pytorch_optimizer") else "the package pytorch_optimizer is not installed"


REFERENCE_METHODS = {
    "pytorch-optimizer-soap": ReferenceMethod("SOAP (pytorch_optimizer)", _soap, _without_pytorch_optimizer),
    "torch-muon": ReferenceMethod("Muon (torch)", _muon, _without_muon),
    "torch-muon-groups": ReferenceMethod("Muon (torch), our groups", _muon_in_groups, _without_muon, with_plan=True),
    "pytorch-optimizer-soap-groups": ReferenceMethod(
        "SOAP (pytorch_optimizer), our groups", _soap_in_groups, _without_pytorch_optimizer, with_plan=True
    ),
    "distributed-shampoo": ReferenceMethod("Distributed Shampoo", _distributed_shampoo, _without_library),
    "shampoo-as-distributed": ReferenceMethod("Shampoo, as Distributed Shampoo", _like_distributed_shampoo),
}
