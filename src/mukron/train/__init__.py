"""Training runs: a config that says all, a loop that can be killed and continued, and the records it leaves."""

from mukron.train.build import (
    Built,
    batch_of,
    build,
    dataset_of,
    device_of,
    optimizer_of,
)
from mukron.train.config import RunConfig
from mukron.train.errors import RunError
from mukron.train.factories import base_width_of, factory_of
from mukron.train.loop import train
from mukron.train.losses import loss_of
from mukron.train.observers import Moment, Progress
from mukron.train.records import Run
from mukron.train.stacked import StackProgress, stack_size, stackable, train_stack
from mukron.train.trackers import TRACKERS, TrackedRun, Tracker

__all__ = [
    "TRACKERS",
    "Built",
    "Moment",
    "Progress",
    "Run",
    "RunConfig",
    "RunError",
    "StackProgress",
    "TrackedRun",
    "Tracker",
    "base_width_of",
    "batch_of",
    "build",
    "dataset_of",
    "device_of",
    "factory_of",
    "loss_of",
    "optimizer_of",
    "stack_size",
    "stackable",
    "train",
    "train_stack",
]
