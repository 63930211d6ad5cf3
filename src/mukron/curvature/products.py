"""Linear maps that a module applies by itself: its calls of ``F.linear`` are heard of while its forward pass runs.

No hook sees them, since no module is called for them. ``F.linear`` is replaced from the start of such a forward pass
to its end, and put back then. Calls from other threads, or with other weights, are passed on as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.curvature.passes import LayerPass
from mukron.layers import WEIGHT, MatrixLayer, Projection, layer_of

Hear = Callable[["Watch", Tensor, Tensor, Tensor], None]  # with the input, the weight and the output


class Watch:
    """Hears of this thread's calls of ``F.linear`` from ``begin`` to ``end``.

    Attributes:
        hear: What is called, as long as it lives.
        weights: By the identity of a weight, the name of its layer; "": nobody wants to know it.
        positions_first: Inputs are [positions, samples, features], as torch's attention has them.
        lead: The first two sizes of the first such input; where rows are folded, they are folded so. None: not known.
    """

    active: ClassVar[threading.local] = threading.local()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _running: ClassVar[int] = 0  # in all threads
    _linear: ClassVar[Any] = F.linear
    _is_wrapped: ClassVar[bool] = False  # somebody else has replaced ``heard_linear``

    def __init__(self, hear: Hear, weights: Mapping[int, str], positions_first: bool) -> None:
        self.hear, self.weights, self.positions_first = weakref.WeakMethod(hear), weights, positions_first
        self.lead: tuple[int, int] | None = None
        self._others: list[Watch] | None = None  # of its thread; None: it does not run

    def begin(self) -> None:
        self._others = Watch.active.__dict__.setdefault("watches", [])
        self._others.append(self)
        with Watch._lock:
            if Watch._running == 0 and not (Watch._is_wrapped and F.linear is not Watch._linear):
                Watch._linear, F.linear, Watch._is_wrapped = F.linear, heard_linear, False
            Watch._running += 1

    def end(self) -> None:
        if self._others is None:
            return
        self._others.remove(self)
        self._others = None
        with Watch._lock:
            Watch._running -= 1
            if Watch._running == 0 and F.linear is heard_linear:
                F.linear = Watch._linear
            elif Watch._running == 0:  # somebody has replaced it since, by a function that may call this one
                Watch._is_wrapped = True

    def heard(self, x: Tensor, weight: Tensor, output: Tensor) -> None:
        """Tell of a product, if its weight is one of the watched ones."""
        name, hear = self.weights.get(id(whole(weight))), self.hear()
        if name is None or hear is None:
            return
        if self.lead is None and x.ndim == 3:
            self.lead = (x.shape[0], x.shape[1])
        if name:
            hear(self, x, weight, output)

    def name_of(self, weight: Tensor) -> str:
        """The layer whose weight that is, or a part of."""
        return self.weights[id(whole(weight))]

    def samples_first(self, x: Tensor) -> Tensor:
        """An input or output as [samples, positions, features]; a view."""
        if not self.positions_first:
            return x
        if x.ndim == 2 and self.lead is not None and len(x) == self.lead[0] * self.lead[1]:
            x = x.reshape(*self.lead, -1)
        return x.transpose(0, 1) if x.ndim == 3 else x


def _heard_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = Watch._linear(input, weight, bias)
    for watch in Watch.active.__dict__.get("watches", ()):
        watch.heard(input, weight, output)
    return output


disable: Callable[..., Any] = torch.compiler.disable
heard_linear = disable(_heard_linear)  # in compiled models too it is plain Python


def whole(weight: Tensor) -> Tensor:
    """The parameter that a weight is, or is a part of."""
    return weight if weight._base is None else weight._base


def first_part(weight: Tensor, parts_rows: int) -> int:
    """Which part of the whole parameter a weight begins with, parts having that many rows."""
    base = whole(weight)
    return (weight.storage_offset() - base.storage_offset()) // base.stride(0) // parts_rows


def passes_of_product(watch: Watch, layer: MatrixLayer, x: Tensor, weight: Tensor) -> Iterator[tuple[str, LayerPass]]:
    """What a product shows of the maps in its weight, by the layer's name and the number of the map."""
    name, parts, first = watch.name_of(weight), len(weight) // layer.d_out, first_part(weight, layer.d_out)
    same = dict[bool, LayerPass]()
    for number in range(parts):
        part = first + number if layer.groups > 1 else None
        known = layer.parts[first + number] if isinstance(layer, Projection) else layer
        columns = slice(number * layer.d_out, (number + 1) * layer.d_out)
        this = LayerPass(name, known, watch.samples_first(x.detach()), part=part, shares=same.get(known.cancels))
        this.parts = layer.groups
        this.of_output = partial(_columns, watch.samples_first, columns if parts > 1 else None)
        yield name if part is None else f"{name}[{part}]", this
        same.setdefault(known.cancels, this)


def _columns(samples_first: Callable[[Tensor], Tensor], columns: slice | None, delta: Tensor) -> Tensor:
    """A derivative by what ``F.linear`` returned as one by the output of one of the maps that its weight stacked."""
    return samples_first(delta if columns is None else delta[..., columns])


class Host(NamedTuple):
    """A module that gives weights of layers to ``F.linear``.

    Attributes:
        name: Its name in the model.
        module: The module.
        layers: By the path of a weight in the module, the name of its layer; "": it is none of those that are watched.
    """

    name: str
    module: nn.Module
    layers: Mapping[str, str]

    def watch(self, hear: Hear) -> Watch:
        """A watch over one forward pass of the module. Wrappers may have replaced its parameters since the last one."""
        parameters = {path: self.module.get_parameter(path) for path in self.layers}
        positions_first = type(self.module).forward is nn.MultiheadAttention.forward
        return Watch(hear, {id(parameters[path]): name for path, name in self.layers.items()}, positions_first)


def hosts(model: nn.Module, uses: Mapping[str, tuple[str, MatrixLayer]]) -> Iterator[Host]:
    """The modules that give weights of layers to ``F.linear``. uses: by use, the layer's name and layout there."""
    names: dict[nn.Module, list[str]] = {}
    for layer_name, layer in uses.values():
        names.setdefault(layer.module, []).append(layer_name)
    for name, module in model.named_modules():
        known, own = layer_of(module), names.get(module, [])
        paths = {local: next((n for n in own if n.rpartition(".")[2] == local), "") for local in known.products()}
        for local in known.uncalled():
            child = module._modules.get(local)
            if child is not None and isinstance(child._parameters.get(WEIGHT), Tensor):
                paths[f"{local}.{WEIGHT}"] = names.get(child, [""])[0]
        if any(paths.values()):
            yield Host(name, module, paths)
