"""Roles that a user declares: in a call of ``base_shapes``, or once and for all on a module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mukron.params.errors import ParametrizationError
from mukron.params.inventory import Found, clean_name, unwrap
from mukron.theory import Role

ATTRIBUTE = "mukron_roles"
FORM = '{"position": "input"}'


def declared_roles(
    model: nn.Module, found: Mapping[str, Found], roles: Mapping[str, Role | str] | None = None
) -> dict[str, Role]:
    """The declared roles by parameter name: ``roles``, then what the model's modules declare, outer ones first."""
    if roles is not None and not isinstance(roles, Mapping):
        raise ParametrizationError(f"roles must be given by name, roles={FORM}, got {roles!r}")
    first = {alias: name for name, entry in found.items() for alias in entry.uses}
    declared = {name: _role(f'parameter "{name}"', role) for name, role in (roles or {}).items()}
    for name in declared:
        if name not in found:
            hint = f'; it is tied to "{first[name]}": declare that' if name in first else ""
            raise ParametrizationError(f'roles: the network has no parameter "{name}"{hint}')
    for name, role in _of_modules(model, first).items():
        declared.setdefault(name, role)
    return declared


def _of_modules(model: nn.Module, first: Mapping[str, str]) -> dict[str, Role]:
    """What modules declare in ``mukron_roles``, by parameter names relative to them; of a tied one any name will do."""
    declared: dict[str, Role] = {}
    for path, module in unwrap(model).named_modules():
        roles = getattr(module, ATTRIBUTE, None)
        if roles is None:
            continue
        module_name = clean_name(path)
        owner = f"{ATTRIBUTE} of {type(module).__name__}" + (f' "{module_name}"' if module_name else "")
        if not isinstance(roles, Mapping):
            raise ParametrizationError(f"{owner} must be roles by parameter name, {FORM}, got {roles!r:.80}")
        names = {local: f"{module_name}.{local}" if module_name else str(local) for local in roles}
        unknown = [f'"{local}"' for local, name in names.items() if name not in first]
        if unknown:
            raise ParametrizationError(f"{owner}: it has no parameter {', '.join(unknown)}")
        for local, name in names.items():
            declared.setdefault(first[name], _role(f'{owner}, parameter "{local}"', roles[local]))
    return declared


def _role(where: str, role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError:
        known = ", ".join(repr(each.value) for each in Role)
        raise ParametrizationError(f"{where}: unknown role {role!r}; known: {known}") from None
