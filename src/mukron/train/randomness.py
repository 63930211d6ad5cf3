"""Random numbers that a run owns: seeds of its own, and streams that can be saved, restored and given back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

ORDER, AUGMENTATION = 1, 2  # what a seed is for


def seed_for(seed: int, purpose: int, number: int) -> int:
    """A seed for one epoch or step, from the run's own: no two of them share a stream."""
    return int(np.random.SeedSequence((seed, purpose, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def random_states(device: torch.device) -> dict[str, Any]:
    """The state of every global generator, as data that ``torch.load(weights_only=True)`` reads."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "random": [version, list(internal), gauss],
    }
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(tuple(states["numpy"]))
    version, internal, gauss = states["random"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn in here leaves the streams outside as they were."""
    before = random_states(device)
    try:
        yield
    finally:
        restore_random_states(before, device)
