"""An optimizer's state as plain data, and back, through ``state_dict`` and through torch's distributed checkpoints.

Of every parameter these are saved:

    steps    the number of steps, a tensor
    kept     a ``Bundle`` of the parameter's state: factors, inverses, momentum, moments
    mukron   a ``Bundle`` of what is not tied to a parameter (counters, generator, plan), and of what frozen parameters
             keep, which torch does not load; empty but for one parameter

torch's distributed checkpoints pass on states and groups of parameters alone, ask for the names that a state has now
before they load it, and want every tensor to have the size that it will have. So all parameters have the same three
names from the start, and what has no size before the first batch is in a ``Bundle``.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mukron.curvature import local
from mukron.damping import Rule
from mukron.linalg import Operator
from mukron.optim.exchange import SAVED_NAMES, Way
from mukron.optim.processes import exchange_of
from mukron.optim.shards import parts_of_state
from mukron.params.sharded import is_sharded

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

FORMAT = 6  # of saved states
BUNDLED = ("damping_rule", "adaptive")  # entries of a parameter group that are no numbers


class Bundle(float):
    """Plain data of any form and size in one value, which torch's checkpoints take for a number and pass on whole.

    Pickled, it becomes a tensor of bytes, which ``torch.load`` reads with ``weights_only=True``; ``opened`` takes both.

    Attributes:
        content: Dictionaries, lists, tensors, numbers and text.

    Example:
        >>> Bundle({"momentum_buffer": torch.zeros(2)}) == Bundle({"momentum_buffer": torch.zeros(2)})
        True
    """

    content: Any

    def __new__(cls, content: Any) -> Bundle:
        bundle = super().__new__(cls, 0.0)
        bundle.content = content
        return bundle

    def __reduce_ex__(self, protocol: Any) -> Any:
        file = io.BytesIO()
        torch.save(_each_tensor(self.content, _compact), file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Bundle:
        return Bundle(deepcopy(self.content, memo))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bundle) and _same(self.content, other.content)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__

    def __repr__(self) -> str:
        return f"Bundle({self.content!r:.200})"


def opened(value: Any) -> Any:
    """The content of a bundle, or of the tensor of bytes that it was saved as."""
    if isinstance(value, Bundle):
        return value.content
    if isinstance(value, Tensor):
        return torch.load(io.BytesIO(value.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    return value


def reserve(optimizer: SecondOrder) -> None:
    """Give every parameter's state the names under which it is saved, which is what torch looks for to load them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(dict.fromkeys(SAVED_NAMES, 0))


def initializes_state(optimizer: SecondOrder, closure: Callable[[], Any] | None) -> bool:
    """Whether a first step is there to make a state to load into: no pass, and zero gradients and learning rates.

    torch's distributed checkpoints take such a step where there is no state.
    """
    if closure is not None or optimizer.capture.passes:
        return False
    if any(float(group["lr"]) != 0 for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(gradient.is_sparse or bool(local(gradient).any()) for gradient in gradients)


# Saving.


def complete_state(optimizer: SecondOrder, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state by parameter, each with the same names, and groups without dictionaries in them."""
    parameters = _parameters(optimizer)
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    holder = next((parameter for parameter in parameters if parameter.requires_grad), parameters[0])
    told: dict[str, dict[str, Any]] = {
        "told": dict.fromkeys(sorted(optimizer.told), True),
        "rescues": dict(optimizer.rescues),
    }
    kept: dict[Any, dict[str, Any]] = {number: _kept(optimizer, p) for number, p in enumerate(parameters)}
    kept.update(told)
    record = _record(optimizer)
    exchange = optimizer.exchange or (exchange_of(optimizer) if _in_parts(optimizer) else None)
    if exchange is not None:
        kept = exchange.whole(kept)
    frozen = {number: kept[number] for number, parameter in enumerate(parameters) if not parameter.requires_grad}
    # what frozen parameters keep is the curvature of a layer whose bias alone is trained
    record |= {"told": [*kept["told"]], "rescues": kept["rescues"], "frozen": frozen}
    state = {
        index: {
            "steps": torch.tensor([optimizer.steps], device=parameter.device),
            "kept": Bundle(kept[number] if parameter.requires_grad else {}),
            "mukron": Bundle(record if parameter is holder else {}),
        }
        for number, (index, parameter) in enumerate(zip(indices, parameters, strict=True))
    }
    return {**state_dict, "state": state, "param_groups": [_saved_group(group) for group in state_dict["param_groups"]]}


def _parameters(optimizer: SecondOrder) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _in_parts(optimizer: SecondOrder) -> bool:
    """Whether other processes have some of the state, also of an optimizer that has just been loaded or copied."""
    spread = any(map(is_sharded, _parameters(optimizer))) and bool(optimizer.steps + optimizer.skipped)
    return spread or optimizer.together.owned is not None


def _kept(optimizer: SecondOrder, parameter: Parameter) -> dict[str, Any]:
    """A parameter's state; a buffer that steps change in place is copied, for a file that is written meanwhile."""
    kept = {name: value for name, value in optimizer.state[parameter].items() if name not in SAVED_NAMES}
    if "momentum_buffer" in kept:
        kept["momentum_buffer"] = kept["momentum_buffer"].clone()
    plain: dict[str, Any] = _plain(kept)
    return plain


def _record(optimizer: SecondOrder) -> dict[str, Any]:
    """What is not tied to a parameter, and is the same on every rank."""
    return {
        "format": FORMAT,
        "method": type(optimizer).__name__,
        "kinds": _kinds(optimizer),
        "skipped": optimizer.skipped,
        "waiting": optimizer.waiting,
        "reduction": optimizer.found_reduction if optimizer.steps else None,
        "class_dim": optimizer.found_class_dim,
        "generator": optimizer.generator.get_state(),
        "parametrization": None if optimizer.parametrization is None else optimizer.parametrization.to_dict(),
        "dtypes": [str(parameter.dtype) for parameter in _parameters(optimizer)],
        "schemes": {name: list(scheme) for name, scheme in optimizer.together.schemes.items()},
    }


def _kinds(optimizer: SecondOrder) -> dict[str, str]:
    """The options that decide what the state holds, as text, without their numbers."""
    options = optimizer.options
    text = "none" if options.trust is None else options.trust.text
    trust = text if text.startswith("graft") else text.partition(":")[0]  # a graft's state is that of its rule
    cuts = {"block": str(options.block), "split": str(sorted(options.split.items()))}
    return {"trust": trust, "memory": type(options.memory).__name__.lower(), "fallback": options.fallback.name, **cuts}


def _saved_group(group: Mapping[str, Any]) -> dict[str, Any]:
    saved, damping = dict(group), group.get("damping")
    if isinstance(damping, Rule):  # a group may be given another rule at any time
        saved |= {"damping": damping.rho, "damping_rule": damping.plain()}
    return saved | {name: Bundle(deepcopy(saved[name])) for name in BUNDLED if name in saved}


# Loading.


def load_state(optimizer: SecondOrder, state_dict: Mapping[str, Any]) -> None:
    """As torch's own ``load_state_dict``, with its hooks, except that states keep their dtype."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else dict(replaced)
    record, steps = _find_record(state_dict)
    _check(optimizer, record, state_dict["param_groups"])
    groups = [_loaded_group(group) for group in state_dict["param_groups"]]
    indices = [index for group in groups for index in group["params"]]
    kept = [opened(state_dict["state"].get(index, {}).get("kept", {})) for index in indices]
    entries = {entry.parameter: entry for entry in optimizer.entries.values()}
    state = {
        parameter: parts_of_state(entries[parameter], _restored(record["frozen"].get(k) or kept[k], parameter.device))
        for k, parameter in enumerate(_parameters(optimizer))
    }
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = here["params"]
    torch.optim.Optimizer.__setstate__(optimizer, {"state": defaultdict(dict, state), "param_groups": groups})
    reserve(optimizer)
    optimizer.exchange, optimizer.together.owned = None, None
    optimizer.steps, optimizer.skipped, optimizer.rescues = steps, record["skipped"], Counter(record["rescues"])
    optimizer.waiting, optimizer.found_reduction = record["waiting"], record["reduction"]
    optimizer.together.schemes = {name: Way(*scheme) for name, scheme in record["schemes"].items()}
    optimizer.told, given = set(record["told"]), optimizer.capture_options.class_dim
    optimizer.found_class_dim = record["class_dim"] if given is None else given
    _restore_generator(optimizer.generator, record["generator"])
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _find_record(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """What is not tied to a parameter, and the number of steps."""
    if "mukron" in state_dict:
        _refuse_format(state_dict["mukron"])
    for values in state_dict.get("state", {}).values():
        if isinstance(values, Mapping) and (record := opened(values.get("mukron", {}))):
            _refuse_format(record)
            return record, int(values["steps"])
    raise ValueError(f"this state was not saved by a mukron optimizer; found keys {sorted(state_dict)}")


def _refuse_format(record: Mapping[str, Any]) -> None:
    if record.get("format") != FORMAT:
        raise ValueError(
            f"this state has format {record.get('format', 1)}, and this version of mukron reads {FORMAT}: go on with "
            "the version that saved it"
        )


def _loaded_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(opened(value) if name in BUNDLED else value) for name, value in group.items()}


def _check(optimizer: SecondOrder, record: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state that does not fit, before anything is changed."""
    method = type(optimizer).__name__
    if record["method"] != method:
        raise ValueError(f"this state was saved by {record['method']}, not by {method}")
    for name, kind in _kinds(optimizer).items():
        if record["kinds"][name] != kind:
            raise ValueError(
                f"this state was saved with {name}={record['kinds'][name]}, and this optimizer has {name}={kind}: give "
                "it the same, or begin with a new state"
            )
    if (record["parametrization"] is None) != (optimizer.parametrization is None):
        raise ValueError("one of the saved state and this optimizer has a Parametrization, the other has none")
    if optimizer.parametrization is not None:
        optimizer.parametrization.check(record["parametrization"])
    here = optimizer.param_groups
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in here]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the saved state has parameter groups of sizes {sizes[0]}, this optimizer {sizes[1]}")
    names = {id(entry.parameter): name for name, entry in optimizer.entries.items()}
    for dtype, parameter in zip(record["dtypes"], [p for group in here for p in group["params"]], strict=True):
        if ("float64" in dtype) != (parameter.dtype == torch.float64):
            raise ValueError(
                f'parameter "{names[id(parameter)]}" is {parameter.dtype} here and was {dtype} when the state was '
                "saved: continue in that precision, or begin with a new optimizer"
            )


def _plain(value: Any) -> Any:
    """Operators as dictionaries of tensors and numbers."""
    if isinstance(value, Operator):
        return _plain(value.state())
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _restored(value: Any, device: torch.device) -> Any:
    """The inverse of ``_plain``, on that device; tensors are copies."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        restored = {key: _restored(part, device) for key, part in value.items()}
        return Operator.from_state(restored) if "kind" in restored else restored
    return [_restored(part, device) for part in value] if isinstance(value, list) else value


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested data with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(part, change) for key, part in value.items()}
    return [_each_tensor(part, change) for part in value] if isinstance(value, list) else value


def _compact(tensor: Tensor) -> Tensor:
    """On the CPU, and with no more memory behind it than it shows: files hold all of that."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.detach().cpu() if whole else tensor.detach().cpu().clone()


def _same(a: Any, b: Any) -> bool:
    """Whether nested data are equal, bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Generators of different devices keep different states: then the draws go on from a seed made of the saved one."""
    try:
        generator.set_state(state.cpu())
    except RuntimeError:
        generator.manual_seed(int(state.cpu().to(torch.int64).mul(torch.arange(1, state.numel() + 1)).sum()))


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Of its first parameter."""
    device: torch.device = next(parameter for group in optimizer.param_groups for parameter in group["params"]).device
    return device


def unpickle(optimizer: SecondOrder, generator: Tensor) -> None:
    """Complete a copy: a random generator in that state on the copy's device, and a plan of the copied model."""
    optimizer._capture, optimizer.watchers, optimizer.exchange = None, [], None
    optimizer.generator = torch.Generator(device_of(optimizer))
    optimizer.generator.set_state(generator)
    if optimizer.parametrization is not None:
        optimizer.parametrization = optimizer.parametrization.bind(optimizer.model)
