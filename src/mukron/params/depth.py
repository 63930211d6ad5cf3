"""Residual blocks: which parameters a deeper network has more of, and which block at the base depth each one is like.

A network is compared with itself at twice the depth, by parameter name. Where names such as ``blocks.4.mlp.weight`` are
added, ``blocks`` is a container whose numbered entries are residual blocks. Nothing else may differ: what depth adds
outside of a numbered container, and what it renames or reshapes, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from mukron.layers import Shape
from mukron.params.errors import ParametrizationError
from mukron.params.inventory import Found, clean_name, unwrap
from mukron.params.resolve import listed

OWN_CONTAINER = (
    "Depth may only add numbered entries at the end of a container. Put the blocks into an nn.ModuleList or "
    "nn.Sequential of their own, with nothing after them"
)

EntryShapes = Mapping[str, Shape]  # the parameters of one entry of a container: relative name -> shape


@dataclass(frozen=True)
class BlockStack:
    """A container of residual blocks, of which there are more the deeper the network is.

    Attributes:
        container: The name of the container; "" if it is the network itself.
        blocks: The numbers of its blocks at the base depth.
        others: The numbers of its entries that are no blocks, such as an embedding before them.

    Example:
        >>> BlockStack("blocks", (0, 1)).number("blocks.5.mlp.weight")
        5
    """

    container: str
    blocks: tuple[int, ...]
    others: tuple[int, ...] = ()

    def number(self, name: str) -> int | None:
        """The number of the block that a parameter is in, at any depth; None: it is in no block of this container.

        Args:
            name: The parameter's name.
        """
        place = _place(name, self.container)
        return None if place is None or place[0] in self.others else place[0]

    def renamed(self, name: str, old: int, new: int) -> str:
        """The name of the same parameter of another block; names of other parameters stay as they are.

        Args:
            name: The parameter's name.
            old: The number of its block.
            new: The number of the other block.
        """
        place = _place(name, self.container)
        return name if place is None or place[0] != old else _joined(self.container, new, place[1])


@dataclass(frozen=True)
class Match:
    """The parameter at the base depth that a parameter of another network is like.

    Attributes:
        base: Its name at the base depth.
        L: The number of blocks here over that at the base depth; None: it is in no residual block.
        stack: The container of its block.
        old: The number of the block at the base depth.
        new: The number of the block here.
    """

    base: str
    L: Fraction | None = None
    stack: BlockStack | None = None
    old: int = 0
    new: int = 0

    def here(self, name: str) -> str:
        """The name, in this block here, of what has that name in the block at the base depth."""
        return name if self.stack is None else self.stack.renamed(name, self.old, self.new)


def find_stacks(
    base: Mapping[str, Found], deeper: Mapping[str, Found], depth: int, deep: int
) -> tuple[BlockStack, ...]:
    """Find the containers of residual blocks from the parameters at two depths.

    Args:
        base: The parameters at the base depth.
        deeper: The parameters of the deeper network.
        depth: The base depth, for messages.
        deep: The other depth, for messages.
    """
    gone = [name for name in base if name not in deeper]
    if gone:
        raise ParametrizationError(
            f"parameter {listed(gone)} exists at depth {depth} but not at depth {deep}. {OWN_CONTAINER}"
        )
    reshaped = [name for name in base if base[name].shape != deeper[name].shape]
    if reshaped:
        here, there = (list(network[reshaped[0]].shape) for network in (base, deeper))
        raise ParametrizationError(
            f"parameter {listed(reshaped)} has the shape {here} at depth {depth} and {there} at depth {deep}. "
            f"{OWN_CONTAINER}"
        )
    added = [name for name in deeper if name not in base]
    if not added:
        raise ParametrizationError(
            f"the network has the same parameters at depth {depth} and at depth {deep}; does the factory use its depth?"
        )
    known = {prefix for name in base for prefix in _prefixes(name)}
    containers = list(dict.fromkeys(_container(name, known, depth, deep) for name in added))
    for outer in containers:
        for inner in containers:
            if inner != outer and _place(f"{inner}.0", outer) is not None:
                raise ParametrizationError(
                    f'containers "{outer}" and "{inner}" within it both have more entries at depth {deep} than at '
                    f"depth {depth}. The laws of depth are about one number of blocks: let depth change one of the two"
                )
    stacks = tuple(_stack(container, base, deeper, depth) for container in containers)
    _refuse_ties(deeper, stacks)
    return stacks


def block_of(name: str, stacks: Iterable[BlockStack]) -> tuple[BlockStack, int] | None:
    """The container and the number of the residual block that a parameter is in; None: it is in none."""
    for stack in stacks:
        if (number := stack.number(name)) is not None:
            return stack, number
    return None


def block_modules(model: nn.Module, stack: BlockStack) -> list[nn.Module]:
    """The residual blocks of a container, at whatever depth the network has."""
    named = ((name.rpartition("."), module) for name, module in unwrap(model).named_modules() if name)
    return [
        module
        for (container, _, number), module in named
        if clean_name(container) == stack.container and number.isdecimal() and int(number) not in stack.others
    ]


def matches(base: Mapping[str, Shape], here: Mapping[str, Shape], stacks: Iterable[BlockStack]) -> dict[str, Match]:
    """For every parameter here the one at the base depth that it is like; what matches nothing is left out.

    A block takes the place of the block of its number, or where there is none of the one that the blocks at the base
    depth, repeated, have there. It must have the same parameters.

    Args:
        base: The shapes at the base depth, by name.
        here: The shapes of the network at hand, by name.
        stacks: The containers of residual blocks.
    """
    found = {name: Match(name) for name in here if name in base}
    for stack in stacks:
        kinds = {number: _kind(entry) for number, entry in _entries(base, stack.container).items()}
        blocks = {
            number: entry
            for number, entry in sorted(_entries(here, stack.container).items())
            if number not in stack.others
        }
        L = Fraction(len(blocks), len(stack.blocks))
        for position, (number, entry) in enumerate(blocks.items()):
            likely = [number, stack.blocks[position % len(stack.blocks)], *stack.blocks]
            like = next((old for old in likely if old in stack.blocks and kinds[old] == _kind(entry)), None)
            if like is None:
                raise ParametrizationError(
                    f'block "{_joined(stack.container, number)}" has the parameters {", ".join(sorted(entry))}, and no '
                    "block at the base depth has the same ones; both must be the same network at two depths"
                )
            for rest in entry:
                name = _joined(stack.container, number, rest)
                found[name] = Match(_joined(stack.container, like, rest), L, stack, like, number)
    return found


def _container(name: str, known: set[str], depth: int, deep: int) -> str:
    """The container that an added parameter is a new entry of."""
    segments = name.split(".")
    for position, segment in enumerate(segments):
        if ".".join(segments[: position + 1]) not in known:
            if segment.isdecimal():
                return ".".join(segments[:position])
            break
    raise ParametrizationError(
        f'parameter "{name}" exists at depth {deep} but not at depth {depth}, and is in no new entry of a numbered '
        f"container, as blocks.{depth}.weight would be. {OWN_CONTAINER}"
    )


def _stack(container: str, base: Mapping[str, Found], deeper: Mapping[str, Found], depth: int) -> BlockStack:
    """Tell blocks from other entries: a block has what some added entry has; what shares no name with any is none."""
    before, after = (
        _entries({name: found.shape for name, found in network.items()}, container) for network in (base, deeper)
    )
    added = [entry for number, entry in after.items() if number not in before]
    blocks = tuple(sorted(n for n, entry in before.items() if any(new.items() <= entry.items() for new in added)))
    others = tuple(sorted(n for n, entry in before.items() if not any(set(new) & set(entry) for new in added)))
    unclear = [_joined(container, number) for number in sorted(before) if number not in (*blocks, *others)]
    if unclear or not blocks:
        raise ParametrizationError(
            f'depth adds entries to the container "{container}", but its {listed(unclear or [container])} at depth '
            f"{depth} does not have the parameters of the added ones, so it is not clear whether it is a residual "
            "block. Put the blocks into a container of their own, with nothing else in it"
        )
    return BlockStack(container, blocks, others)


def _refuse_ties(found: Mapping[str, Found], stacks: tuple[BlockStack, ...]) -> None:
    for name, entry in found.items():
        if len({block_of(use, stacks) for use in entry.uses}) > 1:
            raise ParametrizationError(
                f'parameter "{name}" is also {", ".join(use for use in entry.uses if use != name)}: the gradient of a '
                "weight that several residual blocks share, or a block and the rest, follows no single law of depth; "
                "untie it"
            )


def _entries(shapes: Mapping[str, Shape], container: str) -> dict[int, dict[str, Shape]]:
    entries: dict[int, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if (place := _place(name, container)) is not None:
            entries.setdefault(place[0], {})[place[1]] = shape
    return entries


def _kind(entry: EntryShapes) -> dict[str, int]:
    """What two blocks of one kind share at any width: the names of their parameters, and their dimensions."""
    return {name: len(shape) for name, shape in entry.items()}


def _place(name: str, container: str) -> tuple[int, str] | None:
    """The number of a container's entry that the name is in, and the name within that entry."""
    if container and not name.startswith(f"{container}."):
        return None
    number, _, rest = (name[len(container) + 1 :] if container else name).partition(".")
    plain = number.isdecimal() and str(int(number)) == number  # "00" is a name
    return (int(number), rest) if plain and rest else None


def _joined(*parts: str | int) -> str:
    return ".".join(str(part) for part in parts if part != "")


def _prefixes(name: str) -> Iterator[str]:
    segments = name.split(".")
    return (".".join(segments[: length + 1]) for length in range(len(segments)))
