"""What to do about a layer that cannot be preconditioned: errors with an ``exclude=`` that can be pasted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mukron.layers import BIAS
from mukron.optim.places import layers_in
from mukron.params.inventory import inventory, unwrap

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.schemes import Seen
    from mukron.optim.table import LayerEntry
    from mukron.optim.transaction import Transaction


def not_seen(layer: LayerEntry, step: Transaction) -> RuntimeError:
    """The error of a layer with a gradient and without statistics; its remedy names all such layers of the step."""
    unseen = [other for other in step.active if _is_unseen(other, step) and has_values(step, other)]
    remedy = ""
    if len(unseen) < len(step.active):  # else it is the whole model that was not seen
        left = exclusion(step.optimizer, unseen or [layer])
        remedy = f". What cannot be seen is left to the fallback rule by {left}"
    capture = step.optimizer.capture
    if layer.name in capture.odd:
        return RuntimeError(
            f'layer "{layer.name}" returns a {capture.odd[layer.name]} in place of a tensor, so that what its weight '
            f"makes cannot be seen{remedy}"
        )
    if capture.waiting and not capture.passes:
        return RuntimeError(
            f'layer "{layer.name}" has a gradient, but the loss does not depend on the output that the model\'s '
            "forward pass returned: run the model itself (not its parts), and if it returns several tensors, name the "
            "one that the loss is made of: output=lambda returned: ..."
        )
    return RuntimeError(
        f'layer "{layer.name}" has a gradient, but no forward pass of the model was seen for it: run the model itself '
        "(not its parts) in training mode with gradients on and not paused; activation checkpointing needs "
        f"use_reentrant=False{remedy}"
    )


def unmeasured() -> RuntimeError:
    """The error of a process whose model has run, and none of whose passes was measured."""
    return RuntimeError(
        "no forward pass of the model was seen in this process, which others have: run the model in training mode "
        "(model.train()), and run it again before another backward pass where gradients were thrown away"
    )


def _is_unseen(layer: LayerEntry, step: Transaction) -> bool:
    statistics = step.statistics.get(layer.name)
    return statistics is None or (statistics.A is None and not statistics.jacobians)


def refuse_partial(optimizer: SecondOrder, seen: Sequence[Seen]) -> None:
    """Refuse layers that ran for some rows of a pass alone, where outputs are differentiated sample by sample.

    The remedy names layers beside them in a list, too, that have not run for all samples: other experts of a mixture.

    Args:
        optimizer: The optimizer.
        seen: What each process has of the batch.

    Raises:
        RuntimeError: There are such layers.
    """
    partial = {name: (rows, samples) for of in seen for name, rows, samples in of.partial}
    if not partial:
        return
    whole = frozenset[str].intersection(*(of.whole for of in seen if of.partial))
    beside = {name for name in optimizer.layers if name not in whole and any(_are_beside(name, p) for p in partial)}
    layers = [layer for name, layer in optimizer.layers.items() if name in beside | partial.keys()]
    found = ", ".join(f'"{name}" got {rows} in a pass of {n} samples' for name, (rows, n) in partial.items())
    left = ""
    if len(layers) < len(optimizer.layers):  # else nothing would be left to precondition
        left = f"leave such layers to the fallback rule by {exclusion(optimizer, layers)}, or "
    raise RuntimeError(
        f"layers ran for other rows than those of all samples, as experts of a mixture do: {found}. "
        f"{type(optimizer).__name__} must know the sample of each row: {left}train with KFAC or FOOF, which need not"
    )


def _are_beside(name: str, other: str) -> bool:
    """Whether names differ in one number alone, as those of modules of one list do."""
    parts, others = name.split("."), other.split(".")
    differing = [pair for pair in zip(parts, others, strict=False) if pair[0] != pair[1]]
    return len(parts) == len(others) and len(differing) == 1 and all(part.isdecimal() for part in differing[0])


def exclusion(optimizer: SecondOrder, layers: Iterable[LayerEntry]) -> str:
    """The argument that leaves those layers to the fallback rule, and all that is left to it now."""
    exclude = optimizer.options.exclude
    names = dict.fromkeys(_left_by_default(optimizer) if exclude is None else exclude)
    for layer in layers:
        names[layer.name] = None
        bias = layer.blocks.get(BIAS)
        if bias is not None and not bias.name.startswith(f"{layer.name}."):  # the layer's name is that of its weight
            names[bias.name] = None
    listed = ", ".join(f'"{name}"' for name in names)
    return f"exclude=({listed}{',' * (len(names) == 1)})"


def _left_by_default(optimizer: SecondOrder) -> Iterator[str]:
    """Layers that are preconditioned only where ``exclude=`` is given: embeddings, and layers that are tied to one."""
    first = {alias: name for name, entry in inventory(optimizer.model).items() for alias in entry.uses}
    others = {name for layer in optimizer.layers.values() for name in layer.others}
    for module_name, module in unwrap(optimizer.model).named_modules():
        for name, layer, of_blocks in layers_in(module_name, module):
            held = [full for full in of_blocks.values() if first.get(full) in optimizer.entries]
            if held and name not in optimizer.layers and name not in others and layer.preconditions(BIAS):
                yield name


def has_values(step: Transaction, layer: LayerEntry) -> bool:
    """Whether a gradient of the layer has an entry that is not zero."""
    gradients = [step.gradient(entry) for entry in layer.blocks.values()]
    return any(G is not None and (G.is_sparse or bool(G.any())) for G in gradients)
