"""Which parameters a model has, under which name, and which modules use them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

from mukron.layers import Fans, Layer, MatrixLayer, layer_of
from mukron.params.errors import ParametrizationError
from mukron.params.sharded import refuse_sharded, reshard, type_of

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
# Name segments that torch's own wrappers put inside a model, not only around it.
WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
TORCH_PARAMETRIZATIONS = "torch.nn.utils.parametrizations"  # the module of torch's own reparametrizations


@dataclass(frozen=True)
class Reparametrized:
    """The weight that a parameter is a part of, where the forward pass computes it from its parts.

    Attributes:
        layer: The name of the layer that has the weight.
        tensor: The weight's name in it.
        kinds: What computes it: "_WeightNorm".
        of_torch: Whether that is torch's own, all of which set the weight's length: they are functions of a direction.
        old: Whether it is a hook, as ``torch.nn.utils.weight_norm`` was, and no ``torch.nn.utils.parametrize``.
    """

    layer: str
    tensor: str
    kinds: str
    of_torch: bool
    old: bool = False

    @property
    def name(self) -> str:
        """The weight's full name."""
        return f"{self.layer}.{self.tensor}" if self.layer else self.tensor

    def removal(self, module: str) -> str:
        """The line that makes it a plain weight again, also on the meta device. module: an expression for the layer."""
        if "_Orthogonal" in self.kinds:
            return ""  # it has no values there
        remove = "parametrize.remove_parametrizations"
        if self.old:
            remove = "remove_weight_norm" if self.kinds == WeightNorm.__name__ else "remove_spectral_norm"
        return f'torch.nn.utils.{remove}({module}, "{self.tensor}")'


@dataclass
class Found:
    """One parameter of a model, with every place that uses it: more than one if it is tied."""

    parameter: nn.Parameter
    uses: dict[str, Fans | None]  # full name there -> its fans, None if the owner's type is not known
    owner: str  # the first owner's type, for messages
    preconditioned: bool = True  # by second-order methods, at every place that uses it, and as the same matrix there
    embedding: bool = False  # some place that uses it is an embedding
    layouts: set[tuple[Fans | None, int]] = field(default_factory=set)  # fans and groups at all these places
    of_layers: bool = True  # every place that uses it is a layer with a layout
    bare: bool = True  # no known module owns it, and its values are those that the forward pass uses
    part_of: Reparametrized | None = None  # the forward pass uses a weight that is computed from it
    matrix: bool = True  # or matrices, to methods that need gradients alone, at every place that uses it

    @property
    def sums_uses(self) -> bool:
        """Whether several layers use it as the same matrix, so that its curvature is that of all their positions."""
        alike = self.preconditioned and not self.embedding and len(self.shape) > 1
        return len(self.uses) > 1 and alike

    @property
    def ties_head(self) -> bool:
        """Whether embeddings and linear heads use it, [vocabulary, dimension], and nothing else."""
        if not (self.of_layers and self.embedding and len(self.shape) == 2):
            return False
        vocabulary, dimension = self.shape
        return self.layouts == {(Fans(1, dimension), 1), (Fans(dimension, vocabulary), 1)}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


def unwrap(model: nn.Module) -> nn.Module:
    """The model the user wrote, without DataParallel, DistributedDataParallel, AveragedModel or torch.compile."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the network, a torch.nn.Module, got {model!r:.80}")
    while True:
        if isinstance(model, WRAPPERS):
            model = model.module
            continue
        inner = next((model._modules[each] for each in WRAPPER_SEGMENTS if each in model._modules), None)
        if inner is None:
            return model
        model = inner


def inventory(model: nn.Module) -> dict[str, Found]:
    """Every parameter once, under the name the user's own model gives it."""
    own = unwrap(model)
    reshard(model)  # a parameter that was gathered for a forward pass is not the one that is trained
    refuse_sharded(model)
    found: dict[int, tuple[str, Found]] = {}
    for module_name, module in own.named_modules():
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = clean_name(f"{module_name}.{local}" if module_name else local)
            if isinstance(parameter, UninitializedParameter):
                raise ParametrizationError(
                    f'parameter "{name}" of a lazy {type(module).__name__} has no shape yet; '
                    "run one batch through the model first"
                )
            if parameter.is_complex():
                raise ParametrizationError(f'parameter "{name}" is complex; the theory covers real ones')
            _, first = found.setdefault(id(parameter), (name, Found(parameter, {}, type_of(module).__name__)))
            layer = layer_of(module)
            first.uses[name] = layer.fans(local, first.shape)
            first.layouts.add((first.uses[name], getattr(layer, "groups", 1)))
            first.of_layers &= isinstance(layer, MatrixLayer) and layer.preconditions(local)
            first.preconditioned &= layer.preconditions(local) and len(first.layouts) == 1
            is_layers = layer.preconditions(local) and len(first.shape) > 1
            first.matrix &= is_layers or layer.stacked(local, first.shape) > 0
            part_of = _part_of(module_name, module, local)
            first.part_of = first.part_of or part_of
            gain = len(first.shape) == 1 or (len(first.shape) > 2 and set(first.shape[1:]) == {1})
            first.bare &= part_of is None and (type(layer) is Layer or gain)
            first.embedding |= isinstance(layer, MatrixLayer) and layer.one_hot
    return dict(found.values())


# torch's own, by their hooks: what stands behind the weight's name in those of its parts
OLD_PARTS = {WeightNorm: ("_g", "_v"), SpectralNorm: ("_orig",)}


def _part_of(module_name: str, module: nn.Module, local: str) -> Reparametrized | None:
    """What a module's parameter is a part of."""
    if isinstance(module, ParametrizationList):
        layer, _, tensor = clean_name(module_name).rpartition(".parametrizations.")
        if not layer and clean_name(module_name).startswith("parametrizations."):
            tensor = clean_name(module_name).removeprefix("parametrizations.")
        kinds = ", ".join(type(step).__name__ for step in module)
        return Reparametrized(
            layer, tensor, kinds, any(type(step).__module__ == TORCH_PARAMETRIZATIONS for step in module)
        )
    for hook in module._forward_pre_hooks.values():
        tensor = getattr(hook, "name", "")
        if local in {f"{tensor}{end}" for end in OLD_PARTS.get(type(hook), ())}:
            return Reparametrized(clean_name(module_name), tensor, type(hook).__name__, of_torch=True, old=True)
    return None


def clean_name(name: str) -> str:
    """The name without the segments that torch's wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def pattern_of(name: str) -> str:
    """A name with ``*`` for its numbers: ``blocks.*.up``."""
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))


def on_meta(found: dict[str, Found]) -> bool:
    """Whether the parameters are without numbers, on the meta device: all of them or none."""
    meta = [name for name, entry in found.items() if entry.parameter.is_meta]
    if meta and len(meta) < len(found):
        raise ParametrizationError(f'parameter "{meta[0]}" is on the meta device and others are not; give it numbers')
    return bool(meta)


_optimizers: WeakKeyDictionary[nn.Module, weakref.ref[Any]] = WeakKeyDictionary()


def note_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Note that an optimizer without a plan trains the model, as long as it lives."""
    _optimizers[unwrap(model)] = weakref.ref(optimizer)


def optimizer_without_plan(model: nn.Module) -> str | None:
    """The kind of optimizer that trains the model without a plan; None: there is none."""
    known = _optimizers.get(unwrap(model))
    optimizer = None if known is None else known()
    return None if optimizer is None else type(optimizer).__name__
