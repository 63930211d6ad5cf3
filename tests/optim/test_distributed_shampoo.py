"""With Distributed Shampoo's settings ``Shampoo`` takes its steps: those of a plain reference, and of the library."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import pytest
import reference as plain
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, AdamStep, Constant, GradientMomentum, Graft, HeavyBall, Shampoo, Sum

STEPS, SAMPLES, CLASSES = 45, 32, 4
LR = 2.0**-7  # the library holds it as float32
TOLERANCE = 1e-10  # of a weight's length; measured: at most 1.2e-12


@pytest.fixture(autouse=True)
def _float64():
    """The library's corrections for the start of its averages are of torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Setting:
    """What both optimizers are told, in the words of Distributed Shampoo."""

    graft: str | None = "adam"
    betas: tuple[float, float] = (0.9, 0.95)
    every: int = 5  # precondition_frequency
    start: int = 5  # start_preconditioning_step
    epsilon: float = 1e-6
    graft_beta2: float = 0.99
    graft_epsilon: float = 1e-10
    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0
    l2: float = 0.0
    e: float = 0.5

    def __str__(self) -> str:
        changed = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: value for name, value in changed.items() if value != getattr(Setting, name)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "usual"

    def ours(self) -> dict[str, Any]:
        """As arguments of mukron's ``Shampoo``."""
        beta1, beta2 = self.betas
        rule = AdamStep((beta1, self.graft_beta2), self.graft_epsilon) if self.graft == "adam" else self.graft
        return {
            "lr": LR,
            "e": Fraction(self.e),
            "trust": None if rule is None else Graft(rule),
            "memory": Sum() if beta2 == 1 else EMA(beta2),
            "damping": Constant(self.epsilon),
            "momentum": HeavyBall(self.momentum, self.nesterov) if self.momentum else GradientMomentum(beta1),
            "inverse_every": self.every,
            "start": self.start - 1,
            "refresh_warmup": 0,
            "weight_decay": self.decay + self.l2,
            "decoupled": not self.l2,
            "fallback": AdamStep((beta1, self.graft_beta2), self.graft_epsilon),
        }

    def theirs(self, library: Any) -> dict[str, Any]:
        """As arguments of ``DistributedShampoo``: factors in float64, matrices in one block."""
        types = library.shampoo_types
        return {
            "lr": LR,
            "betas": self.betas,
            "epsilon": self.epsilon,
            "precondition_frequency": self.every,
            "start_preconditioning_step": self.start,
            "weight_decay": self.decay + self.l2,
            "weight_decay_type": library.WeightDecayType.L2 if self.l2 else library.WeightDecayType.DECOUPLED,
            "max_preconditioner_dim": math.inf,
            "distributed_config": library.SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
            "grafting_config": {
                None: None,
                "sgd": library.SGDPreconditionerConfig(),
                "adam": library.AdamPreconditionerConfig(beta2=self.graft_beta2, epsilon=self.graft_epsilon),
            }[self.graft],
            "preconditioner_config": library.RootInvShampooPreconditionerConfig(
                inverse_exponent_override={1: self.e, 2: self.e / 2},
                factor_matrix_dtype=torch.float64,
                inv_factor_matrix_dtype=torch.float64,
            ),
            "iterate_averaging_config": types.ClassicMomentumConfig(momentum=self.momentum, use_nesterov=self.nesterov)
            if self.momentum
            else None,
        }


SETTINGS = [
    *(
        Setting(graft, betas=(beta1, 0.95), every=every, start=start)
        for graft in ("adam", "sgd", None)
        for beta1 in (0.9, 0.0)
        for every, start in ((1, 1), (1, 6), (5, 5), (5, 10))
    ),
    Setting(betas=(0.9, 1.0)),
    Setting(epsilon=1e-3),
    Setting(decay=0.1),
    Setting(l2=0.1),
    Setting(e=1.0),
    Setting(betas=(0.0, 0.95), momentum=0.9),
    Setting(betas=(0.0, 0.95), momentum=0.9, nesterov=True),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 5, 3, padding=1, stride=2)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(45, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 2, 5, 5, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator))
        for _ in range(STEPS)
    ]


class Reference:
    """An optimizer whose every weight takes the steps of ``distributed_shampoo_step``."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.weights = [(weight, {}) for weight in model.parameters()]
        self.setting = setting

    def zero_grad(self) -> None:
        for weight, _ in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for weight, state in self.weights:
            weight.copy_(plain.distributed_shampoo_step(weight, weight.grad, state, lr=LR, **vars(self.setting)))


@torch.no_grad()
def differences(model: nn.Module, other: nn.Module) -> list[float]:
    """Of each weight, over its length in the other model."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(model.parameters(), other.parameters(), strict=True)]


def largest_difference(first: tuple[nn.Module, Any], second: tuple[nn.Module, Any], data: Any) -> float:
    """Of all weights after each step."""
    largest = 0.0
    for x, y in data:
        for model, optimizer in (first, second):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        largest = max(largest, *differences(first[0], second[0]))
    return largest


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_are_those_of_the_reference(setting):
    model, other = network(), network()
    ours = Shampoo(model, **setting.ours())
    assert largest_difference((model, ours), (other, Reference(other, setting)), batches()) < TOLERANCE
    assert min(differences(model, network())) > 0.003  # it went somewhere


@pytest.mark.parametrize(
    "change",
    [
        {"start": 5},
        {"inverse_every": 4},
        {"refresh_warmup": None},
        {"damping": 1e-6},
        {"memory": EMA(0.96)},
        {"trust": Graft("adam")},
        {"momentum": HeavyBall(0.9)},
    ],
    ids=str,
)
def test_other_settings_take_other_steps(change):
    """The comparison sees a start or an interval that is off by one, and every option that matters."""
    setting, model, other = Setting(), network(), network()
    ours = Shampoo(model, **setting.ours() | change)
    assert largest_difference((model, ours), (other, Reference(other, setting)), batches()) > 1e-5


@pytest.fixture
def library():
    where = "clone https://github.com/facebookresearch/optimizers and put it on PYTHONPATH"
    return pytest.importorskip("distributed_shampoo", reason=f"Distributed Shampoo is not on PyPI: {where}")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_are_those_of_the_library(setting, library):
    model, other = network(), network()
    ours = Shampoo(model, **setting.ours())
    theirs = library.DistributedShampoo(other.parameters(), **setting.theirs(library))
    assert largest_difference((model, ours), (other, theirs), batches()) < TOLERANCE


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x))).mT


def test_other_parameters_are_a_group_of_the_librarys_with_adam(library):
    """Embeddings and norms take the fallback's steps, which in the library are those of a group of its own."""
    torch.manual_seed(0)
    setting, model = Setting(), Tokens()
    other = copy.deepcopy(model)
    theirs = setting.theirs(library)
    adam = {"preconditioner_config": theirs["grafting_config"], "grafting_config": None}
    rest = [*other.embedding.parameters(), *other.norm.parameters()]
    groups = [{"params": [*other.head.parameters()]}, {"params": rest, **adam}]
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(11, (SAMPLES, 7), generator=generator) for _ in range(STEPS)]
    first, second = (model, Shampoo(model, **setting.ours())), (other, library.DistributedShampoo(groups, **theirs))
    assert largest_difference(first, second, [(x[:, :-1], x[:, 1:]) for x in words]) < TOLERANCE
