"""The coordinate check of any network with any optimizer, batch and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mukron.bars import progress_of_function
from mukron.diagnose.check import Check, is_clear
from mukron.diagnose.readings import EXPONENT_TOLERANCE
from mukron.diagnose.record import TrainingSetup
from mukron.diagnose.runs import batch_device, built_optimizer, loss_of_outputs, record_runs
from mukron.params import Parametrization, base_shapes, parametrize
from mukron.params.building import build


def coordinate_check(
    factory: Callable[..., nn.Module],
    optimizer: Callable[[nn.Module, Parametrization], Optimizer],
    batch: tuple[Any, Any],
    *,
    base_width: float,
    widths: Sequence[float] | None = None,
    seeds: int | Sequence[int] | None = None,
    steps: int = 3,
    scheme: str = "mup",
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    tolerance: float = EXPONENT_TOLERANCE,
    output_exponent: float | str | None = None,
    roles: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | bool | None = None,
) -> Check:
    """Train a few steps at several widths and seeds, and fit how the change of each layer's features grows with width.

    Keep the learning rate small: the laws are those of the first steps.

    Args:
        factory: Builds the network; its first argument is the width.
        optimizer: Builds the optimizer from the network and its parametrization; any torch optimizer will do.
        batch: Inputs and targets, the same at every step. The inputs are a tensor, a tuple of the model's arguments or
            a dictionary of its keyword arguments.
        base_width: The width at which the network is tuned.
        widths: The widths to compare; by default 4, 8, 16 and 32 times the base width.
        seeds: The number of seeds, or the seeds themselves. None: as many as the verdict needs, from three to eight.
        steps: The number of steps of every run.
        scheme: The parametrization: ``"mup"``, ``"sp"``, ``"ntk"`` or ``"uniform:R"``.
        loss: The loss of outputs and targets.
        tolerance: The largest exponent that still counts as zero.
        output_exponent: The exponent of the output weights' initial size, as ``parametrize`` takes it.
        roles: The roles of parameters that no known module owns, as ``base_shapes`` takes them.
        progress: Called with the number of runs that are done, the number of all runs as far as it is known, and what
            is run next with an estimate of the time that is left. None: a bar on a terminal and in notebooks; False:
            none.

    Returns:
        The check, with verdicts on every layer.

    Raises:
        ValueError: There are fewer than two widths, no seeds or no steps.
        ParametrizationError: The network cannot be parametrized.

    Example:
        >>> import torch
        >>> from mukron.diagnose import coordinate_check
        >>> from mukron.models import MLP
        >>> _ = torch.manual_seed(0)
        >>> check = coordinate_check(
        ...     lambda width: MLP(width, inputs=4, classes=3),
        ...     lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.1)),
        ...     (torch.randn(8, 4), torch.randint(3, (8,))),
        ...     base_width=32,
        ...     widths=(128, 256, 512),
        ...     steps=1,
        ... )
        >>> check.ok
        True
    """
    shapes = base_shapes(factory, base_width, roles=roles)

    def start(width: float, seed: int) -> TrainingSetup:
        torch.manual_seed(seed)
        model = build(factory, width).to(batch_device(batch))
        plan = parametrize(model, shapes, scheme, output_exponent=output_exponent)
        return TrainingSetup(model, plan, built_optimizer(optimizer, model, plan))

    widths = [base_width * multiple for multiple in (4, 8, 16, 32)] if widths is None else widths
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    with progress_of_function(progress, "coordinate check", lambda *standing: standing) as report:
        record = record_runs(
            start,
            batch,
            loss_of_outputs(loss),
            widths=widths,
            seeds=seeds,
            steps=steps,
            clear=lambda record: is_clear(record, tolerance),
            progress=report,
        )
    return Check(replace(record, setting=f"base width {base_width:g}"), tolerance)
