"""Names for the stages of an optimizer's step, which show up in torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def stage(name: str) -> AbstractContextManager[Any]:
    """Label a stage of the step in torch's profiler. It costs nothing if no profiler is running.

    Args:
        name: The label.

    Returns:
        A context manager around the stage.

    Example:
        >>> from mukron.stages import stage
        >>> with stage("precondition"):
        ...     print("computing")
        computing
    """
    is_profiling: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_profiling else nullcontext()
