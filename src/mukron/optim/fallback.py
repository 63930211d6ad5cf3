"""The rules for parameters that no method preconditions: norm layers, bare parameters, what the user excluded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FALLBACKS = ("sgd", "adamw")


def adam_direction(state: dict[str, Any], G: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    """m^ / (sqrt(v^) + eps), Adam's step before its learning rate."""
    beta1, beta2 = betas
    if "adam_step" not in state:
        state.update(adam_step=0, exp_avg=torch.zeros_like(G), exp_avg_sq=torch.zeros_like(G))
    state["adam_step"] += 1
    m = state["exp_avg"].lerp_(G, 1 - beta1)
    v = state["exp_avg_sq"].mul_(beta2).addcmul_(G, G, value=1 - beta2)
    t = state["adam_step"]
    direction: Tensor = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return direction
