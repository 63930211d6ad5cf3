"""Gradients that somebody changes between a backward pass and the step, where the step would not see it.

    fused=True        weights have no gradient: what clips the others passes the weights by
    process_group=    gradients are those of this rank's part: clipping them is not clipping the joined gradient

Autograd's own changes are known: when a backward pass that accumulated gradients ends, after what averages them then,
the version of each is noted. A version that differs at the step is somebody else's. Gradients that are gone, or all
zeros, were thrown away, which is no change. A GradScaler leaves versions as they are: for its sake sizes are compared,
too, at the first step alone, since the device is read for that.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from mukron.curvature.capture import as_it_ends
from mukron.optim.processes import averages_itself

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder


SAME_LARGEST = 1e-6  # entry of a gradient, relatively


class Changes:
    """What autograd left of the gradients of some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """parameters: those of the optimizer; hooks on them end with this object."""
        self.parameters, self.told, self._pass = list(parameters), False, -1
        self._sizes, self._first = list[Tensor](), True
        self._noted: list[tuple[nn.Parameter, TensorWeakRef, int]] = []
        arrived = partial(_arrived, weakref.ref(self))
        trained: list[Any] = [p for p in self.parameters if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
        weakref.finalize(self, _remove, handles)

    def gradient_arrived(self) -> None:
        """A gradient was accumulated: note all of them as this backward pass ends."""
        if (running := torch._C._current_graph_task_id()) != self._pass:
            self._pass = running
            as_it_ends(self.note)

    def note(self) -> None:
        """Note the gradients that there are."""
        self._noted = [(p, TensorWeakRef(p.grad), p.grad._version) for p in self.parameters if p.grad is not None]
        self._sizes = [size_of_gradient(p) for p, _, _ in self._noted] if self._first else []

    def take(self) -> tuple[int, int]:
        """How many gradients were changed since they were noted, and how many were not; these are forgotten."""
        noted, sizes = self._noted, self._sizes
        self._noted, self._sizes, self._first = [], [], self._first and not noted
        changed = unchanged = 0
        for k, (p, known, version) in enumerate(noted):
            if p.grad is None:
                continue
            same = p.grad is known() and p.grad._version == version
            same = same and not (sizes and abs(float(size_of_gradient(p) / sizes[k]) - 1) > SAME_LARGEST)
            if same:
                unchanged += 1
            elif bool(p.grad.any()):
                changed += 1
        return changed, unchanged


def changes_of(optimizer: SecondOrder) -> Changes | None:
    """What follows the gradients of an optimizer that would not see a change; None: it sees all there is to see.

    Args:
        optimizer: The optimizer.
    """
    if not optimizer.capture_options.fused and optimizer.together.group is None:
        return None
    return Changes(entry.parameter for entry in optimizer.entries.values())


def check_changes(optimizer: SecondOrder, changes: Changes) -> None:
    """Refuse a change of all gradients that passes weights by; warn once of one that may be meant.

    Args:
        optimizer: The optimizer, before a step.
        changes: What follows its gradients.

    Raises:
        RuntimeError: Weights have no gradient, and all that there are were changed, in one process. (In several an
            error of one would let the others wait.)
    """
    changed, unchanged = changes.take()
    if not changed:
        return
    fused = [name for one in optimizer.capture.passes for name, layer in one.layers.items() if layer.fused]
    name = type(optimizer).__name__
    if fused:
        some = "all" if not unchanged else f"{changed} of {changed + unchanged}"
        message = (
            f"{some} gradients were changed between the backward pass and step(), by clip_grad_norm_ or a GradScaler "
            f'perhaps. {name}(fused=True) does not form the gradient of weights such as that of "{fused[0]}": they '
            "were neither measured nor changed. Leave out fused=True, or leave gradients as they are and bound the "
            'step by a trust, such as trust="spectral"'
        )
        if not unchanged and optimizer.exchange is None:
            raise RuntimeError(message)
    elif averages_itself(optimizer):
        message = (
            f"gradients were changed between the backward pass and step(). {name}(process_group=...) averages them in "
            "the step: until then they are those of this process's part of the batch, and a limit on their norm "
            "(clip_grad_norm_) is another one on each process. Bound the step by a trust, or wrap the model in "
            "DistributedDataParallel, leave out process_group and clip the gradients that it averages"
        )
    else:
        return
    if not changes.told:
        changes.told = True
        warnings.warn(message, UserWarning, stacklevel=6)


def size_of_gradient(parameter: nn.Parameter) -> Tensor:
    """The largest entry of a gradient.

    Args:
        parameter: One that has a gradient.
    """
    assert parameter.grad is not None
    grad = parameter.grad.detach()
    return (grad.coalesce().values() if grad.is_sparse else grad).abs().amax()


def _arrived(changes: weakref.ref[Changes], parameter: Any) -> None:
    target = changes()
    if target is not None:
        target.gradient_arrived()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
