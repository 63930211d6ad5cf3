"""The records of torch's own SGD and AdamW, which take the parameter groups of a ``Parametrization``."""

from __future__ import annotations

from typing import Any

import torch

from mukron import readers as read
from mukron.optim import sizes
from mukron.optim.run_options import NESTEROV, Option
from mukron.optim.spec import MethodSpec, RunFields, add
from mukron.theory import METHODS


def with_betas(run: RunFields, options: dict[str, Any]) -> dict[str, Any]:
    """The run's momentum is beta1."""
    beta2 = options.pop("beta2", 0.999)
    return {"betas": (run.momentum, beta2), **options}


SGD_SPEC = add(
    MethodSpec(
        name="sgd",
        method=METHODS["sgd"],
        optimizer=torch.optim.SGD,
        lr=0.1,
        lr_range=(-7, 1),
        options=(NESTEROV,),
        stacks=True,
    )
)
ADAMW_SPEC = add(
    MethodSpec(
        name="adamw",
        method=METHODS["adam"],
        optimizer=torch.optim.AdamW,
        lr=0.001,
        lr_range=(-12, -3),
        options=(
            Option("beta2", read.number(below=1), "decay of the average of squared gradients (default: 0.999)"),
            Option("eps", read.number(), "what is added to the root of that average (default: 1e-8)"),
        ),
        arguments=with_betas,
        moments=sizes.adams_moments,
    )
)
