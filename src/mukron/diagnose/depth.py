"""The coordinate check of depth: how the change of features inside of residual blocks grows with their number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mukron.bars import progress_of_function
from mukron.diagnose.branches import block_calls
from mukron.diagnose.drawing import draw_slopes
from mukron.diagnose.readings import EXPONENT_TOLERANCE
from mukron.diagnose.runs import batch_device, built_optimizer, loss_of_outputs
from mukron.exponents import Exponent, fit_exponent
from mukron.notebook import Shown
from mukron.params import Parametrization, base_shapes, parametrize
from mukron.params.building import at_depth, build
from mukron.params.depth import BlockStack, block_of
from mukron.table import Table
from mukron.train.calls import call
from mukron.train.probes import Features
from mukron.train.quantities import rms_difference
from mukron.train.randomness import own_random_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANY_BLOCK = "*"  # stands for the number of a block
STREAM = "stream"
USUAL_MULTIPLES = (1, 2, 4, 8, 16)  # of the base depth


@dataclass(frozen=True, repr=False)
class DepthCheck(Shown):
    """How changes after a few steps grow with depth. Blocks of one container are taken together, as ``blocks.*``.

    Attributes:
        depths: The depths.
        exponents: The exponent of each quantity in the depth: ``features/LAYER`` is the change of a layer's output,
            ``update/PARAMETER`` the part of it that is due to one parameter, dW h, ``stream/CONTAINER`` the change of
            the residual stream after the last block, and ``output`` that of the network's output.
        tolerance: The largest exponent that still counts as zero.
        unfit: Quantities without an exponent: they stood still in some run, or were no finite numbers.

    Example:
        >>> from mukron.exponents import Exponent
        >>> DepthCheck((2, 4, 8), {"features/blocks.*.up": Exponent(0.3, 0.2, 0.4)}).ok
        False
    """

    depths: tuple[int, ...]
    exponents: Mapping[str, Exponent]
    tolerance: float = EXPONENT_TOLERANCE
    unfit: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all features inside of blocks change, and by the same amount at every depth."""
        found = self.in_blocks("features").values()
        lost = [name for name in self.unfit if name.startswith("features/") and ANY_BLOCK in name.split(".")]
        return bool(found) and not lost and all(abs(exponent.slope) <= self.tolerance for exponent in found)

    def in_blocks(self, quantity: str) -> dict[str, Exponent]:
        """The exponents of a quantity inside of blocks, by layer or parameter.

        Args:
            quantity: ``"features"`` or ``"update"``.
        """
        start = f"{quantity}/"
        return {
            name[len(start) :]: exponent
            for name, exponent in self.exponents.items()
            if name.startswith(start) and ANY_BLOCK in name.split(".")
        }

    def table(self) -> Table:
        """All exponents as a table, with their intervals of 95%."""
        rows = tuple((*_split(name), str(exponent)) for name, exponent in self.exponents.items())
        rows += tuple((*_split(name), "none: it stood still, or is no finite number") for name in self.unfit)
        depths = ", ".join(map(str, self.depths))
        note = "A slope of 0 is the same change at every depth. update: the part of a change that one parameter makes."
        return Table(f"Change against depth {depths}", ("quantity", "layer", "slope"), rows, (note,))

    def plot(self) -> Figure:
        """Draw the slope of every quantity with its interval, and the range that passes; it needs matplotlib.

        Returns:
            The figure.
        """
        return draw_slopes(self.exponents, self.tolerance, self._summary()[0])

    def _summary(self) -> list[str]:
        found = self.in_blocks("features")
        depths = ", ".join(map(str, self.depths))
        word = "OK: layers inside of blocks change alike at every depth." if self.ok else "NOT OK."
        worst = max(found, key=lambda name: abs(found[name].slope), default=None)
        lines = [] if worst is None else [f"largest slope of features inside of blocks: {worst} {found[worst]}"]
        lines += (
            [f"without a slope, since they stood still or are no finite numbers: {len(self.unfit)}"]
            if self.unfit
            else []
        )
        return [f"Change against depth {depths}", word, *lines]

    def _tables(self) -> list[Table]:
        return [self.table()]


def depth_check(
    factory: Callable[..., nn.Module],
    optimizer: Callable[[nn.Module, Parametrization], Optimizer],
    batch: tuple[Any, Any],
    *,
    base_width: float,
    base_depth: int,
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    steps: int = 1,
    scheme: str = "mup",
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    tolerance: float = EXPONENT_TOLERANCE,
    roles: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | bool | None = None,
) -> DepthCheck:
    """Train a few steps at several depths and seeds, and fit how the change of features grows with the depth.

    Keep the learning rate small: the laws are those of the first steps.

    Args:
        factory: Builds the network from ``width`` and ``depth``; it multiplies residual branches by base depth / depth.
        optimizer: Builds the optimizer from the network and its parametrization; any torch optimizer will do.
        batch: Inputs and targets, the same at every step.
        base_width: The width that settings are tuned at.
        base_depth: The depth that settings are tuned at.
        depths: The depths to compare; by default 1, 2, 4, 8 and 16 times the base depth.
        widths: The width at every depth, to let both grow; by default the base width at all.
        seeds: The number of seeds, or the seeds themselves.
        steps: The number of steps of every run.
        scheme: The parametrization.
        loss: The loss of outputs and targets.
        tolerance: The largest exponent that still counts as zero.
        roles: The roles of parameters that no known module owns, as ``base_shapes`` takes them.
        progress: Called with the number of runs that are done, the number of all runs, and what is run next. None: a
            bar on a terminal and in notebooks; False: none.

    Returns:
        The check, with the exponents of all changes.

    Raises:
        ValueError: There are fewer than two depths, or there is not one width for each.
        ParametrizationError: The network cannot be parametrized.

    Example:
        >>> import torch
        >>> from mukron.diagnose import depth_check
        >>> from mukron.models import ResidualMLP
        >>> _ = torch.manual_seed(0)
        >>> check = depth_check(
        ...     lambda width, depth: ResidualMLP(width, inputs=4, classes=3, depth=depth, base_depth=2),
        ...     lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.1)),
        ...     (torch.randn(8, 4), torch.randint(3, (8,))),
        ...     base_width=32,
        ...     base_depth=2,
        ... )
        >>> check.ok
        True
    """
    depths = [base_depth * multiple for multiple in USUAL_MULTIPLES] if depths is None else list(depths)
    widths = [base_width] * len(depths) if widths is None else list(widths)
    if len(set(depths)) < 2 or len(widths) != len(depths):
        raise ValueError(f"expected at least two depths and a width for each, got depths {depths}, widths {widths}")
    shapes = base_shapes(factory, base_width, depth=base_depth, roles=roles)
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    runs = [(depth, width, seed) for depth, width in zip(depths, widths, strict=True) for seed in seeds]
    bar = progress_of_function(progress, "depth check", lambda *standing: standing)
    with own_random_numbers(batch_device(batch)), bar as report:
        for done, (depth, width, seed) in enumerate(runs):
            if report is not None:
                report(done, len(runs), f"depth {depth}, seed {seed}")
            torch.manual_seed(seed)
            model = build(at_depth(factory, depth), width).to(batch_device(batch))
            plan = parametrize(model, shapes, scheme)
            built = built_optimizer(optimizer, model, plan)
            changes = _changes(model, built, batch, loss_of_outputs(loss), steps, shapes.stacks)
            for name, change in changes.items():
                points[name].append((depth, change))
    at_all_depths = {name: of for name, of in points.items() if {depth for depth, _ in of} == set(depths)}
    fit = [name for name, of in at_all_depths.items() if all(0 < change < math.inf for _, change in of)]
    exponents = {
        name: fit_exponent([depth for depth, _ in at_all_depths[name]], [change for _, change in at_all_depths[name]])
        for name in fit
    }
    unfit = tuple(name for name in at_all_depths if name not in fit)
    return DepthCheck(tuple(depths), exponents, tolerance, unfit)


def _changes(
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    stacks: tuple[BlockStack, ...],
) -> dict[str, float]:
    """The changes after the steps; those of blocks are one mean over their container."""
    inputs, targets = batch
    probe, before = Features(model, optimizer, inputs), block_calls(model, stacks, inputs)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss(call(model, inputs), targets))
        optimizer.step()
    changes: dict[str, list[float]] = defaultdict(list)
    for name, change in probe.read().items():
        changes[_of_any_block(name, stacks)].append(change)
    for stack, calls in block_calls(model, stacks, inputs).items():
        changes[f"{STREAM}/{stack.container}"].append(rms_difference([calls[-1][1]], [before[stack][-1][1]]))
    return {name: sum(values) / len(values) for name, values in changes.items()}


def _of_any_block(name: str, stacks: tuple[BlockStack, ...]) -> str:
    """The quantity's name with the number of its block replaced: ``update/blocks.3.up.weight`` -> ``blocks.*``."""
    quantity, layer = _split(name)
    place = block_of(layer, stacks)
    if place is None:
        return name
    rest = layer[len(_joined(place[0].container, str(place[1]))) + 1 :]
    return f"{quantity}/{_joined(place[0].container, ANY_BLOCK, rest)}"


def _split(name: str) -> tuple[str, str]:
    quantity, _, layer = name.partition("/")
    return quantity, layer


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
