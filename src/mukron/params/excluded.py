"""What ``exclude=`` names: layers by name, by a pattern, or by the type of their modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import nn

from mukron.params.inventory import clean_name, unwrap

if TYPE_CHECKING:
    from mukron.params.parameter_plan import ParameterPlan

Excluded = str | type[nn.Module]
NEAR_NAMES = 4  # how many names an error proposes


def covers(entry: Excluded, name: str) -> bool:
    """Whether an entry names a module or parameter, or a module that it is in.

    Args:
        entry: A name or a pattern: ``*`` stands for any text, dots included, ``?`` for a character, ``[0-3]`` for one
            of these and ``{q,k}`` for one of these texts. Types are turned into names before, by ``without_types``.
        name: The name of the module or parameter.
    """
    if not isinstance(entry, str):
        return False
    if name == entry or name.startswith(f"{entry}."):
        return True
    return is_pattern(entry) and _matches(entry, name)


@lru_cache(maxsize=100_000)
def _matches(entry: str, name: str) -> bool:
    parts = name.split(".")
    around = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return any(fnmatchcase(place, pattern) for pattern in _alternatives(entry) for place in around)


def is_pattern(entry: str) -> bool:
    """Whether a text may stand for several names."""
    return any(character in entry for character in "*?[{")


def _alternatives(pattern: str) -> Iterator[str]:
    """A pattern without braces for each of the texts in them."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        yield pattern
        return
    for text in braces[1].split(","):
        yield from _alternatives(pattern[: braces.start()] + text.strip() + pattern[braces.end() :])


def check_form(exclude: object) -> None:
    """Refuse what is no collection of names, patterns and types.

    Args:
        exclude: What was given; None is allowed.

    Raises:
        ValueError: It is a text, whose letters would be taken for names.
        TypeError: It is anything else.
    """
    if isinstance(exclude, str):
        raise ValueError(f'exclude takes several names: exclude=("{exclude}",)')
    entries = () if exclude is None else exclude
    if not isinstance(entries, Iterable) or not all(_names_layers(entry) for entry in entries):
        raise TypeError(
            'exclude takes names of layers, patterns and types of modules, as in exclude=("head", "*.qkv", '
            f"nn.Conv2d); got {exclude!r:.80}"
        )


def _names_layers(entry: object) -> bool:
    return isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))


def without_types(model: nn.Module, exclude: Collection[Excluded] | None) -> tuple[str, ...] | None:
    """The same with the names of all modules of a type, or of one derived from it, instead of the type.

    Args:
        model: The model.
        exclude: Names, patterns and types.

    Raises:
        ValueError: The model has no module of such a type.
    """
    if exclude is None:
        return None
    names: dict[str, None] = {}
    for entry in exclude:
        of_type = [entry] if isinstance(entry, str) else _modules_of(unwrap(model), entry)
        names |= dict.fromkeys(name for name in of_type if isinstance(entry, str) or not _inside(name, names))
    return tuple(names)


def _modules_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    found = [clean_name(name) for name, module in model.named_modules() if isinstance(module, kind)]
    if not found:
        types = dict.fromkeys(type(module).__name__ for module in model.modules())
        raise ValueError(f"exclude: the model has no module of type {kind.__name__}; its types: {', '.join(types)}")
    if "" not in found:
        return found
    parts = [*dict(model.named_children()), *dict(model.named_parameters(recurse=False))]  # the model itself
    return list(dict.fromkeys(clean_name(part) for part in parts))


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def check_excluded(
    exclude: Collection[Excluded] | None,
    modules: Collection[str],
    parameters: Collection[str],
    others: Collection[str] = (),
) -> None:
    """Refuse entries that name nothing.

    Args:
        exclude: Names and patterns.
        modules: The names of the model's modules.
        parameters: The names of parameters that may be named too.
        others: The names of parameters that only patterns may stand for.

    Raises:
        ValueError: A name is none of them, or a pattern matches none. Near names are proposed.
    """
    known = [name for name in (*modules, *parameters) if name]
    for entry in exclude or ():
        if not isinstance(entry, str) or entry in known:
            continue
        if is_pattern(entry) and any(covers(entry, name) for names in (known, others) for name in names):
            continue
        what = f'the pattern "{entry}" matches no module of the model' if is_pattern(entry) else None
        what = what or f'the model has no module "{entry}"'
        of_that_name = [name for name in known if name.endswith(f".{entry}")]
        near = (of_that_name or difflib.get_close_matches(entry, known, n=NEAR_NAMES))[:NEAR_NAMES]
        if near:
            raise ValueError(f"exclude: {what}; did you mean {', '.join(map(repr, near))}?")
        listed = [name for name in modules if name]
        more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
        raise ValueError(f"exclude: {what}; its modules: {', '.join(listed[:12])}{more}")


def names_excluded(
    exclude: Collection[Excluded] | None, parameters: Mapping[str, ParameterPlan], model: Callable[[], nn.Module]
) -> tuple[str, ...] | None:
    """Names and patterns, checked against a model of which the parameters are known.

    Args:
        exclude: Names, patterns and types.
        parameters: All parameters, by name.
        model: Gives the model; it is called if there are types.
    """
    check_form(exclude)
    if exclude is None:
        return None
    names = [use for name, plan in parameters.items() for use in (name, *plan.tied)]
    if not all(isinstance(entry, str) for entry in exclude):
        exclude = without_types(model(), exclude) or ()
    parts = [name.split(".") for name in names]
    modules = dict.fromkeys(".".join(segments[:k]) for segments in parts for k in range(1, len(segments)))
    check_excluded(exclude, modules, names)
    return tuple(entry for entry in exclude if isinstance(entry, str))
