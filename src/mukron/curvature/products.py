"""Linear maps that a module applies by itself: its calls of ``F.linear`` are heard of while its forward pass runs.

No hook sees them, since no module is called for them. ``F.linear`` is replaced from the start of such a forward pass
to its end, and put back then. Calls from other threads, or with other weights, are passed on as they are.

Torch's attention has [positions, samples, features] inside of ``F.multi_head_attention_forward``, whoever calls it, so
that is replaced too. Anywhere else an input has the layout of a Linear layer's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.curvature.passes import LayerPass
from mukron.layers import WEIGHT, MatrixLayer, Projection, layer_of

if TYPE_CHECKING:
    from mukron.curvature.capture import Capture

Lead = tuple[int, int]  # positions and samples
Hear = Callable[["Watch", Tensor, Tensor, Tensor], None]  # with the input, the weight and the output


class Replacement:
    """A function of ``torch.nn.functional``, replaced from the first ``begin`` to the last ``end`` of all watches."""

    def __init__(self, name: str, by: Callable[..., Any], **options: Any) -> None:
        self.name, self.original = name, getattr(F, name)
        disable: Callable[..., Any] = torch.compiler.disable
        self.by = disable(by, **options)  # in compiled models too it is plain Python
        self._is_wrapped = False  # somebody else has replaced ``by``

    def begin(self) -> None:
        current = getattr(F, self.name)
        if not (self._is_wrapped and current is not self.original):
            self.original, self._is_wrapped = current, False
            setattr(F, self.name, self.by)

    def end(self) -> None:
        if getattr(F, self.name) is self.by:
            setattr(F, self.name, self.original)
        else:  # somebody has replaced it since, by a function that may call this one
            self._is_wrapped = True


class Watch:
    """Hears of this thread's calls of ``F.linear`` from ``begin`` to ``end``.

    Attributes:
        hear: What is called, as long as it lives.
        weights: By the identity of a weight, the name of its layer; "": nobody wants to know it.
        host: The name of the module whose forward pass is watched.
    """

    active: ClassVar[threading.local] = threading.local()  # watches, and the leading sizes of attentions that run
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _running: ClassVar[int] = 0  # in all threads

    def __init__(self, hear: Hear, weights: Mapping[int, str], host: str = "") -> None:
        self.hear, self.weights, self.host = weakref.WeakMethod(hear), weights, host
        self._others: list[Watch] | None = None  # of its thread; None: it does not run

    def begin(self) -> None:
        self._others = Watch.active.__dict__.setdefault("watches", [])
        self._others.append(self)
        with Watch._lock:
            if Watch._running == 0:
                LINEAR_FUNCTION.begin()
                ATTENTION_FORWARD.begin()
            Watch._running += 1

    def end(self) -> None:
        if self._others is None:
            return
        self._others.remove(self)
        self._others = None
        with Watch._lock:
            Watch._running -= 1
            if Watch._running == 0:
                LINEAR_FUNCTION.end()
                ATTENTION_FORWARD.end()

    def heard(self, x: Tensor, weight: Tensor, output: Tensor) -> None:
        """Tell of a product, if its weight is one of the watched ones."""
        name, hear = self.weights.get(id(whole(weight))), self.hear()
        if name and hear is not None:
            hear(self, x, weight, output)

    def name_of(self, weight: Tensor) -> str:
        """The layer whose weight that is, or a part of."""
        return self.weights[id(whole(weight))]

    def samples_first(self, x: Tensor) -> Tensor:
        """An input or output of the product that is heard of as [samples, positions, features]; a view."""
        return samples_first(leading_sizes(), x)


def leading_sizes() -> Lead | None:
    """Positions and samples of the attention of torch that runs in this thread; None: there is none."""
    leads = Watch.active.__dict__.get("leads")
    return leads[-1] if leads else None


def samples_first(lead: Lead | None, x: Tensor) -> Tensor:
    """[samples, positions, features], a view, from what an attention with those leading sizes has; None: as it is."""
    if lead is None:
        return x
    if x.ndim == 2 and len(x) == lead[0] * lead[1]:
        x = x.reshape(*lead, x.shape[-1])
    return x.transpose(0, 1) if x.ndim == 3 else x


def _heard_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = LINEAR_FUNCTION.original(input, weight, bias)
    for watch in Watch.active.__dict__.get("watches", ()):
        watch.heard(input, weight, output)
    return output


def _led_attention(*arguments: Any, **options: Any) -> Any:
    query = arguments[0] if arguments else options["query"]
    leads = Watch.active.__dict__.setdefault("leads", [])
    leads.append((query.shape[0], query.shape[1] if query.ndim == 3 else 1))  # two dimensions: one sample
    try:
        return ATTENTION_FORWARD.original(*arguments, **options)
    finally:
        leads.pop()


LINEAR_FUNCTION = Replacement("linear", _heard_linear)
ATTENTION_FORWARD = Replacement("multi_head_attention_forward", _led_attention, recursive=False)


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
    same, lead = dict[bool, LayerPass](), leading_sizes()
    for number in range(parts):
        part = first + number if layer.groups > 1 else None
        known = layer.parts[first + number] if isinstance(layer, Projection) else layer
        columns = slice(number * layer.d_out, (number + 1) * layer.d_out)
        this = LayerPass(name, known, samples_first(lead, x.detach()), part=part, shares=same.get(known.cancels))
        this.parts = layer.groups
        this.of_output = partial(_columns, lead, columns if parts > 1 else None)
        yield name if part is None else f"{name}[{part}]", this
        same.setdefault(known.cancels, this)


def _columns(lead: Lead | None, columns: slice | None, delta: Tensor) -> Tensor:
    """A derivative by what ``F.linear`` returned as one by the output of one of the maps that its weight stacked."""
    return samples_first(lead, delta if columns is None else delta[..., columns])


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
        """A watch over one forward pass of the module. Wrappers may have replaced its parameters since the last one.

        Tensors that stand in for them during this pass alone (``torch.func.functional_call``) are not watched.
        """
        weights = {path: _tensor_at(self.module, path) for path in self.layers}
        known = {
            id(weights[path]): name for path, name in self.layers.items() if isinstance(weights[path], nn.Parameter)
        }
        return Watch(hear, known, self.name)


def _tensor_at(module: nn.Module, path: str) -> Any:
    owner, _, local = path.rpartition(".")
    return getattr(module.get_submodule(owner), local, None)


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


# Hooks of a capture on such modules.


def enter_host(capture: Capture, key: str, inputs: Any) -> None:
    """From here on products inside of that module are heard of."""
    if capture._running is not None and torch.is_grad_enabled():
        capture._watches.append(capture.hosts[key].watch(capture.note_product))
        capture._watches[-1].begin()


def leave_host(capture: Capture, key: str, inputs: Any, output: Any) -> None:
    """From here on only products inside of modules around that one are."""
    if any(watch.host == key for watch in capture._watches):
        end_watches(capture._watches, key)


def end_watches(watches: list[Watch], key: str | None = None) -> None:
    """All of them, or that of one module and those of modules inside of it."""
    while watches:
        watch = watches.pop()
        watch.end()
        if watch.host == key:
            break
