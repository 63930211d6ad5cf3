"""Roles that a user declares: in a call of ``base_shapes``, or once and for all on a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mukron.params.errors import ParametrizationError
from mukron.params.inventory import Found, clean_name, unwrap
from mukron.spelling import meant
from mukron.theory import Role

ATTRIBUTE = "mukron_roles"
FORM = '{"position": "input"}'


@dataclass(frozen=True)
class Declared:
    """What is declared.

    Attributes:
        roles: By parameter name.
        wrong: What is wrong with other declarations, by the name that each is for.
    """

    roles: Mapping[str, Role]
    wrong: Mapping[str, str]

    def checked(self) -> Mapping[str, Role]:
        """The roles; one error names all that is wrong."""
        if self.wrong:
            raise ParametrizationError("\n".join(self.wrong.values()))
        return self.roles


def declared_roles(
    model: nn.Module, found: Mapping[str, Found], roles: Mapping[str, Role | str] | None = None
) -> Declared:
    """The declared roles by parameter name: ``roles``, then what the model's modules declare, outer ones first."""
    if roles is not None and not isinstance(roles, Mapping):
        raise ParametrizationError(f"roles must be given by name, roles={FORM}, got {roles!r}")
    first = {alias: name for name, entry in found.items() for alias in entry.uses}
    declared: dict[str, Role] = {}
    wrong: dict[str, str] = {}
    for name, role in (roles or {}).items():
        if name not in found:
            near = meant(name, [*found], alike=0.8)
            hint = f'; did you mean "{near}"?' if near else ""
            hint = f'; it is tied to "{first[name]}": declare that' if name in first else hint
            wrong[name] = f'roles: the network has no parameter "{name}"{hint}'
        else:
            _declare(declared, wrong, name, f'parameter "{name}"', role)
    _of_modules(model, first, declared, wrong)
    return Declared(declared, wrong)


def _of_modules(model: nn.Module, first: Mapping[str, str], declared: dict[str, Role], wrong: dict[str, str]) -> None:
    """What modules declare in ``mukron_roles``, by parameter names relative to them; of a tied one any name will do."""
    for path, module in unwrap(model).named_modules():
        roles = getattr(module, ATTRIBUTE, None)
        if roles is None:
            continue
        module_name = clean_name(path)
        owner = f"{ATTRIBUTE} of {type(module).__name__}" + (f' "{module_name}"' if module_name else "")
        if not isinstance(roles, Mapping):
            raise ParametrizationError(f"{owner} must be roles by parameter name, {FORM}, got {roles!r:.80}")
        names = {local: f"{module_name}.{local}" if module_name else str(local) for local in roles}
        unknown = [local for local, name in names.items() if name not in first]
        if unknown:
            wrong[names[unknown[0]]] = f"{owner}: it has no parameter " + ", ".join(f'"{local}"' for local in unknown)
        for local, name in names.items():
            if name in first:
                _declare(declared, wrong, first[name], f'{owner}, parameter "{local}"', roles[local])


def _declare(declared: dict[str, Role], wrong: dict[str, str], name: str, where: str, role: Role | str) -> None:
    """Note a role, unless one is declared already, or that there is none of that name."""
    try:
        declared.setdefault(name, Role(role))
    except ValueError:
        known = ", ".join(repr(each.value) for each in Role)
        wrong[name] = f"{where}: unknown role {role!r}; known: {known}"
