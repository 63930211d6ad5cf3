"""torchvision's wheel on PyPI is made for torch with CUDA; beside torch for CPUs its import misses two operators.

timm imports torchvision for a layer that is not used here. Where that import fails, the operators are declared.
"""

from __future__ import annotations

import torch

declared = torch.library.Library("torchvision", "FRAGMENT")

try:
    import torchvision as _torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
