"""What is known of other people's optimizers by their class: the law of their steps, their eps, their weight decay."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from mukron.params.errors import ParametrizationError
from mukron.theory import Method

DECOUPLED = "decoupled_weight_decay"  # torch's name for it, and that of the argument of ``Parametrization.optimizer``
# Options that say whether weight decay is decoupled: torch's; pytorch_optimizer's and AdaBelief's; timm's; Prodigy's
# and D-Adaptation's; apex's and DeepSpeed's.
FLAGS = (DECOUPLED, "weight_decouple", "decoupled_decay", "decouple", "adam_w_mode")
# Those that decouple it always, without such an option.
DECOUPLING = ("torch.optim.AdamW", "torch.optim.Muon", "torch.optim.Adafactor", "pytorch_optimizer.optimizer.soap.SOAP")

# Options that say how a Muon scales a matrix by its sizes, and the names of ``scaling`` for it: torch's, which is read
# in its groups too; pytorch_optimizer's; dion's.
IN_GROUPS = "adjust_lr_fn"
OWN_SCALING: dict[str, dict[Any, str]] = {
    IN_GROUPS: {None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw"},
    "use_adjusted_lr": {False: "original", True: "match_rms_adamw"},
    "adjust_lr": {"spectral_norm": "spectral_norm", "rms_norm": "rms_norm", None: "none"},
}


def method_of_kind(kind: type[Optimizer], method: Method | str | None) -> Method | str:
    """The method whose law an optimizer follows: the given one, or that of torch's own.

    Args:
        kind: Its class.
        method: What the user has said.

    Raises:
        TypeError: It is no optimizer.
        ParametrizationError: It takes the plan itself, or its law is not known.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"expected a class of optimizers, such as torch.optim.AdamW, got {kind!r:.80}")
    if isinstance(getattr(kind, "method", None), Method):
        raise ParametrizationError(
            f"{kind.__name__} takes the plan itself: mukron.{kind.__name__}(model, p, lr=...). Schedulers keep its "
            "layers' ratios as they are"
        )
    if method is not None:
        return method
    known = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
    known |= {torch.optim.Muon: "muon"} if hasattr(torch.optim, "Muon") else {}  # from torch 2.9 on
    if kind not in known:
        raise ParametrizationError(
            f"{kind.__name__}: which law it follows is not known. Pass method=, the method whose step it takes: "
            f'"sgd" if it is proportional to the gradient, "adamw" if each entry is divided by its own size '
            '(docs/optimizers.md, "Other people\'s optimizers", lists them)'
        )
    return known[kind]


def eps_of(kind: type[Optimizer], key: str, given: float | None) -> float | None:
    """An optimizer's eps at the base width: the given one, or the default of its class.

    Args:
        kind: Its class.
        key: What the eps of its method is called.
        given: What the user has said.

    Returns:
        The eps. None: the class does not show one.

    Raises:
        ParametrizationError: Its eps is not one that follows the width, or it has none and one was given.
    """
    name = kind.__name__
    if issubclass(kind, torch.optim.Adadelta):
        raise ParametrizationError(
            f"{name}: its eps is also the length of its first steps, so that with no eps they follow the width. "
            "Use torch.optim.AdamW or torch.optim.Adagrad"
        )
    taken, all_known = _arguments(kind)
    usual = taken[key].default if key in taken else None
    number = float(usual) if isinstance(usual, Real) and not isinstance(usual, bool) else None
    if key in taken and usual is not inspect.Parameter.empty and number is None:
        raise ParametrizationError(
            f"{name}: its {key} is {usual!r}. What an eps is multiplied by at other widths is known for one number "
            "that is added to the size of a gradient. Use an optimizer that has such an eps, as torch.optim.AdamW"
        )
    if given is not None:
        if key not in taken and all_known:
            raise ParametrizationError(f"{key}={given!r}: {name} takes no {key}; leave it out")
        return given
    return number


def check_decay(
    kind: type[Optimizer], divides: bool, entries: Mapping[str, Any], options: Mapping[str, Any], declared: bool | None
) -> None:
    """Refuse weight decay that an optimizer adds to a gradient before it divides by the gradient's size.

    Args:
        kind: Its class.
        divides: Whether it divides by the size of a gradient: other steps are proportional to it.
        entries: What its groups say, beside lr, eps and weight decay.
        options: What its constructor is given.
        declared: Whether the decay is decoupled, as the user says; read where the class does not show it.

    Raises:
        ParametrizationError: The decay is not decoupled, it is not known whether it is, or there is none.
    """
    name, (taken, all_known) = kind.__name__, _arguments(kind)
    if "weight_decay" not in taken and all_known:
        raise ParametrizationError(f"{name} has no weight decay; leave weight_decay out")
    if not divides:
        return
    decoupled: bool | None
    flag = next((flag for flag in FLAGS if flag in taken), None)
    if flag is not None:
        decoupled = bool({flag: taken[flag].default, **options, **entries}[flag])
    elif any(_qualified(base) in DECOUPLING for base in kind.__mro__):
        decoupled = True
    else:  # all others of torch's are coupled
        decoupled = False if _is_torchs(kind) else declared
    if decoupled:
        return
    if decoupled is None:
        raise ParametrizationError(
            f"{name}: it is not known whether its weight decay is decoupled, w <- w - lr weight_decay w, or added to "
            "the gradient and normalized with it, where no width-independent scale exists. If it is decoupled, say so, "
            f"{DECOUPLED}=True; otherwise leave weight_decay out"
        )
    way_out = f"Pass {flag}=True" if flag else "Use an optimizer that decouples it, as torch.optim.AdamW"
    raise ParametrizationError(
        f"{name} mixes weight decay into its normalized gradient, where no width-independent scale exists. {way_out}, "
        "or leave weight_decay out"
    )


def scaling_of(kind: type[Optimizer], given: str | None, options: Mapping[str, Any]) -> str | None:
    """How a Muon scales by the sizes at hand: as its options say, which what is given must agree with.

    Args:
        kind: Its class.
        given: What the user has said.
        options: What its constructor is given.

    Returns:
        The name of its scaling. None: nothing is known, and nothing was given.

    Raises:
        ParametrizationError: The class, with these options, scales otherwise than was given.
    """
    taken = _arguments(kind)[0]
    option = next((option for option in OWN_SCALING if option in taken), None)
    if option is None:
        return given
    known = OWN_SCALING[option]
    own = known.get(options.get(option, taken[option].default))
    if given is None or own is None or given == own:
        return own if given is None else given  # an option that is none is the class's own to refuse
    if option == IN_GROUPS and option not in options and given in known.values():
        return given
    raise ParametrizationError(
        f"scaling={given!r}: {kind.__name__} with {option}={options.get(option, taken[option].default)!r} scales by "
        f"{own!r}. Leave scaling out: it is read from {option}"
    )


def takes(kind: type[Optimizer], argument: str) -> bool:
    """Whether an optimizer's constructor has an argument of that name.

    Args:
        kind: Its class.
        argument: The name.
    """
    return argument in _arguments(kind)[0]


def _arguments(kind: type[Optimizer]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Those of its constructor by name, and of its bases' as far as it hands keywords on; and whether that is all."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if base is Optimizer:
            break
        if "__init__" not in vars(base):
            continue
        own = inspect.signature(vars(base)["__init__"]).parameters
        found = {**own, **found}
        if not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in own.values()):
            return found, True
    return found, False


def _qualified(kind: type) -> str:
    """Its name with its module's: for torch's, that under which users know it."""
    return f"{'torch.optim' if _is_torchs(kind) else kind.__module__}.{kind.__qualname__}"


def _is_torchs(kind: type) -> bool:
    return getattr(torch.optim, kind.__name__, None) is kind
