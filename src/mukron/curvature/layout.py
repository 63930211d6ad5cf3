"""Rows of a layer in the one layout [groups, samples, positions, features], and their least precision."""

from __future__ import annotations

import torch
from torch import Tensor


def unfolded(X: Tensor, samples: int) -> Tensor:
    """[groups, samples, positions, d], also where the model put positions first or folded them into the samples."""
    if X.shape[1] == samples:
        return X
    if X.shape[2] == samples:
        return X.transpose(1, 2)
    rows = X.shape[1] * X.shape[2]
    return X.reshape(X.shape[0], samples, rows // samples, X.shape[3]) if rows % samples == 0 else X


def precise(x: Tensor) -> Tensor:
    """Statistics are float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
