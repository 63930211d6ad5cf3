"""Does a network multiply its residual branches by 1/L? Measured at two depths, since the forward pass is the user's.

The laws of depth hold for h <- h + f(h) / L in every block, L being the number of blocks over that at the base depth.
What a block adds to the residual stream is then 1/L times as large in a network that is L times as deep.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mukron.diagnose.drawing import draw_branches
from mukron.diagnose.readings import EXPONENT_TOLERANCE
from mukron.diagnose.runs import batch_device
from mukron.notebook import Shown
from mukron.params import BaseShapes, ParametrizationError, base_shapes, parametrize
from mukron.params.building import at_depth, build
from mukron.params.depth import BlockStack, block_modules, block_of
from mukron.params.inventory import unwrap
from mukron.table import Table
from mukron.train.calls import call, untouched
from mukron.train.quantities import first_tensor
from mukron.train.randomness import own_random_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS_OF_BLOCKS = 4  # of the initial weights, at each depth
DEEPER = 4  # how many times as deep the second network is, unless its depth is given
EXPECTED_EXPONENT = -1.0  # the exponent of what a block adds, if branches are multiplied by 1/L
ADVICE = (
    "The laws of depth need it: in the forward pass, multiply what each residual branch adds by base depth / depth, "
    "x = x + branch(x) * (base_depth / depth)"
)


@dataclass(frozen=True, repr=False)
class BranchCheck(Shown):
    """What a residual block adds to the residual stream, at two depths.

    Attributes:
        depths: The two depths.
        sizes: For each container of blocks the root mean square of what a block adds, at both depths.
        exponents: For each container the exponent of that size in the number of blocks: -1 if branches are multiplied
            by 1/L, 0 if they are not multiplied.
        tolerance: The largest deviation of an exponent from -1 that passes.

    Example:
        >>> check = BranchCheck((2, 8), {"blocks": (0.4, 0.1)}, {"blocks": -1.0})
        >>> check.ok
        True
    """

    depths: tuple[int, int]
    sizes: Mapping[str, tuple[float, float]]
    exponents: Mapping[str, float]
    tolerance: float = EXPONENT_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether every container's branches carry the factor 1/L."""
        return not self.failing

    @property
    def failing(self) -> tuple[str, ...]:
        """The containers whose branches do not carry it."""
        return tuple(
            container
            for container, exponent in self.exponents.items()
            if not abs(exponent - EXPECTED_EXPONENT) <= self.tolerance  # an exponent that is no number fails
        )

    def table(self) -> Table:
        """The sizes and exponents as a table."""
        rows = tuple(
            (container or "the network", *(f"{size:.3g}" for size in self.sizes[container]), f"{exponent:+.2f}", word)
            for container, exponent in self.exponents.items()
            for word in ["no factor 1/L" if container in self.failing else "multiplied by 1/L"]
        )
        columns = ("blocks", *(f"adds at depth {depth}" for depth in self.depths), "exponent", "verdict")
        return Table("What a residual block adds to the residual stream", columns, rows, () if self.ok else (ADVICE,))

    def plot(self) -> Figure:
        """Draw what blocks add against the depth, beside the law 1/L; it needs matplotlib.

        Returns:
            The figure.
        """
        return draw_branches(self.depths, self.sizes)

    def _summary(self) -> list[str]:
        title, *_ = str(self.table()).splitlines()
        if self.ok:
            return [title, "OK: every residual branch is multiplied by 1/L."]
        return [title, f"NOT OK: {', '.join(name or 'the network' for name in self.failing)}. {ADVICE}"]

    def _tables(self) -> list[Table]:
        return [self.table()]


def check_branches(
    factory: Callable[..., nn.Module],
    inputs: Any,
    *,
    base_width: float,
    base_depth: int,
    depth: int | None = None,
    roles: Mapping[str, str] | None = None,
    tolerance: float = EXPONENT_TOLERANCE,
) -> BranchCheck:
    """Measure whether a network multiplies its residual branches by base depth / depth, and warn if it does not.

    The network is built and parametrized at two depths. What a block adds to the residual stream is the difference of
    the next block's input and its own, so it does not matter whether the sum is formed inside of the block or around
    it. Where blocks start as zero, they are measured with other weights.

    Args:
        factory: Builds the network from ``width`` and ``depth``, with its multiplier.
        inputs: A tensor, a tuple of the network's arguments or a dictionary of its keyword arguments.
        base_width: The width of both networks.
        base_depth: The depth of the first network; at least 2 blocks are needed, so 1 counts as 2.
        depth: The depth of the second one; by default four times that of the first.
        roles: The roles of parameters that no known module owns, as ``base_shapes`` takes them.
        tolerance: The largest deviation of the exponent from -1 that passes.

    Returns:
        The check, with the exponent of every container of blocks.

    Raises:
        ParametrizationError: No residual blocks are found by comparing depths, or what they add cannot be measured.

    Example:
        >>> import torch
        >>> from mukron.diagnose import check_branches
        >>> from mukron.models import ResidualMLP
        >>> def network(width, depth):
        ...     return ResidualMLP(width, inputs=8, depth=depth, base_depth=2)
        >>> check = check_branches(network, torch.randn(4, 8), base_width=32, base_depth=2)
        >>> -1.25 < check.exponents["blocks"] < -0.75
        True
    """
    shapes = base_shapes(factory, base_width, depth=base_depth, roles=roles)
    first = max(base_depth, 2)
    depths = first, DEEPER * first if depth is None else depth
    if depths[0] == depths[1]:
        raise ValueError(f"depth={depth}: an exponent needs another depth than {depths[0]}")
    with own_random_numbers(batch_device((inputs, None))):
        measured = [_measure(factory, base_width, depth, shapes, inputs) for depth in depths]
    sizes = {stack.container: (measured[0][stack][0], measured[1][stack][0]) for stack in shapes.stacks}
    exponents = {
        stack.container: math.log(measured[1][stack][0] / measured[0][stack][0])
        / math.log(measured[1][stack][1] / measured[0][stack][1])
        for stack in shapes.stacks
    }
    check = BranchCheck(depths, sizes, exponents, tolerance)
    if not check.ok:
        found = ", ".join(f'"{name}" like L^{exponents[name]:+.2f}' for name in check.failing)
        warnings.warn(
            f"residual branches are not multiplied by 1/L: what a block adds changes with the number of blocks in "
            f"{found}, expected L^-1. {ADVICE}",
            UserWarning,
            stacklevel=2,
        )
    return check


def _measure(
    factory: Callable[..., nn.Module], width: float, depth: int, shapes: BaseShapes, inputs: Any
) -> dict[BlockStack, tuple[float, int]]:
    """For every container the size of what a block adds, over several draws, and the number of blocks."""
    sizes: dict[BlockStack, list[float]] = {stack: [] for stack in shapes.stacks}
    for seed in range(DRAWS_OF_BLOCKS):
        torch.manual_seed(seed)
        model = build(at_depth(factory, depth), width).to(batch_device((inputs, None)))
        parametrize(model, shapes)
        model.eval()
        streams = _streams(model, shapes.stacks, inputs)
        if any(not _added(stream) for stream in streams.values()):
            _wake(model, shapes.stacks)
            streams = _streams(model, shapes.stacks, inputs)
        for stack, stream in streams.items():
            size = _added(stream)
            if not 0 < size < math.inf:
                raise ParametrizationError(
                    f'blocks in "{stack.container}" add {size} to the residual stream, so no factor can be measured; '
                    "are they called one after another, each with the residual stream as its first argument?"
                )
            sizes[stack].append(size)
    return {stack: (sum(sizes[stack]) / DRAWS_OF_BLOCKS, len(streams[stack])) for stack in shapes.stacks}


def block_calls(
    model: nn.Module, stacks: tuple[BlockStack, ...], inputs: Any
) -> dict[BlockStack, list[tuple[Tensor, Tensor]]]:
    """For every container the input and the output of its blocks, in the order in which they are called."""
    calls: dict[BlockStack, list[tuple[Tensor, Tensor]]] = {stack: [] for stack in stacks}
    hooks = []
    for stack in stacks:

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any, stack: BlockStack = stack) -> None:
            before, after = first_tensor((args, kwargs)), first_tensor(output)
            if before is not None and after is not None:
                calls[stack].append((before.detach().clone(), after.detach().clone()))

        hooks += [block.register_forward_hook(leave, with_kwargs=True) for block in block_modules(model, stack)]
    try:
        with untouched(model):
            call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _streams(model: nn.Module, stacks: tuple[BlockStack, ...], inputs: Any) -> dict[BlockStack, list[Tensor]]:
    """For every container the inputs of its blocks: the residual stream between them."""
    streams = {stack: [before for before, _ in calls] for stack, calls in block_calls(model, stacks, inputs).items()}
    for stack, stream in streams.items():
        if len(stream) < 2 or len({tensor.shape for tensor in stream}) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in stream})
            raise ParametrizationError(
                f'blocks in "{stack.container}" were called {len(stream)} times with inputs of shapes {shapes}; what a '
                "block adds is measured between two blocks that are called with inputs of one shape"
            )
    return streams


def _added(stream: list[Tensor]) -> float:
    """The root mean square of what a block adds: the next block's input without its own."""
    squares = [(after.double() - before.double()).square().mean() for before, after in pairwise(stream)]
    return float(torch.stack(squares).mean().sqrt())


@torch.no_grad()
def _wake(model: nn.Module, stacks: tuple[BlockStack, ...]) -> None:
    """Give weights, gates and biases of blocks that start at zero another value, the same law at every depth."""
    for name, parameter in unwrap(model).named_parameters():
        if block_of(name, stacks) is not None and not parameter.any():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.fill_(1.0)
