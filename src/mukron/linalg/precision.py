"""How precise float32 products on a GPU are."""

from __future__ import annotations

import torch


def matmul_precision() -> str | None:
    """As torch says it; None: it was set in one of torch's other ways, after which torch refuses to say."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
