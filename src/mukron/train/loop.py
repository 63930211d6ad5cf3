"""The training loop.

Read downwards:  batches -> forward -> check the loss -> backward -> clip -> step -> row -> checkpoint.

Everything that the loop knows between two steps is in ``LoopState``, and a checkpoint saves all of it. The random
numbers of a step come from the seed and the number of the epoch or step, or from generators whose states are saved
too. So a run that was killed continues with the same numbers as one that was not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mukron.bars import progress_of_function
from mukron.data import Dataset, augmentation
from mukron.optim.guards import PATIENCE
from mukron.train.build import batch_of, check_request, dataset_of, device_of, warn_of_cut_batch
from mukron.train.checkpoints import LoopState, checkpoint_of, restore, same_checkpoint
from mukron.train.config import RunConfig
from mukron.train.divergence import DivergedError, failed_factorization, trouble_with
from mukron.train.evaluation import columns, evaluate, total
from mukron.train.losses import counted
from mukron.train.observers import Moment, Observer, Progress, observed, standing_of
from mukron.train.order import batches
from mukron.train.outputs import hits
from mukron.train.probes import PROBES, Probe, Spectra
from mukron.train.processes import Processes, check_batch, joined_processes
from mukron.train.randomness import AUGMENTATION, own_random_numbers, seed_for
from mukron.train.records import DIVERGED, FINISHED, INTERRUPTED, Run, RunFolder
from mukron.train.rows import EpochRow, finite
from mukron.train.samples import written_sample
from mukron.train.schedules import Schedule
from mukron.train.sharding import build_in, joined
from mukron.train.surroundings import precision, repeatable
from mukron.train.trackers import TrackerChoice, Trackers, read_trackers
from mukron.train.tracking import Tracking, tracked
from mukron.train.word_probe import WordProbe
from mukron.workers.interrupts import interruptible

PROBED = 64  # samples that probes measure on


def train(
    config: RunConfig,
    folder: str | os.PathLike[str] | None = None,
    *,
    dataset: Dataset | None = None,
    data_dir: str | Path | None = None,
    resume: bool = True,
    observe: Sequence[Observer] = (),
    progress: Callable[[Progress], None] | bool | None = None,
    tracker: TrackerChoice = (),
    checkpoint_every: int = 1,
    sample: bool = True,
) -> Run:
    """Train what the config describes.

    In a folder the run is recorded, and continues where it was stopped or killed. The last samples of an epoch that do
    not fill a batch are left out; every epoch has another order. Ctrl-C ends the run after the current step, with
    status "interrupted". Global random streams are left as they were.

    Where torchrun has started several processes, or the caller has made a process group, all of them train this run
    together: each takes a part of every batch, and all return the same. Rank 0 writes the files.

    Args:
        config: The run.
        folder: Where the run is recorded; None keeps nothing on disk. If a run with this config has ended there, its
            record is returned; a run with another config is refused. The same config with more epochs continues, unless
            the schedule depends on the number of epochs (cosine, linear).
        dataset: The whole data set of the config, if it is loaded already.
        data_dir: Where data sets are kept; None for the default folder.
        resume: False deletes the run in the folder and starts a new one.
        observe: Functions called with a ``Moment`` at the end of every epoch; their numbers are added to its row.
        progress: Called after every step and every epoch. None: a bar on a terminal and in notebooks; False: none.
        tracker: "wandb", "mlflow", "tensorboard", your own ``mukron.train.Tracker``, or several: they get every epoch's
            row. One that fails is dropped with a warning.
        checkpoint_every: Epochs between two checkpoints; one is also written at the end and on Ctrl-C.
        sample: Whether a language model writes a sample of text at the end.

    Returns:
        The run: its status, and the numbers of every epoch.

    Raises:
        RunError: The run cannot be trained as described, or the folder holds another one.

    Example:
        >>> from mukron.train import RunConfig, train
        >>> run = train(RunConfig(width=64, method="sgd", lr=0.1, epochs=2))
        >>> run.status, len(run.epochs)
        ('finished', 2)
    """
    check_request(config, dataset, checkpoint_every)
    files, trackers = None if folder is None else RunFolder(folder), read_trackers(tracker)
    with progress_of_function(progress, "train", standing_of) as report, joined_processes(config) as processes:
        run = _train(
            config,
            files,
            processes,
            lambda: dataset_of(config, dataset, data_dir),
            lambda data: Loop(config, data, files, observe, report, checkpoint_every, data_dir, sample, processes),
            resume,
            trackers,
        )
        processes.collect()
    return run


def _train(
    config: RunConfig,
    files: RunFolder | None,
    processes: Processes,
    load: Callable[[], Dataset],
    make: Callable[[Dataset], Loop],
    resume: bool,
    trackers: Trackers,
) -> Run:
    with ExitStack() as stack:
        if files is not None and (run := _begin(files, config, processes, resume, stack)) is not None:
            return run
        folder = None if files is None else files.path
        processes.of_first(lambda: trackers.check(folder))
        data = processes.in_turn(load)
        with processes.together():
            stack.enter_context(own_random_numbers(device_of(config)))
            stack.enter_context(repeatable())
            stack.enter_context(precision(config.dtype))
            loop = make(data)
        loop.join()
        if files is not None:
            loop.load(same_checkpoint(files, processes) if resume else None)
            processes.of_first(lambda: files.begin(config, loop.state.rows, forget=not resume))
        several = processes.size > 1
        interrupted = stack.enter_context(interruptible(terminate=several, patient=several))
        used = trackers if processes.first else Trackers({})
        loop.tracking = stack.enter_context(tracked(used, config, folder, loop.state.rows, loop.device))
        return loop.run(interrupted)


def _begin(files: RunFolder, config: RunConfig, processes: Processes, resume: bool, stack: ExitStack) -> Run | None:
    """Lock the folder, and return the run that has ended there, if there is one."""

    def lock() -> Run | None:
        stack.enter_context(files.locked())
        return files.ended(config) if resume else None

    return processes.of_first(lock)


class Loop:
    """One training run."""

    tracking: Tracking

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        files: RunFolder | None,
        observe: Sequence[Observer],
        progress: Callable[[Progress], None] | None,
        checkpoint_every: int,
        data_dir: str | Path | None,
        sample: bool,
        processes: Processes,
    ) -> None:
        self.config, self.dataset, self.files = config, dataset, files
        self.observe, self.progress, self.checkpoint_every = observe, progress, checkpoint_every
        self.device, self.sample = device_of(config), sample
        self.processes, self.asked_to_stop = processes, False
        self.batch = batch_of(config, dataset)
        check_batch(self.batch, processes)
        warn_of_cut_batch(config, dataset)
        self.steps_per_epoch = len(dataset.train) // self.batch
        self.built = build_in(processes, config, dataset)
        self.rates = [group["lr"] for group in self.built.optimizer.param_groups]
        self.schedule = Schedule.parse(config.schedule)
        self.built.try_out(self._prepared(dataset.train.inputs[:PROBED]), dataset)
        self.probes = self._probes(data_dir)  # before a checkpoint is loaded: they compare with the initial weights
        self.state = LoopState()

    def join(self) -> None:
        """Let processes average gradients. All of them must call this."""
        self.built = joined(self.built, self.processes)

    def _probes(self, data_dir: str | Path | None) -> dict[str, Probe]:
        model, optimizer = self.built.model, self.built.optimizer
        x = self._prepared(self.dataset.train.inputs[:PROBED])
        probes: dict[str, Probe] = {
            name: WordProbe(model, self.dataset, data_dir) if name == "words" else PROBES[name](model, optimizer, x)
            for name in self.config.record
        }
        if isinstance(spectra := probes.get("spectra"), Spectra):
            spectra.of_all = self.processes.of_all
        return probes

    def _prepared(self, inputs: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return self.dataset.prepare(inputs, self.config.weights_dtype, augment)

    # From the first epoch to the last.

    def run(self, interrupted: Callable[[], bool]) -> Run:
        self.started, self.steps_before, self.seconds_before = time.perf_counter(), self.state.step, self.state.seconds
        status, reason = FINISHED, ""
        try:
            self.interrupted = interrupted
            while self.state.epoch < self.config.epochs and not self._stops():
                self._epoch()
            if self.state.epoch < self.config.epochs:
                status, reason = INTERRUPTED, f"interrupted at step {self.state.step}"
        except DivergedError as error:
            status, reason = DIVERGED, f"step {self.state.step}: {error}"
        self._tick()
        if self.files is not None and status != DIVERGED:
            self._save()
        writes = self.sample and status == FINISHED and self.dataset.tokens
        sample = written_sample(self.built, self.dataset) if writes else ""
        run = Run(self.config, status, list(self.state.rows), reason, self.state.seconds, sample=sample)
        return self.processes.of_first(lambda: self._ended(run))

    def _ended(self, run: Run) -> Run:
        if self.files is not None:
            self.files.end(run)
        self.tracking.end(run)
        return run

    def _stops(self) -> bool:
        """Whether Ctrl-C was pressed; where several processes train, as of the last step that they took together."""
        return self.asked_to_stop if self.processes.size > 1 else self.interrupted()

    def _epoch(self) -> None:
        """Train the remaining batches of an epoch and record its row; return early on Ctrl-C."""
        state = self.state
        self.built.model.train()
        for samples in batches(len(self.dataset.train), self.batch, self.config.seed, state.epoch)[state.batch :]:
            self._step(samples.to(self.device))
            state.batch += 1
            self._report()
            if self._stops() and state.batch < self.steps_per_epoch:
                return
        own = self._row()
        row = self.processes.of_first(lambda: self._recorded(own))
        state.rows.append(row)
        state.epoch, state.batch, state.loss, state.correct, state.seen = state.epoch + 1, 0, 0.0, 0, 0
        self._report(row)
        if "test_loss" in row:
            self._check(row["test_loss"], "test loss")
        if self.files is not None and state.epoch % self.checkpoint_every == 0 and state.epoch < self.config.epochs:
            self._save()

    def _step(self, samples: Tensor) -> None:
        config, state, optimizer, train = self.config, self.state, self.built.optimizer, self.dataset.train
        augment = augmentation(config.augment, seed_for(config.seed, AUGMENTATION, state.step), self.dataset.mean)
        targets, part = train.targets[samples], self.processes.part(len(samples))
        number = counted(targets)
        if not number:  # nothing to learn from: all targets are ignored
            state.step += 1
            return
        x, y = self._part(samples, part, augment), targets[part]
        self._set_rates()
        optimizer.zero_grad()
        self.processes.draw_apart(config.seed, state.step)
        output = self.built.outputs(x)
        loss, value, correct = self._loss(output, y, number)
        self._check(value, "loss")
        torch.autograd.backward(loss)
        if config.clip_norm is not None:
            self.built.plan.clip_grad_norm_(config.clip_norm, model=self.built.model)
        self._move()
        state.step += 1
        state.seen += number
        state.loss += value * number
        state.correct = total(state.correct, correct)

    def _part(self, samples: Tensor, part: slice, augment: Callable[[Tensor], Tensor] | None) -> Tensor:
        """The inputs of this process's part of a batch; augmentations draw for all of it, as one process does."""
        inputs = self.dataset.train.inputs
        if augment is None:
            return self._prepared(inputs[samples[part]])
        return self._prepared(inputs[samples], augment)[part]

    def _loss(self, output: Tensor, y: Tensor, number: int) -> tuple[Tensor, float, int | None]:
        """What to differentiate; and of the joined batch, with so many targets, the mean loss and the hits.

        Gradients are averaged over processes, so a mean loss over a part counts by its share times their number.
        """
        correct, processes = hits(output, y, self.config, self.dataset), self.processes
        if processes.size == 1:
            loss = self.built.loss(output, y)
            return loss, loss.item(), correct
        own = counted(y)
        loss = self.built.loss(output, y) if own else output.sum() * 0
        said = [loss.item() * own, correct or 0, self.interrupted()]
        losses, found, asked = processes.totals(said)
        self.asked_to_stop = asked > 0
        return loss * (own / number * processes.size), losses / number, None if correct is None else int(found)

    def _factor(self, step: int) -> float:
        return self.schedule.factor(step, self.steps_per_epoch, self.config.epochs, self.config.warmup)

    def _set_rates(self) -> None:
        """Set every group's learning rate to its initial one times the factor of the schedule."""
        factor = self._factor(self.state.step)
        for group, lr in zip(self.built.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * factor

    def _move(self) -> None:
        """Take the optimizer's step. Single skipped steps are tolerated; ``PATIENCE`` in a row count as divergence."""
        optimizer, state = self.built.optimizer, self.state
        before = getattr(optimizer, "skipped", 0)
        try:
            optimizer.step()
        except RuntimeError as error:
            if reason := failed_factorization(error, self.processes):
                raise DivergedError(reason) from error
            raise
        skipped = getattr(optimizer, "skipped", 0) > before
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if state.skipped_in_a_row >= PATIENCE:
            raise DivergedError(f"{PATIENCE} steps in a row were skipped, since gradients or curvature were not finite")

    def _check(self, loss: float | None, what: str) -> None:
        """Raise ``DivergedError`` if the loss shows that the run has diverged."""
        if trouble := trouble_with(loss, self.state.first_loss, what):
            raise DivergedError(trouble)
        if self.state.first_loss is None:
            self.state.first_loss = loss

    # What is recorded.

    def _row(self) -> EpochRow:
        config, state = self.config, self.state
        epoch = state.epoch + 1
        row: EpochRow = {
            **{"epoch": epoch, "step": state.step, "lr": config.lr * self._factor(state.step - 1)},
            **columns(config, self.dataset, "train", *self._means()),
        }
        with own_random_numbers(self.device):  # recording does not change the random numbers of training
            if len(self.dataset.test) and (epoch % config.evaluate_every == 0 or epoch == config.epochs):
                row |= columns(config, self.dataset, "test", *evaluate(self.built, self.dataset, self.processes))
            if epoch % config.record_every == 0 or epoch == config.epochs:
                for probe in self.probes.values():
                    row.update(probe.read())
            for observer in self.observe:
                moment = Moment(config, self.built, self.dataset, epoch, state.step, dict(row))
                row.update(observed(observer, moment))
        self._tick()
        if self.dataset.tokens:
            row["tokens"] = state.step * self.batch * math.prod(self.dataset.input_shape)
        return finite({**row, "seconds": state.seconds})

    def _recorded(self, row: EpochRow) -> EpochRow:
        if self.files is not None:
            self.files.append(row)
        self.tracking.log(row)
        return row

    def _means(self) -> tuple[float, float | None]:
        """Loss and accuracy of the epoch so far."""
        state = self.state
        if not state.seen:
            return math.nan, None
        return state.loss / state.seen, None if state.correct is None else state.correct / state.seen

    def _tick(self) -> None:
        self.state.seconds = self.seconds_before + time.perf_counter() - self.started

    def _report(self, row: EpochRow | None = None) -> None:
        if self.progress is None:
            return
        state, steps = self.state, self.config.epochs * self.steps_per_epoch
        done = state.step - self.steps_before
        left = (time.perf_counter() - self.started) / max(done, 1) * (steps - state.step)
        epoch, (loss, accuracy) = state.epoch + 1, self._means()
        if row is not None:
            epoch, loss, accuracy = row["epoch"], row["train_loss"], row.get("train_accuracy")
        loss, accuracy = (math.nan if number is None else number for number in (loss, accuracy))
        self.progress(Progress(epoch, self.config.epochs, state.step, steps, loss, accuracy, left, row))

    # Checkpoints.

    def _save(self) -> None:
        assert self.files is not None
        self._tick()
        checkpoint, files = checkpoint_of(self), self.files
        self.processes.of_first(lambda: files.save(checkpoint, self.state.rows))

    def load(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint; None leaves the initial state."""
        if checkpoint is not None:
            restore(self, checkpoint)
