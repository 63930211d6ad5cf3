"""Many runs of one narrow network as one program.

A grid of learning rates, dampings and seeds at one width is many short runs that leave a computer idle. Here their
weights are stacked, W [runs, d_out, d_in], and every product and factorization is done for all of them at once. To the
curvature a stack of runs is what a layer with groups is, so factors, damping and inverses are those of one run:

    H [runs, N, d_in] inputs    D [runs, N, d_out] the loss's derivatives    F [runs, N, d_out] the Fisher's

Runs do not touch one another, and each draws from its own generators. So nothing is masked and no step waits for the
device: losses are read once an epoch, and then it is told run by run what ``train`` would have said, and where. What is
out of the ordinary, a step that ``train`` would skip or a factorization that fails at first, is left to ``train``: that
run leaves the stack and is trained alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from mukron.curvature import Accumulator, drawn_targets, parse_memory
from mukron.damping import EachOwn, MaxEigenvalue, Rule, Sides
from mukron.data import Dataset
from mukron.linalg import Factor, LowRank, RowsFactor
from mukron.optim.base import WEIGHT, SecondOrder
from mukron.params import Parametrization
from mukron.precond import apply
from mukron.precond.kronecker import at_least_rounding
from mukron.train.build import Loss, dataset_of, device_of, loss_of, network_of, optimizer_of
from mukron.train.config import RunConfig
from mukron.train.errors import RunError
from mukron.train.loop import EVALUATED, Progress, batches, train, trouble_with
from mukron.train.randomness import own_random_numbers
from mukron.train.records import DIVERGED, FINISHED, INTERRUPTED, Row, Run, finite
from mukron.train.schedules import Schedule
from mukron.train.surroundings import interruptible, precision, repeatable

OWN = ("lr", "damping", "scheme", "output_exponent", "seed")  # of a run; all else is the stack's
PLAIN = {  # method_options that a stack can have, and which values of them
    "nesterov": (False, True),
    "fisher": ("mc", "empirical"),
    "decoupled": (True,),
    "graft": (None,),
    "fallback": ("sgd",),
    "fallback_lr": (None,),
    "exclude": ((),),
    "factor_every": (1,),
    "inverse_every": (1,),
    "solver": ("cholesky",),
    "sharing": ("expand",),
    "form": ("auto",),
    "class_dim": (None,),
}
# Measured on one core, 8 to 32 runs of 3 layers, by the multiplications N width^2 of a hidden layer's product: a stack is
# 5 to 6 times as quick as its runs one by one at 2^18, 2 to 3 times at 2^21, 1.2 to 2.3 times at 2^24, no quicker at 2^28.
# On a GPU idle time is what is won, up to where one run's products fill it.
GAINS = {"cpu": 2**25, "cuda": 2**30}
LARGEST = {"cpu": 32, "cuda": 64}  # on a CPU more are slower: the stack no longer fits its cache
MEMORY = 2**30  # bytes, on a CPU
ALONE = "alone"  # the status of a run that left its stack


@dataclass(frozen=True)
class StackProgress:
    """Where a stack stands, after every step."""

    epoch: int  # the one under way, from 1
    epochs: int
    step: int
    steps: int
    running: int  # runs that go on, as far as is known
    seconds_left: float


def stackable(config: RunConfig) -> str:
    """Why runs like this cannot be trained as a stack; "" if they can."""
    for name, plain in (("augment", ()), ("record", ()), ("compile", False), ("clip_norm", None), ("kl_clip", None)):
        if getattr(config, name) != plain:
            return f"{name}={getattr(config, name)!r}: a stack has none"
    if config.model != "mlp":
        return f"model={config.model!r}: a stack is of MLPs"
    if config.method not in ("sgd", "kfac", "foof"):
        return f"method={config.method!r}: a stack knows sgd, kfac and foof"
    if config.dtype == "bfloat16" or torch.device(config.device).type not in ("cpu", "cuda"):
        return (
            f"dtype={config.dtype!r}, device={config.device!r}: a stack computes in float32 or float64 on cpu or cuda"
        )
    if isinstance(config.damping, MaxEigenvalue):
        return "damping: largest eigenvalues are not taken of a stack"
    for name, value in config.method_options.items():
        known = parse_memory(value) == parse_memory("batch") if name == "memory" else value in PLAIN[name]
        if not known:
            return f"method_options: {name}={value!r}: a stack has the usual one alone"
    return ""


def stack_size(config: RunConfig, dataset: Dataset, workers: int = 1) -> int:
    """How many runs like this are best trained at once; 1: it cannot be stacked, or would gain nothing.

    workers: processes that share this machine, each with a stack of its own.
    """
    if stackable(config):
        return 1
    device = device_of(config)
    width, depth = int(config.width), int(config.model_options.get("depth", 3))
    batch = min(config.batch or len(dataset.train), len(dataset.train))
    if batch * width**2 > GAINS[device.type]:
        return 1
    sizes = [math.prod(dataset.input_shape), *[width] * (depth - 1), dataset.classes]
    weights = 4 * sum(d_in * d_out for d_in, d_out in pairwise(sizes))  # with momentum, gradient and step
    values = (6 * batch + 2 * min(EVALUATED, len(dataset.test))) * sum(sizes)
    factors = 0 if config.method == "sgd" else 8 * sum(min(batch, d) ** 2 for d in sizes)
    memory = (weights + values + factors) * config.weights_dtype.itemsize
    free = MEMORY if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
    return max(1, min(LARGEST[device.type], free // workers // memory))


def train_stack(
    configs: Sequence[RunConfig],
    *,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    progress: Callable[[StackProgress], None] | None = None,
) -> list[Run]:
    """Train runs that differ in lr, damping, scheme, output_exponent and seed alone, all at once.

    Each run is what ``train`` makes of it, up to rounding; its ``seconds`` are its share of the stack's. ``stackable``
    says which configs can be stacked. Ctrl-C ends all after their step: those under way are "interrupted".
    """
    if not configs:
        return []
    first = configs[0]
    for config in configs:
        if reason := stackable(config):
            raise RunError(f"{reason}. Train such runs one by one")
        if different := [name for name in first.differences(config) if name not in OWN]:
            raise RunError(f"runs of one stack share all but {', '.join(OWN)}; these differ in {', '.join(different)}")
    with ExitStack() as stack:
        data = dataset_of(first, dataset, data_dir)
        stack.enter_context(own_random_numbers(device_of(first)))
        stack.enter_context(repeatable())
        stack.enter_context(precision(first.dtype))
        return StackLoop(configs, data, progress).run(stack.enter_context(interruptible()))


@dataclass
class Member:
    """One run of a stack, as far as it is known."""

    config: RunConfig
    rows: list[Row] = field(default_factory=list)
    first_loss: float | None = None
    status: str = ""  # "" while it goes on
    reason: str = ""

    def ends(self, status: str, reason: str = "") -> None:
        self.status, self.reason = status, reason

    def hear(self, losses: Sequence[float], odd: Sequence[bool], step: int) -> None:
        """What ``train`` would have said of these losses, of the step with this number and those after it."""
        for number, (loss, is_odd) in enumerate(zip(losses, odd, strict=True), start=step):
            if trouble := trouble_with(loss, self.first_loss, "loss"):
                return self.ends(DIVERGED, f"step {number}: {trouble}")
            self.first_loss = loss if self.first_loss is None else self.first_loss
            if is_odd:
                return self.ends(ALONE)
        return None


class StackLoop:
    """A stack under way: the loop of ``train``, for all runs at once."""

    def __init__(
        self, configs: Sequence[RunConfig], dataset: Dataset, progress: Callable[[StackProgress], None] | None
    ) -> None:
        self.started = time.perf_counter()
        self.config, self.dataset, self.progress = configs[0], dataset, progress
        self.members = [Member(config) for config in configs]
        self.running = list(self.members)  # in the order of the stack
        self.stack = Stack(configs, dataset)
        self.schedule = Schedule.parse(self.config.schedule)
        self.batch = min(self.config.batch or len(dataset.train), len(dataset.train))
        self.steps_per_epoch = len(dataset.train) // self.batch
        self.device, self.epoch, self.step = device_of(self.config), 0, 0
        prepared = (dataset.prepare(part.inputs, self.config.weights_dtype) for part in (dataset.train, dataset.test))
        self.inputs, self.test_inputs = (inputs.flatten(1) for inputs in prepared)  # once, for all runs and epochs

    def run(self, interrupted: Callable[[], bool]) -> list[Run]:
        while self.running and self.epoch < self.config.epochs and not interrupted():
            self._epoch(interrupted)
        for member in self.running:
            member.ends(FINISHED) if self.epoch == self.config.epochs else self._interrupt(member)
        seconds = self._seconds()
        return [self._result(member, seconds, interrupted) for member in self.members]

    def _interrupt(self, member: Member) -> None:
        member.ends(INTERRUPTED, f"interrupted at step {self.step}")

    def _result(self, member: Member, seconds: float, interrupted: Callable[[], bool]) -> Run:
        if member.status == ALONE and not interrupted():
            return train(member.config, dataset=self.dataset, progress=self._report_alone)
        if member.status == ALONE:
            self._interrupt(member)
        return Run(member.config, member.status, member.rows, member.reason, seconds)

    def _epoch(self, interrupted: Callable[[], bool]) -> None:
        samples = self._order()
        losses, correct, odd = [], [], []
        begin = self.step
        for batch in samples:
            x, y = self._batch(batch)
            loss, hits, is_odd = self.stack.step(x, y, self._factor(self.step))
            losses.append(loss)
            correct.append(hits)
            odd.append(is_odd)
            self.step += 1
            self._report()
            if interrupted() and self.step - begin < self.steps_per_epoch:
                break
        else:
            self.epoch += 1
        # From here on on the CPU: the one wait of an epoch.
        table, flags, counts = (torch.stack(each, dim=1).tolist() for each in (losses, odd, correct))
        for member, own, own_flags in zip(self.running, table, flags, strict=True):
            member.hear(own, own_flags, begin)
        if self.step - begin == self.steps_per_epoch:
            self._rows([sum(own) / len(own) for own in table], [sum(own) for own in counts])
        self._let_go()

    def _order(self) -> list[Tensor]:
        """The samples of every step, [runs, N]."""
        seeds = [member.config.seed for member in self.running]
        own = {seed: torch.stack(batches(len(self.inputs), self.batch, seed, self.epoch)) for seed in set(seeds)}
        return list(torch.stack([own[seed] for seed in seeds], dim=1).to(self.device))

    def _batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        if self.batch == len(self.inputs):
            runs = len(self.running)
            return self.inputs.expand(runs, -1, -1), self.dataset.train.targets.expand(runs, -1)
        return self.inputs[samples], self.dataset.train.targets[samples]

    def _factor(self, step: int) -> float:
        return self.schedule.factor(step, self.steps_per_epoch, self.config.epochs, self.config.warmup)

    def _rows(self, losses: Sequence[float], hits: Sequence[int]) -> None:
        config, test, seen = self.config, self.dataset.test, self.batch * self.steps_per_epoch
        evaluates = len(test) and (self.epoch % config.evaluate_every == 0 or self.epoch == config.epochs)
        going_on = any(not member.status for member in self.running)
        tested = self._evaluate() if evaluates and going_on else None
        for place, member in enumerate(self.running):
            if member.status:
                continue
            row: Row = {
                **{"epoch": self.epoch, "step": self.step, "lr": member.config.lr * self._factor(self.step - 1)},
                **{"train_loss": losses[place], "train_accuracy": hits[place] / seen},
            }
            if tested is not None:
                row["test_loss"], row["test_accuracy"] = tested[0][place], tested[1][place]
            row = finite({**row, "seconds": self._seconds()})
            member.rows.append(row)
            trouble = trouble_with(row["test_loss"], member.first_loss, "test loss") if tested is not None else ""
            if trouble:
                member.ends(DIVERGED, f"step {self.step}: {trouble}")

    def _evaluate(self) -> tuple[list[float], list[float]]:
        """Every run's loss and accuracy on the test samples."""
        targets = self.dataset.test.targets
        parts = zip(torch.split(self.test_inputs, EVALUATED), torch.split(targets, EVALUATED), strict=True)
        losses, hits = zip(*(self.stack.evaluate(x, y) for x, y in parts), strict=True)
        return (sum(losses) / len(targets)).tolist(), (sum(hits).double() / len(targets)).tolist()

    def _let_go(self) -> None:
        """Runs that have ended leave the stack."""
        going_on = [place for place, member in enumerate(self.running) if not member.status]
        if len(going_on) < len(self.running):
            self.running = [self.running[place] for place in going_on]
            self.stack.keep(going_on)

    def _seconds(self) -> float:
        return (time.perf_counter() - self.started) / len(self.members)

    def _report(self) -> None:
        if self.progress is None:
            return
        steps = self.config.epochs * self.steps_per_epoch
        left = (time.perf_counter() - self.started) / self.step * (steps - self.step)
        epoch = min(self.epoch + 1, self.config.epochs)
        self.progress(StackProgress(epoch, self.config.epochs, self.step, steps, len(self.running), left))

    def _report_alone(self, at: Progress) -> None:
        if self.progress is not None:
            self.progress(StackProgress(at.epoch, at.epochs, at.step, at.steps, 1, at.seconds_left))


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
        tried = {name: each.attempt(at_least_rounding(rho[name], each)) for name, each in factors.items()}
        as_rows = isinstance(factors["A"], RowsFactor) and LowRank.is_cheaper(H.shape[1], d_out, d_in)
        operators = {name: operator for name, (operator, _) in tried.items()}
        move = apply(operators, LowRank(D, H) if as_rows else D.mT @ H)
        # |G| <= |D| |H|: where this is finite, all is that train looks at
        sizes = [_norm(D) * traces["A"].sqrt(), *traces.values()]
        sizes += [_norm(move.D), _norm(move.H)] if isinstance(move, LowRank) else [_norm(move)]
        good = torch.stack([good for _, good in tried.values()]).all(0)
        return move, ~(torch.stack(sizes).isfinite().all(0) & good)

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


class Stack:
    """The networks and optimizers of all runs, as tensors with a run dimension."""

    def __init__(self, configs: Sequence[RunConfig], dataset: Dataset) -> None:
        config = configs[0]
        self.second_order = config.method != "sgd"
        self.momentum = config.momentum
        self.nesterov = bool(config.method_options.get("nesterov"))
        self.fisher = config.method_options.get("fisher", "mc") if config.method == "kfac" else ""
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
