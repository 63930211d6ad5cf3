"""The networks and optimizers of a stack: every tensor has a run dimension.

H [runs, N, d_in] inputs    D [runs, N, d_out] the loss's derivatives    F [runs, N, d_out] the Fisher's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from mukron.curvature import Accumulator, drawn_targets
from mukron.damping import EachOwn, Rule, Sides
from mukron.data import Dataset
from mukron.layers import WEIGHT
from mukron.linalg import Factor, FactorizationError, LowRank, RowsFactor
from mukron.optim import SecondOrder
from mukron.optim.direction import apply, prepare
from mukron.params import Parametrization
from mukron.train.build import Loss, loss_of, network_of, optimizer_of
from mukron.train.config import RunConfig

INVERSES = {"A": Fraction(1), "B": Fraction(1)}


class Stack:
    """The networks and optimizers of all runs, as tensors with a run dimension."""

    def __init__(self, configs: Sequence[RunConfig], dataset: Dataset) -> None:
        config = configs[0]
        self.second_order = config.spec.layerwise
        self.momentum = config.momentum
        self.nesterov = bool(config.method_options.get("nesterov"))
        options = config.spec.all_options(config.method_options)
        self.fisher = options["fisher"] if "signals" in config.spec.captures else ""
        self.likelihood = "gaussian" if config.loss == "mse" else "categorical"
        self.loss: Loss = torch.func.vmap(loss_of(config, dataset.classes))
        self.generators: list[Generator] = []
        networks: dict[tuple[object, ...], tuple[nn.Module, Parametrization]] = {}
        settings: dict[str, list[Settings]] = {}
        for each in configs:  # built as ``build`` does; runs that begin alike share their network
            key = (each.seed, each.scheme, each.output_exponent)
            if key not in networks:
                networks[key] = network_of(each, dataset)
            model, plan = networks[key]
            optimizer = optimizer_of(each, model, plan)
            for name, module in model.named_children():
                if isinstance(module, nn.Linear):
                    settings.setdefault(name, []).append(
                        Settings.of(optimizer, name, cast(nn.Parameter, module.weight))
                    )
            if isinstance(optimizer, SecondOrder):
                self.generators.append(optimizer.generator)
                optimizer.close()
        self.layers = [StackedLayer.of(each) for each in settings.values()]
        self.modules = [module for module in model if not isinstance(module, nn.Flatten)]  # type: ignore[attr-defined]

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these runs alone."""
        if self.generators:
            self.generators = [self.generators[place] for place in places]
        for layer in self.layers:
            layer.keep(places)

    def step(self, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step of every run on x [runs, N, d_in], y [runs, N]: losses, hits, and whether the step was odd."""
        f, H, u = self._forward(x)
        output = f.detach().requires_grad_()
        losses = self.loss(output, y)
        (v,) = torch.autograd.grad(losses.sum(), output)
        F: Sequence[Tensor] = ()
        if self.fisher == "mc":
            drawn = drawn_targets(f, self.likelihood, self.generators)
            F = torch.autograd.grad(f, u, drawn, retain_graph=True)
        D = torch.autograd.grad(f, u, v)
        if self.fisher == "empirical":
            F = [len(y[0]) * each for each in D]  # of the summed loss
        with torch.no_grad():
            odd = torch.zeros(len(y), dtype=torch.bool, device=y.device)
            for place, layer in enumerate(self.layers):
                if self.second_order:
                    move, is_odd = layer.precondition(H[place], D[place], F[place] if F else None)
                    odd |= is_odd
                    layer.W.mul_(1 - factor * layer.decay)
                else:
                    move = torch.baddbmm(layer.decay * layer.W, D[place].mT, H[place])
                layer.write(move, factor, self.momentum, self.nesterov)
            hits = (output.argmax(-1) == y).sum(1)
        return losses.detach().double(), hits, odd

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Summed losses and hits of every run on the same samples x [N, d_in], y [N]."""
        runs = len(self.layers[0].W)
        f, _, _ = self._forward(x.expand(runs, -1, -1))
        losses = self.loss(f, y.expand(runs, -1)).double() * len(y)
        return losses, (f.argmax(-1) == y).sum(1)

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The outputs f [runs, N, classes]; and of every layer its inputs, and its outputs to differentiate by."""
        h = x
        H: list[Tensor] = []
        u: list[Tensor] = []
        layers = iter(self.layers)
        for module in self.modules:
            if isinstance(module, nn.Linear):
                H.append(h.detach())
                h = torch.bmm(h, next(layers).W.mT)
                if torch.is_grad_enabled() and not u:
                    h.requires_grad_()
                u.append(h)
            else:
                h = module(h)
        return h, H, u


class Settings(NamedTuple):
    """What one run's optimizer knows of one layer."""

    weight: Tensor
    rate: float
    decay: float
    rule: Rule | None = None
    sides: Sides | None = None

    @classmethod
    def of(cls, optimizer: Optimizer, name: str, weight: nn.Parameter) -> Settings:
        group = next(group for group in optimizer.param_groups if any(weight is each for each in group["params"]))
        decay = group["weight_decay"]
        if not isinstance(optimizer, SecondOrder):
            return cls(weight.detach(), group["lr"], decay)
        slot = optimizer.slots[name]
        rule, sides = optimizer.rule_of(slot, WEIGHT), slot.sides_of(WEIGHT)
        return cls(weight.detach(), optimizer.rate(weight), optimizer.base_rate(weight) * decay, rule, sides)


@dataclass
class StackedLayer:
    """One linear layer of all runs: a slice or a number a run."""

    W: Tensor  # [runs, d_out, d_in]
    buffer: Tensor  # momentum's
    rate: Tensor  # [runs, 1, 1], before the schedule
    decay: Tensor  # [runs, 1, 1]: of SGD a part of the gradient, of the others what a step takes off the weights
    rules: list[tuple[Rule, Sides]]
    peaks: dict[str, Tensor] = field(default_factory=dict)  # the largest traces so far

    @classmethod
    def of(cls, settings: Sequence[Settings]) -> StackedLayer:
        W = torch.stack([each.weight for each in settings])
        rate, decay = (
            W.new_tensor([getattr(each, name) for each in settings])[:, None, None] for name in ("rate", "decay")
        )
        rules = [(each.rule, each.sides) for each in settings if each.rule is not None and each.sides is not None]
        return cls(W, torch.zeros_like(W), rate, decay, rules)

    def keep(self, places: Sequence[int]) -> None:
        index = torch.tensor(places, device=self.W.device, dtype=torch.int64)
        for name in ("W", "buffer", "rate", "decay"):
            setattr(self, name, getattr(self, name)[index])
        self.peaks = {name: each[index] for name, each in self.peaks.items()}
        self.rules = [self.rules[place] for place in places] if self.rules else []
        self.__dict__.pop("damping", None)

    @cached_property
    def damping(self) -> EachOwn:
        rules, sides = zip(*self.rules, strict=True)
        return EachOwn(rules, sides, self.W.device)

    def precondition(self, H: Tensor, D: Tensor, F: Tensor | None) -> tuple[Tensor | LowRank, Tensor]:
        """(B + rho_B)^-1 G (A + rho_A)^-1 with G = D^T H, A of H, B of F; and whether ``train`` would do otherwise."""
        _, d_out, d_in = self.W.shape
        factors = {"A": _factor(H, d_out)}
        if F is not None:
            factors["B"] = _factor(F, d_in)
        traces = {name: factor.trace() for name, factor in factors.items()}
        self.peaks = {name: torch.maximum(self.peaks.get(name, trace), trace) for name, trace in traces.items()}
        rho = self.damping(factors, self.peaks)
        (made,), numbers = prepare([(factors, rho)], INVERSES, "cholesky", rescue=False)
        assert not isinstance(made, FactorizationError)  # without a rescue nobody looks
        operators, _ = made
        as_rows = isinstance(factors["A"], RowsFactor) and LowRank.is_cheaper(H.shape[1], d_out, d_in)
        move = apply(operators, LowRank(D, H) if as_rows else D.mT @ H)
        # |G| <= |D| |H|: where this is finite, all is that train looks at
        sizes = [_norm(D) * traces["A"].sqrt(), *traces.values(), *numbers]
        sizes += [_norm(move.D), _norm(move.H)] if isinstance(move, LowRank) else [_norm(move)]
        return move, ~torch.stack(sizes).isfinite().all(0)

    def write(self, move: Tensor | LowRank, factor: float, momentum: float, nesterov: bool) -> None:
        """Momentum and the update; ``factor`` is the schedule's."""
        if isinstance(move, LowRank) and momentum and not nesterov:
            self.buffer.baddbmm_(move.D.mT, move.H, beta=momentum)
            move = self.buffer
        elif momentum:
            step = move.matrix() if isinstance(move, LowRank) else move
            self.buffer.mul_(momentum).add_(step)
            move = step.add(self.buffer, alpha=momentum) if nesterov else self.buffer
        matrix = move.matrix() if isinstance(move, LowRank) else move
        self.W.addcmul_(matrix, self.rate, value=-factor)


def _factor(X: Tensor, other: int) -> Factor:
    gathered = Accumulator(X.shape[-1], other)
    gathered.add(X, X.shape[1])
    return gathered.factor()


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=(1, 2))
    return norm
