"""The networks and optimizers of a stack: every tensor has a run dimension where a layer of one run has groups.

H [runs, N, d_in] inputs    D [runs, N, d_out] the loss's derivatives    F [runs, N, d_out] the Fisher's

Preconditioning and the update are the optimizers' own: ``direction.prepare``, ``direction.apply``, ``update.write``.
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

from mukron.curvature import Accumulator, Empirical, Fisher, drawn_targets, keeps_halves
from mukron.damping import Rule, Sides
from mukron.data import Dataset
from mukron.layers import WEIGHT
from mukron.linalg import (
    Cholesky,
    Factor,
    FactorizationError,
    LowRank,
    Operator,
    State,
    at_least_rounding,
    prepare,
)
from mukron.optim import SecondOrder
from mukron.optim.direction import NO_MOVE, apply, base_rate, spectral_norm, to_shorten
from mukron.optim.options import Spectral, StepOptions
from mukron.optim.precision import EPS, ILL_CONDITIONED, ILL_CONDITIONED_DENSE, ILL_CONDITIONED_PRODUCT, ill_conditioned
from mukron.optim.update import Move, Update, times, write
from mukron.params import Parametrization
from mukron.train.build import network_of, optimizer_of
from mukron.train.config import RunConfig
from mukron.train.losses import Loss, loss_of
from mukron.train.stacked.rules import EachOwn

POWERS = {"A": Fraction(1), "B": Fraction(1)}


class Stack:
    """The networks and optimizers of all runs, as tensors with a run dimension."""

    def __init__(self, configs: Sequence[RunConfig], dataset: Dataset) -> None:
        config = configs[0]
        self.second_order = config.spec.layerwise
        self.momentum = config.momentum
        self.nesterov = bool(config.method_options.get("nesterov"))
        options = config.spec.all_options(config.method_options)
        self.steps = 0
        self.averages_gradients = config.spec.bounded(options) and not self.nesterov
        self.fisher: Fisher | None = None
        self.likelihood = "gaussian" if config.loss == "mse" else "categorical"
        self.loss: Loss = torch.func.vmap(loss_of(config, dataset))
        self.generators: list[Generator] = []
        networks: dict[tuple[object, ...], tuple[nn.Module, Parametrization]] = {}
        self.options = StepOptions()
        layers: dict[str, list[RunLayer]] = {}
        for run in configs:  # built as ``build`` does; runs that begin alike share their network
            key = (run.seed, run.scheme, run.output_exponent)
            if key not in networks:
                networks[key] = network_of(run, dataset)
            model, plan = networks[key]
            optimizer = optimizer_of(run, model, plan)
            for name, module in model.named_children():
                if isinstance(module, nn.Linear):
                    weight = cast(nn.Parameter, module.weight)
                    layers.setdefault(name, []).append(RunLayer.of(optimizer, name, weight))
            if isinstance(optimizer, SecondOrder):
                self.generators.append(optimizer.generator)
                self.options = optimizer.options
                self.fisher = optimizer.capture_options.fisher if optimizer.capture_options.signals else None
                optimizer.close()
        self.layers = [StackedLayer.of(runs) for runs in layers.values()]
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
        if self.fisher is not None and not isinstance(self.fisher, Empirical):
            drawn = drawn_targets(f, self.fisher, self.likelihood, self.generators)
            F = torch.autograd.grad(f, u, drawn, retain_graph=True)
        D = torch.autograd.grad(f, u, v)
        if isinstance(self.fisher, Empirical):
            F = [len(y[0]) * signals for signals in D]  # of the summed loss
        with torch.no_grad():
            odd = torch.zeros(len(y), dtype=torch.bool, device=y.device)
            for place, layer in enumerate(self.layers):
                move: Move
                if self.second_order:
                    beta = self.momentum if self.averages_gradients else 0.0
                    move, is_odd = layer.precondition(
                        H[place], D[place], F[place] if F else None, self.options, self.steps, beta
                    )
                    odd |= is_odd
                    decay: float | Tensor = factor * layer.decay
                else:  # torch's SGD decays by the gradient
                    move, decay = torch.baddbmm(layer.decay * layer.W, D[place].mT, H[place]), 0.0
                buffer = layer.buffer if self.momentum and not self.averages_gradients else None
                write([Update(layer.W, move, factor * layer.rate, decay, buffer, self.momentum, self.nesterov)])
            hits = (output.argmax(-1) == y).sum(1)
        self.steps += 1
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


class RunLayer(NamedTuple):
    """What one run's optimizer knows of one layer."""

    weight: Tensor
    rate: float
    decay: float
    rule: Rule | None = None
    sides: Sides | None = None
    double: bool = False
    scale: float = 1.0  # of the learning rate, by the parametrization

    @classmethod
    def of(cls, optimizer: Optimizer, name: str, weight: nn.Parameter) -> RunLayer:
        group = next(group for group in optimizer.param_groups if any(weight is p for p in group["params"]))
        decay = group["weight_decay"]
        if not isinstance(optimizer, SecondOrder):
            return cls(weight.detach(), group["lr"], decay)
        layer = optimizer.layers[name]
        entry, rule = layer.blocks[WEIGHT], optimizer.rule_of(layer, WEIGHT)
        rate = base_rate(entry)
        double = ill_conditioned(optimizer, layer)
        decay *= rate * entry.decay
        return cls(weight.detach(), rate * entry.scale, decay, rule, layer.sides[WEIGHT], double, entry.scale)


@dataclass
class StackedLayer:
    """One linear layer of all runs: a slice or a number a run."""

    W: Tensor  # [runs, d_out, d_in]
    buffer: Tensor  # momentum's
    rate: Tensor  # [runs, 1, 1], before the schedule
    decay: Tensor  # [runs, 1, 1]: of SGD a part of the gradient, of the others what a step takes off the weights
    rules: list[tuple[Rule, Sides]]
    double: bool  # the damping of a run is so small that the layer is preconditioned in float64
    scale: Tensor  # [runs, 1, 1]
    peaks: dict[str, Tensor] = field(default_factory=dict)  # the largest traces so far
    kept: dict[str, State] = field(default_factory=dict)  # what factors remember
    operators: dict[str, Operator] = field(default_factory=dict)  # those of the last refresh
    average: Tensor | None = None  # of gradients
    vector: Tensor | None = None  # of the largest singular value of the last move
    first_excess: Tensor | None = None  # [runs]: of the step that made the operators, in units of its trust

    @classmethod
    def of(cls, runs: Sequence[RunLayer]) -> StackedLayer:
        W = torch.stack([run.weight for run in runs])
        numbers = ("rate", "decay", "scale")
        rate, decay, scale = (W.new_tensor([getattr(run, name) for run in runs])[:, None, None] for name in numbers)
        rules = [(run.rule, run.sides) for run in runs if run.rule is not None and run.sides is not None]
        return cls(W, torch.zeros_like(W), rate, decay, rules, any(run.double for run in runs), scale)

    def keep(self, places: Sequence[int]) -> None:
        index = torch.tensor(places, device=self.W.device, dtype=torch.int64)
        for name in ("W", "buffer", "rate", "decay", "scale", "average", "vector", "first_excess"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[index])
        self.peaks = {name: peak[index] for name, peak in self.peaks.items()}
        self.kept = {name: _chosen(state, index) for name, state in self.kept.items()}
        self.operators = {
            name: Operator.from_state(_chosen(operator.state(), index)) for name, operator in self.operators.items()
        }
        self.rules = [self.rules[place] for place in places] if self.rules else []
        self.__dict__.pop("damping", None)

    @cached_property
    def damping(self) -> EachOwn:
        rules, sides = zip(*self.rules, strict=True)
        return EachOwn(rules, sides, self.W.device)

    def precondition(
        self, H: Tensor, D: Tensor, F: Tensor | None, options: StepOptions, step: int, beta: float
    ) -> tuple[Move, Tensor]:
        """(B + rho_B)^-1 G (A + rho_A)^-1 with G = D^T H, A of H, B of F; and whether ``train`` would do otherwise.

        beta: of momentum on the gradient.
        """
        _, d_out, d_in = self.W.shape
        if self.double:
            H, D, F = H.double(), D.double(), None if F is None else F.double()
        factors = {"A": _factor(H, d_out)}
        if F is not None:
            factors["B"] = _factor(F, d_in)
        sizes = [_norm(D) * factors["A"].trace().sqrt()]  # |G| <= |D| |H|: where it is finite, so is G
        if options.memory.keeps:
            factors = {name: options.memory.update(self.kept.setdefault(name, {}), X) for name, X in factors.items()}
        traces = {name: factor.trace() for name, factor in factors.items()}
        self.peaks = {name: torch.maximum(self.peaks.get(name, trace), trace) for name, trace in traces.items()}
        sizes += traces.values()
        conditions: dict[str, Tensor] = {}
        due = step < options.refresh_warmup or step % options.inverse_every == 0
        if due:
            self.operators = self._prepared(factors, sizes, conditions)
        G: Move
        if beta:
            g = D.mT @ H
            self.average = g * (1 - beta) if self.average is None else self.average.to(g.dtype).lerp(g, 1 - beta)
            G = self.average / (1 - beta ** (step + 1))
        else:
            G = LowRank(D, H) if self._keeps_halves(H, F) else D.mT @ H
        move = apply(self.operators, G)
        if isinstance(options.trust, Spectral):
            size, self.vector = spectral_norm(move, self.vector)
            excess = (size * (self.scale / (options.trust.size * (d_out / d_in) ** 0.5))).clamp_min(NO_MOVE)
            move = times(move, to_shorten(options.trust, excess, None if due else self.first_excess))
            if due:
                self.first_excess = excess.amax((-1, -2))
        sizes += [_norm(move.D), _norm(move.H)] if isinstance(move, LowRank) else [_norm(move)]
        odd = ~torch.stack(sizes).isfinite().all(0)
        if H.dtype == torch.float32 and conditions:  # train would change to float64
            kappas, careful = torch.stack(list(conditions.values())), options.inverse_every != 1 or beta > 0
            odd |= EPS * kappas.amax(0) > (ILL_CONDITIONED_DENSE if careful else ILL_CONDITIONED)
            odd |= careful & (EPS * kappas.prod(0) > ILL_CONDITIONED_PRODUCT)
        return move, odd

    def _keeps_halves(self, H: Tensor, F: Tensor | None) -> bool:
        return self.double or keeps_halves(H.shape[1], self.W.shape[2], self.W.shape[1], "auto", F is not None)

    def _prepared(
        self, factors: dict[str, Factor], sizes: list[Tensor], conditions: dict[str, Tensor]
    ) -> dict[str, Operator]:
        """New operators; ``sizes`` gets numbers that are finite if they came out well, ``conditions`` their bounds."""
        (rho,), (bounds,) = at_least_rounding([(factors, self.damping(factors, self.peaks))])
        conditions.update(bounds)
        (prepared,), numbers = prepare([(factors, rho)], [POWERS], Cholesky(), rescue=False)
        assert not isinstance(prepared, FactorizationError)  # without a rescue nobody looks
        sizes += numbers
        return prepared[0]


def _chosen(state: State, index: Tensor) -> State:
    return {name: value[index] if isinstance(value, Tensor) else value for name, value in state.items()}


def _factor(X: Tensor, other: int) -> Factor:
    gathered = Accumulator(X.shape[-1], other)
    gathered.add(X, X.shape[1])
    return gathered.factor()


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=(1, 2))
    return norm
