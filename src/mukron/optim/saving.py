"""An optimizer's state as plain data, and back. What torch's hooks see is the whole of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mukron.linalg import Operator

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

FORMAT = 5  # of saved states


def complete_state(optimizer: SecondOrder, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Operators as plain data, and what is not tied to a parameter under the key "mukron"."""
    own = {
        "format": FORMAT,
        "method": type(optimizer).__name__,
        "kinds": _kinds(optimizer),
        "told": sorted(optimizer.told),
        "steps": optimizer.steps,
        "skipped": optimizer.skipped,
        "rescues": dict(optimizer.rescues),
        "waiting": optimizer.waiting,
        "reduction": optimizer.found_reduction if optimizer.steps else None,
        "class_dim": optimizer.found_class_dim,
        "generator": optimizer.generator.get_state(),
        "parametrization": None if optimizer.parametrization is None else optimizer.parametrization.to_dict(),
        "dtypes": [str(p.dtype) for group in optimizer.param_groups for p in group["params"]],
    }
    state = {index: _plain(values) for index, values in state_dict["state"].items()}
    if optimizer.exchange is not None:
        state = optimizer.exchange.whole(state)
    return {**state_dict, "state": state, "mukron": own}


def _kinds(optimizer: SecondOrder) -> dict[str, str]:
    """The options that decide what the state holds, as text, without their numbers."""
    options = optimizer.options
    text = "none" if options.trust is None else options.trust.text
    trust = text if text.startswith("graft") else text.partition(":")[0]  # a graft's state is that of its rule
    cuts = {"block": str(options.block), "split": str(sorted(options.split.items()))}
    return {"trust": trust, "memory": type(options.memory).__name__.lower(), "fallback": options.fallback.name, **cuts}


def load_state(optimizer: SecondOrder, state_dict: Mapping[str, Any]) -> None:
    """As torch's own ``load_state_dict``, with its hooks, except that states keep their dtype."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else dict(replaced)
    _check(optimizer, state_dict)
    own, groups = state_dict["mukron"], deepcopy(state_dict["param_groups"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    state = {
        parameter: _restored(state_dict["state"][index], parameter.device)
        for index, parameter in zip(indices, parameters, strict=True)
        if index in state_dict["state"]
    }
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = here["params"]
    torch.optim.Optimizer.__setstate__(optimizer, {"state": defaultdict(dict, state), "param_groups": groups})
    optimizer.exchange, optimizer.owned = None, None
    optimizer.steps, optimizer.skipped, optimizer.rescues = own["steps"], own["skipped"], Counter(own["rescues"])
    optimizer.waiting, optimizer.found_reduction, optimizer.told = own["waiting"], own["reduction"], set(own["told"])
    given = optimizer.capture_options.class_dim
    optimizer.found_class_dim = own["class_dim"] if given is None else given
    _restore_generator(optimizer.generator, own["generator"])
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check(optimizer: SecondOrder, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit, before anything is changed."""
    if "mukron" not in state_dict:
        raise ValueError(f"this state was not saved by a mukron optimizer; found keys {sorted(state_dict)}")
    own, method = state_dict["mukron"], type(optimizer).__name__
    if own.get("format") != FORMAT:
        raise ValueError(
            f"this state has format {own.get('format', 1)}, and this version of mukron reads {FORMAT}: go on with the "
            "version that saved it"
        )
    if own["method"] != method:
        raise ValueError(f"this state was saved by {own['method']}, not by {method}")
    for name, kind in _kinds(optimizer).items():
        if own["kinds"][name] != kind:
            raise ValueError(
                f"this state was saved with {name}={own['kinds'][name]}, and this optimizer has {name}={kind}: give it "
                "the same, or begin with a new state"
            )
    if (own["parametrization"] is None) != (optimizer.parametrization is None):
        raise ValueError("one of the saved state and this optimizer has a Parametrization, the other has none")
    if optimizer.parametrization is not None:
        optimizer.parametrization.check(own["parametrization"])
    saved, here = state_dict["param_groups"], optimizer.param_groups
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in here]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the saved state has parameter groups of sizes {sizes[0]}, this optimizer {sizes[1]}")
    names = {id(entry.parameter): name for name, entry in optimizer.entries.items()}
    for dtype, parameter in zip(own["dtypes"], [p for group in here for p in group["params"]], strict=True):
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


def _restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Generators of different devices keep different states: then the draws go on from a seed made of the saved one."""
    try:
        generator.set_state(state.cpu())
    except RuntimeError:
        generator.manual_seed(int(state.cpu().to(torch.int64).mul(torch.arange(1, state.numel() + 1)).sum()))


def unpickle(optimizer: SecondOrder, generator: Tensor) -> None:
    """Complete a copy: a random generator in that state on the copy's device, and a plan of the copied model."""
    optimizer._capture, optimizer.watchers, optimizer.exchange, optimizer.compared = None, [], None, None
    first = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    optimizer.generator = torch.Generator(first.device)
    optimizer.generator.set_state(generator)
    if optimizer.parametrization is not None:
        optimizer.parametrization = optimizer.parametrization.bind(optimizer.model)
