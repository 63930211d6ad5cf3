"""Base shapes from a file of Microsoft's mup package (.bsh), and the network at the width at hand.

The file has the sizes of dimensions that grow, at the base width, and null for the others. What it does not have are
initial values at the base width. The package takes those of torch's linear layers and convolutions, uniform in
+-fan_in^-1/2, to be drawn so at every width, and all others to be the same at every width; so does this module, for the
layers that this is known of, and refuses the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mukron.layers import Fans, Shape, layer_of
from mukron.params.declared import declared_roles
from mukron.params.errors import ParametrizationError
from mukron.params.initial import Law, Spread, distance, may_be_default, measure
from mukron.params.inventory import Found, clean_name, inventory, on_meta, unwrap
from mukron.params.resolve import Sizes, check_names, check_shapes
from mukron.params.shapes import BaseParameter, BaseShapes
from mukron.params.sharded import whole
from mukron.theory import Role

BaseSizes = tuple[int | None, ...]  # of one parameter; None: the dimension does not grow
READOUTS = ("MuReadout", "MuSharedReadout")  # the package's output layers
FAN_IN = (nn.Linear, _ConvNd)  # layers that torch draws in +-fan_in^-1/2; not transposed convolutions, see below
CONSTANT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, _NormBase, nn.PReLU)
BSH_LINE = re.compile(r"(?P<name>[^\s:#][^:]*):(?P<rest>.*)|\s*- *(?P<entry>\w+)")


def mup_base_shapes(
    path: str | os.PathLike[str], model: nn.Module, *, roles: Mapping[str, Role | str] | None = None
) -> BaseShapes:
    """Read base shapes that ``mup.make_base_shapes`` or ``mup.set_base_shapes`` saved.

    Where there is a function that builds the network for a width, ``base_shapes`` needs no file, and no assumption on
    initial values.

    Args:
        path: The file.
        model: The network at any width from that of the file on, freshly built, with ``nn.Linear`` where it had
            ``MuReadout``. It is not changed.
        roles: As in ``base_shapes``, for parameters that no known module owns.

    Returns:
        The base shapes, for ``parametrize``.

    Raises:
        ParametrizationError: The file cannot be read or is that of another network, or initial values at the base width
            do not follow from those of the model.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> import mukron
        >>> from mukron.params import mup_base_shapes
        >>> model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> text = "0.bias: [64]\\n0.weight: [64, null]\\n2.bias: [null]\\n2.weight: [null, 64]\\n"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "mlp.bsh")
        ...     _ = path.write_text(text)
        ...     shapes = mup_base_shapes(path, model)
        >>> mukron.parametrize(model, shapes).scales("sgd")["2.weight"].lr
        0.25
    """
    found, sizes = inventory(model), read_base_sizes(path)
    _refuse_scaled(path, model, found)
    prefix = "module."  # of a model that was wrapped when the file was written
    if all(name.startswith(prefix) for name in sizes):
        sizes = {name.removeprefix(prefix): entry for name, entry in sizes.items()}
    check_names(sizes, found, "in this network", f"in {path}")
    declared = declared_roles(model, found, roles)
    owners = _owners(model)
    parameters: dict[str, BaseParameter] = {}
    problems = list(declared.wrong.values())
    for name, entry in found.items():
        with _collected(problems):
            parameters[name] = _base_parameter(name, entry, sizes, declared.roles.get(name), owners, found)
    if problems:
        raise ParametrizationError(f"{path}: " + "\n".join(problems))
    return BaseShapes(parameters)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ParametrizationError as error:
        problems.append(str(error))


def read_base_sizes(path: str | os.PathLike[str]) -> dict[str, BaseSizes]:
    """Read the sizes of a .bsh file by parameter; no YAML package is needed.

    Args:
        path: The file.

    Raises:
        ParametrizationError: It cannot be read, or is not such a file.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ParametrizationError(f"{path}: cannot be read: {error}") from error
    sizes: dict[str, list[int | None]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", "---")):
            continue
        match = BSH_LINE.fullmatch(line.rstrip())
        try:
            if match is None or (match["name"] is None and not sizes):
                raise ValueError
            if match["name"] is not None:
                sizes[match["name"].strip().strip("'\"")] = [*_entries(match["rest"].strip())]
            else:
                sizes[[*sizes][-1]].append(_entry(match["entry"]))
        except ValueError:
            raise ParametrizationError(
                f"{path}, line {number}: {line.strip()[:60]!r} is not of a file of base shapes, which has NAME: and "
                "sizes, numbers or null"
            ) from None
    if not sizes:
        raise ParametrizationError(f"{path}: there are no base shapes in this file")
    return {name: tuple(entries) for name, entries in sizes.items()}


def _entries(text: str) -> Iterator[int | None]:
    """What stands behind a name: nothing, or a list in brackets."""
    if not text:
        return
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError
    for entry in filter(None, (part.strip() for part in text[1:-1].split(","))):
        yield _entry(entry)


def _entry(text: str) -> int | None:
    return None if text in ("null", "~") else int(text)


def _refuse_scaled(path: str | os.PathLike[str], model: nn.Module, found: Mapping[str, Found]) -> None:
    """Refuse what the package has scaled already: it would be scaled twice."""
    for name, module in unwrap(model).named_modules():
        if any(cls.__name__ in READOUTS for cls in type(module).__mro__):
            raise ParametrizationError(
                f'{path}: module "{name}" is a {type(module).__name__}, which divides by the width in the forward '
                "pass; build the network with nn.Linear there, whose initial weights and learning rate do that here"
            )
    if scaled := [name for name, entry in found.items() if hasattr(entry.parameter, "infshape")]:
        raise ParametrizationError(
            f'{path}: parameter "{scaled[0]}" was given to mup.set_base_shapes, which rescales weights; build the '
            "network anew"
        )
    if on_meta(dict(found)):
        raise ParametrizationError(f"{path}: the network is on the meta device, so it has no initial values; build it")


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Of every name of a parameter, the module that owns it there, and its name in it."""
    return {
        clean_name(f"{path}.{local}" if path else local): (module, local)
        for path, module in unwrap(model).named_modules()
        for local, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _base_parameter(
    name: str,
    entry: Found,
    all_sizes: Mapping[str, BaseSizes],
    role: Role | None,
    owners: Mapping[str, tuple[nn.Module, str]],
    found: Mapping[str, Found],
) -> BaseParameter:
    sizes = all_sizes[name]
    if len(sizes) != len(entry.shape):
        raise ParametrizationError(
            f'parameter "{name}": {len(entry.shape)} dimensions here, {len(sizes)} in the file: another network?'
        )
    base, wider = _base_shape(entry.shape, sizes), _base_shape(entry.shape, sizes, 2)
    check_shapes(name, base, wider, entry.shape)
    at_base, at_twice = (
        Sizes(shape, {use: _fans(owners[use], shape) for use in entry.uses}) for shape in (base, wider)
    )
    spread, law = _at_base(name, entry, all_sizes, owners, found, constant=role is not None or base == wider)
    return BaseParameter(at_base, at_twice, role, spread, law)


def _base_shape(shape: Shape, sizes: BaseSizes, times: int = 1) -> Shape:
    """The shape at so many times the base width."""
    return tuple(here if size is None else times * size for here, size in zip(shape, sizes, strict=True))


def _fans(owner: tuple[nn.Module, str], shape: Shape) -> Fans | None:
    module, local = owner
    return layer_of(module).fans(local, shape)


def _at_base(
    name: str,
    entry: Found,
    sizes: Mapping[str, BaseSizes],
    owners: Mapping[str, tuple[nn.Module, str]],
    found: Mapping[str, Found],
    constant: bool,
) -> tuple[Spread, Law]:
    """The spread of the initial values at the base width, and the law by which they depend on the width."""
    module, _ = owners[name]
    values = whole(entry.parameter)
    spread = measure([values])
    if isinstance(module, FAN_IN) and not isinstance(module, _ConvTransposeNd):
        weight = f"{name.rpartition('.')[0]}.weight".lstrip(".")
        fans = _fans(owners[weight], tuple(found[weight].shape)) if weight in found else None
        largest = float(values.abs().max()) if values.numel() else 0.0
        if spread.std == 0:
            return spread, Law(Fraction(0))
        if fans is None or not may_be_default(
            largest, distance(values, 0.0), spread.numbers, spread, fans.fan_in, fans.fan_in
        ):
            raise ParametrizationError(_unknown(name, "its values are not those of torch's own initializer"))
        base_fans = _fans(owners[weight], _base_shape(found[weight].shape, sizes[weight]))
        assert base_fans is not None
        return replace(spread, std=spread.std * math.sqrt(fans.fan_in / base_fans.fan_in)), Law(Fraction(1, 2), weight)
    if spread.std == 0 or constant or isinstance(module, CONSTANT):
        return spread, Law(Fraction(0))
    raise ParametrizationError(_unknown(name, f"it is of a {type(module).__name__}"))


def _unknown(name: str, why: str) -> str:
    return (
        f'parameter "{name}": its initial values at the base width cannot be determined, since {why}; make base shapes '
        "from a function that builds the network, base_shapes(factory, width=...)"
    )
