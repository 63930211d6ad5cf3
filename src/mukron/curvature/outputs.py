"""What an output's shape says: why it cannot be a network's output, where its classes cannot be, what a loss shows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mukron.curvature.fisher import CaptureOptions, Exact

if TYPE_CHECKING:
    from mukron.curvature.passes import LayerPass


def no_output(f: Any, returned: Any, chosen: bool) -> Exception:
    """Why f is not a network's output.

    returned: what the model returned. chosen: ``output=`` has picked f out of it.
    """
    if isinstance(f, Tensor):
        if chosen:
            return ValueError(f"output= picked a single number (the loss?), not the outputs{_tensors_in(returned)}")
        return ValueError(
            "the model returned a single number (its loss?); the optimizer needs its outputs: let the model return "
            "them too, as (outputs, loss), and say output=lambda returned: returned[0]"
        )
    if chosen:
        return TypeError(f"output= picked a {type(f).__name__}, not a tensor{_tensors_in(returned)}")
    return TypeError(f"the model returned a {type(f).__name__}, not a tensor{_tensors_in(f)}")


def _tensors_in(returned: Any) -> str:
    """Which tensors a model returned could be its output, and how the one that is it is named."""
    if isinstance(returned, Mapping):
        places = {f'["{name}"]': value for name, value in returned.items()}
    elif isinstance(returned, Sequence):
        places = {f"[{place}]": value for place, value in enumerate(returned)}
    else:
        attributes = {"logits": getattr(returned, "logits", None), **getattr(returned, "__dict__", {})}
        places = {f".{name}": value for name, value in attributes.items()}
    tensors = {place: x for place, x in places.items() if isinstance(x, Tensor) and x.ndim}
    named = [place for place in tensors if "logits" in (place[2:-2], place[1:])]
    if named or len(tensors) == 1:
        return f"; say where its output is: output=lambda returned: returned{next(iter(named or tensors))}"
    listed = ", ".join(f"returned{place} of shape {list(x.shape)}" for place, x in tensors.items())
    return f"; name the tensor that the loss is made of by output=, a function of what is returned: {listed or 'none'}"


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


def takes_rows_apart(options: CaptureOptions) -> bool:
    """Whether the derivatives of each row of the output are taken for those of a sample alone."""
    return options.jacobian or (options.signals and isinstance(options.fisher, Exact))


def warn_of_folding(f: Tensor, layers: Iterable[LayerPass]) -> bool:
    """Warn of positions that the output has as rows.

    Returns:
        Whether it was warned.
    """
    for this in layers:
        x = this.input
        if x is None or x.ndim < 3 or not this.layer.plain_rows or len(f) in x.shape[:2]:
            continue
        if x.numel() == len(f) * this.layer.d_in:
            warnings.warn(
                f'the model\'s output has {len(f)} rows, and layer "{this.name}" {len(x)} samples with positions: '
                f"rows of one sample are taken for samples of their own, and where they depend on each other (by "
                "attention, say) their derivatives add up to another matrix. Return [samples, positions, classes] and "
                "say class_dim=-1",
                UserWarning,
                stacklevel=4,
            )
            return True
    return False


def shows_reduction(f: Tensor, class_dim: int) -> bool:
    """Whether a mean over samples, a mean over positions and a sum of this output's losses differ."""
    return len(f) > 1 and (f.ndim < 3 or f.numel() > len(f) * f.shape[class_dim])
