"""The loop of ``train``, for all runs of a stack at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mukron.data import Dataset
from mukron.train.build import batch_of, dataset_of, device_of
from mukron.train.config import RunConfig
from mukron.train.divergence import trouble_with
from mukron.train.errors import RunError
from mukron.train.evaluation import EVALUATED
from mukron.train.loop import train
from mukron.train.observers import Progress
from mukron.train.order import batches
from mukron.train.randomness import own_random_numbers
from mukron.train.records import DIVERGED, FINISHED, INTERRUPTED, Run
from mukron.train.rows import EpochRow, finite
from mukron.train.schedules import Schedule
from mukron.train.stacked.choice import stackable
from mukron.train.stacked.network import Stack
from mukron.train.surroundings import precision, repeatable
from mukron.workers.interrupts import interruptible
from mukron.workers.launch import refuse_torchrun

PER_RUN = ("lr", "damping", "scheme", "output_exponent", "seed")  # of a run; all else is the stack's
ALONE = "alone"  # the status of a run that left its stack


@dataclass(frozen=True)
class StackProgress:
    """Where a stack stands, after every step.

    Attributes:
        epoch: The epoch under way, from 1.
        epochs: All epochs.
        step: Steps taken.
        steps: All steps.
        running: Runs that have not ended, as far as is known.
        seconds_left: The estimated time until the last run ends.

    Example:
        >>> StackProgress(epoch=1, epochs=20, step=3, steps=100, running=8, seconds_left=9.0).running
        8
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    running: int
    seconds_left: float


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

    Args:
        configs: The runs.
        dataset: Their data, whole, if it is loaded already.
        data_dir: Where data sets are kept; None: the usual folder.
        progress: Called after every step.

    Returns:
        The runs, in the order of their configs.

    Raises:
        RunError: A run cannot be stacked, or differs from the others in something that a stack shares.

    Example:
        >>> from mukron.train import RunConfig, train_stack
        >>> config = RunConfig(width=64, method="sgd", epochs=1)
        >>> runs = train_stack([config.replace(lr=lr) for lr in (0.1, 0.2)])
        >>> [run.status for run in runs]
        ['finished', 'finished']
    """
    if not configs:
        return []
    first = configs[0]
    for config in configs:
        if reason := stackable(config):
            raise RunError(f"{reason}. Train such runs one by one")
        if different := [name for name in first.differences(config) if name not in PER_RUN]:
            raise RunError(
                f"runs of one stack share all but {', '.join(PER_RUN)}; these differ in {', '.join(different)}"
            )
    refuse_torchrun("a stack of runs", "one process trains all of them")
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
    rows: list[EpochRow] = field(default_factory=list)
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
        self.batch = batch_of(self.config, dataset)
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
            row: EpochRow = {
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
