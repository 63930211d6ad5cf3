"""The random numbers of a run: its seeds, and random states that can be saved and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

ORDER, AUGMENTATION, OWN_DRAWS = 1, 2, 3  # purposes of a seed


def seed_for(seed: int, purpose: int, number: int) -> int:
    """Derives the seed of one epoch or step, so that no two of them share a random stream.

    Args:
        seed: The run's seed.
        purpose: ``ORDER`` of the samples, ``AUGMENTATION``, or ``OWN_DRAWS`` of one of several processes.
        number: The epoch or step.

    Returns:
        A seed for a generator.

    Example:
        >>> seed_for(0, ORDER, 1) == seed_for(0, ORDER, 1), seed_for(0, ORDER, 1) == seed_for(0, ORDER, 2)
        (True, False)
    """
    return int(np.random.SeedSequence((seed, purpose, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def random_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of the global generators of torch, numpy and Python.

    Args:
        device: On a GPU, its generator is included.

    Returns:
        The states as data that ``torch.load(weights_only=True)`` reads.

    Example:
        >>> states = random_states(torch.device("cpu"))
        >>> first = torch.rand(1)
        >>> restore_random_states(states, torch.device("cpu"))
        >>> bool(torch.rand(1) == first)
        True
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "random": [version, list(internal), gauss],
    }
    return {**states, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Sets the global generators to the states that ``random_states`` returned.

    Args:
        states: The states.
        device: The device they were read for.
    """
    torch.set_rng_state(states["torch"])
    np.random.set_state(tuple(states["numpy"]))
    version, internal, gauss = states["random"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the global generators on exit, so that random numbers drawn inside do not affect the caller.

    Args:
        device: On a GPU, its generator is restored too.

    Example:
        >>> with own_random_numbers(torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> bool(torch.rand(1) == first)
        True
    """
    before = random_states(device)
    try:
        yield
    finally:
        restore_random_states(before, device)
