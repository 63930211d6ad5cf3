"""The stages of a step, by name, for whoever profiles it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def stage(name: str) -> AbstractContextManager[Any]:
    """A label in torch's profiler; without one running it costs nothing."""
    profiled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if profiled else nullcontext()
