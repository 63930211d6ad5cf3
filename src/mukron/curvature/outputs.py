"""What an output's shape says: why it cannot be a network's output, where its classes cannot be, what a loss shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mukron.curvature.fisher import CaptureOptions


def no_output(f: Any) -> Exception:
    """Why what a model returned is not its output."""
    if isinstance(f, Tensor):
        return ValueError(
            "the model returned a single number (its loss?); the optimizer needs its outputs: let the model return "
            "them too, as (outputs, loss), and say output=lambda returned: returned[0]"
        )
    place = "returned[0]" if isinstance(f, (tuple, list)) else "returned.logits"
    place = f'returned["{next(iter(f))}"]' if isinstance(f, dict) and f else place
    return TypeError(
        f"the model returned a {type(f).__name__}, not a tensor; say where its output is: "
        f"output=lambda returned: {place}"
    )


def no_classes(options: CaptureOptions, f: Tensor) -> ValueError:
    """Why an output has no classes, or none where they should be."""
    shape = f"the model's output of shape {list(f.shape)}"
    advice = 'for a regression say likelihood="gaussian", for two classes give both a logit'
    if options.likelihood == "categorical" and f.ndim == 2 and f.shape[1] == 1:
        return ValueError(f"{shape} has a single class; {advice}")
    if options.class_dim is not None:
        return ValueError(f"class_dim={options.class_dim} does not fit {shape}")
    if f.ndim < 2:
        return ValueError(f"{shape} has no classes to choose from; {advice}")
    return ValueError(
        f"the model's output has shape {list(f.shape)}: say where the classes are, class_dim=1 (segmentation) or "
        "class_dim=-1 (language)"
    )


def shows_reduction(f: Tensor, class_dim: int) -> bool:
    """Whether a mean over samples, a mean over positions and a sum of this output's losses differ."""
    return len(f) > 1 and (f.ndim < 3 or f.numel() > len(f) * f.shape[class_dim])
