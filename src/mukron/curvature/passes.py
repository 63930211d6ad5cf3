"""What one forward pass shows of every layer, and how the passes of a step add up.

    H  inputs as rows [groups, N, d_in]     D  the loss's derivatives as rows [groups, N, d_out]
    A  = s sum of h h^T / samples            B  = mean of delta delta^T over rows, delta the Fisher signals

s is the scale of the user's loss, 1 for a mean over samples (``curvature.scale``). A position whose loss does not
depend on the output (padding, an ignored target) counts in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mukron.curvature.derivatives import OfDelta, finish, join_halves, take_shared, with_derivatives
from mukron.curvature.fisher import CaptureOptions
from mukron.curvature.forms import AUTO, MATRIX, ROWS, as_rows, keeps_halves, rows_wait
from mukron.curvature.frequencies import Frequencies, add_indices
from mukron.curvature.ignored import Ignored
from mukron.curvature.records import Recorded
from mukron.curvature.stacking import TIED_HEAD, Halves, Jacobian, Stacking, merged, of_all_kinds, summed
from mukron.layers import MatrixLayer
from mukron.linalg import Factor, LowRank, MatrixFactor, RowsFactor, products_of, total_count

AS_THEY_ARE = nullcontext()  # products of the precision that torch has
Kinds = dict[str, dict[int, "LayerStatistics"]]  # by layer and kind of use of its weight
Samples = dict[str, float | Tensor]  # that count, by layer


class Accumulator:
    """The sum of x x^T over all rows x, divided by a count: rows while they are few, a matrix once they are many."""

    def __init__(self, d: int, other: int, form: str = AUTO) -> None:
        self.d, self.other, self.form = d, other, form
        self.rows, self.counts = list[Tensor](), tuple[float | Tensor, ...]()  # counts by pass
        self.parts: list[Tensor] = []  # matrices, one for each pass: their sum is made when it is wanted

    @property
    def matrix(self) -> Tensor | None:
        """The sum, if it is held as a matrix."""
        if len(self.parts) > 1:
            self.parts = [reduce(torch.add, self.parts)]
        return self.parts[0] if self.parts else None

    def add(self, X: Tensor, count: float | Tensor | None) -> None:
        """X [groups, N, d]; None: they were counted before."""
        self.rows.append(X)
        self.counts += () if count is None else (count,)
        self.settle()

    def add_matrix(self, M: Tensor, count: int) -> None:
        """The sum of x x^T over rows that were never held together."""
        self.parts = [M if self.matrix is None else self.matrix + M]
        self.counts += (count,)
        self.settle()

    def empty(self) -> Accumulator:
        """One without rows, for the same factor."""
        return Accumulator(self.d, self.other, self.form)

    def merged(self, other: Accumulator) -> Accumulator:
        total = self.empty()
        total.rows, total.parts = self.rows + other.rows, self.parts + other.parts
        total.counts = self.counts + other.counts
        total.settle()
        return total

    def settle(self) -> None:
        N = sum([X.shape[-2] for X in self.rows])
        if self.parts or not as_rows(N, self.d, self.other, self.form):
            self._sum_up()

    def _sum_up(self) -> None:
        for X in self.rows:
            product = torch.bmm(X.mT, X)
            self.parts = [product if self.matrix is None else self.matrix + product]
        self.rows = []

    def as_matrix(self) -> Tensor:
        """The sum itself; it is held as a matrix from here on."""
        self._sum_up()
        assert self.matrix is not None
        return self.matrix

    def joined(self) -> Tensor:
        """All rows as one tensor, the same one each time."""
        if len(self.rows) > 1:
            self.rows = [torch.cat(self.rows, dim=-2)]
        return self.rows[0]

    def factor(self, weight: float | Tensor = 1.0) -> Factor:
        """``weight`` multiplies it."""
        if self.matrix is not None:
            return MatrixFactor(self.matrix * (weight / total_count(self.counts)))
        return RowsFactor(self.joined(), total_count(self.counts) / weight)


@dataclass
class LayerStatistics:
    """One layer's statistics over the passes of a step."""

    A: Accumulator | Frequencies | None = None
    B: Accumulator | None = None
    samples: float | Tensor = 0  # that count
    rows: float | Tensor = 0  # samples x positions that count
    by_samples: bool = False  # positions are reduced: rows, and those of B, are counted as samples are
    positions: float | Tensor | None = None  # of a sample; None: not measured
    weight: float | Tensor = 1.0  # s, which A is multiplied by
    halves: list[Halves] = field(default_factory=list)
    jacobians: list[Jacobian] = field(default_factory=list)
    rounding: float = 0.0  # of the products that the gradient is made of, where they are coarser than its dtype
    product: LowRank | None = None  # the gradient as D^T H, where that is known
    unformed: LowRank | None = None  # the part of it that autograd does not form

    @property
    def measured(self) -> bool:
        """Whether there is more than a gradient."""
        return self.A is not None or bool(self.jacobians)

    def join(self) -> None:
        """Put all passes together."""
        if self.measured:
            n = self.samples.clamp_min(1.0) if isinstance(self.samples, Tensor) else self.samples or 1
            self.positions = self.rows / n
        self.product = self.unformed = None
        if self.halves:
            join_halves(self)


@dataclass
class LayerPass:
    """One layer in one forward pass, or one of the maps that its weight stacks.

    Attributes:
        name, layer: The layer's name, and its layout.
        input, version: What it got (None once its statistics are made), and its version when the layer used it.
        made: The model itself made the input. What the user passed in may be overwritten before the step.
        edge: Where the derivative by the layer's output arrives; None: there is none, or it is the model's own output.
        behind: That of what the output is a view of, during the forward pass (``views.note_view``).
        is_output: The layer's output is the model's output.
        fused: Autograd is to form no gradient of the weight.
        count: Its rows; None: not known.
        part, parts: Which of the stacked maps it is (None: its weight is one map), and their number.
        shares: Another map of the same layer with the same input.
        transposed, tied: It uses an embedding's weight, transposed; its weight is that of an embedding and of a head.
        reached: A derivative of the user's loss has arrived at its output.
        of_output: Makes a derivative that arrives at the edge one by the layer's own output; None: it is that.
        statistics, delta, of_delta: What was made of it; the derivative of the user's loss by its output; of that.
        probe, along: H v and D^T H v, while uses of the weight are checked (``curvature.uses``).
        rows, waits: H, where D^T H is wanted; or whether it is made when the step wants it.
    """

    name: str
    layer: MatrixLayer
    input: Tensor | None
    version: int = 0
    made: bool = False
    edge: GradientEdge | None = None
    behind: GradientEdge | None = None
    is_output: bool = False
    fused: bool = False
    count: int | None = None
    part: int | None = None
    parts: int = 1
    shares: LayerPass | None = None
    transposed: bool = False
    tied: bool = False
    reached: bool = False
    of_output: Callable[[Tensor], Tensor] | None = None
    statistics: LayerStatistics = field(default_factory=LayerStatistics)
    rows: Tensor | None = None
    delta: Tensor | None = None
    of_delta: OfDelta | None = None
    probe: Tensor | None = None
    along: Tensor | None = None
    waits: bool = False

    @property
    def kind(self) -> int:
        """Of use; those of one kind are summed."""
        return TIED_HEAD if self.transposed else self.part or 0

    def check(self) -> None:
        if self.input is not None and self.input._version != self.version:
            raise RuntimeError(f'the input of layer "{self.name}" was changed in place after the layer had used it')

    def derivative(self, delta: Tensor) -> Tensor:
        """By the layer's own output, from what arrived at its edge."""
        return delta.detach() if self.of_output is None else self.of_output(delta.detach())


@dataclass
class Pass(Recorded):
    """One forward pass of the model, from the moment that the user's backward pass reaches its output.

    Attributes (others are those of ``PassRecord``):
        layers: Those that ran, by name; after it, maps that a weight stacks and further uses of it have a number.
        options: What is measured.
        due: Factors of this pass are wanted, not only D and H.
        checked: Uses of weights are checked, for which fused weights get their gradient all the same.
        double: Layers whose statistics are made in float64.
        forms, products: How statistics of some layers are held until ranks have exchanged them, and where D and H are.
        ignored: Which positions of the output the loss ignores; None: it has no positions.
        errors: The loss's derivative by the model's output; None: not differentiated yet.
        over: A step has used it, or its gradients were thrown away.
    """

    samples: int
    layers: dict[str, LayerPass]
    options: CaptureOptions
    due: bool
    checked: bool
    double: frozenset[str] = frozenset()
    forms: Mapping[str, str] = field(default_factory=dict)
    products: frozenset[str] = frozenset()
    ignored: Ignored | None = None
    errors: Tensor | None = None
    weighed: Tensor | None = None
    class_dim: int | None = None
    classes_elsewhere: int | None = None
    over: bool = False

    def add_errors(self, errors: Tensor, class_dim: int) -> None:
        """The derivative of the user's loss by the model's output, from one backward pass."""
        flat = precise(errors).reshape(self.samples, -1)
        if self.errors is not None:
            self.errors = self.errors + flat
            return
        self.errors = flat
        folded = any(layer.input is not None and len(layer.input) != self.samples for layer in self.layers.values())
        if errors.ndim >= (2 if folded else 3) and self.due and (self.options.inputs or self.options.jacobian):
            self.ignored = Ignored(errors, class_dim)

    # Inputs.

    def add_inputs(self, name: str, may_wait: bool = True) -> None:
        """Make what is wanted of a layer's inputs: A and the rows H."""
        layer, x = (this := self.layers[name]).layer, this.input
        assert x is not None
        if this.shares is not None:
            take_shared(this, this.shares)
            return
        fresh, expands = self.due and self.options.inputs, not self._reduces(layer)
        N = this.count = x.numel() // layer.d_in if layer.plain_rows else layer.row_count(x)
        halves = this.fused or not fresh or N is None or this.name in self.double
        keeps = keeps_halves(N or 0, layer.d_in, layer.d_out, self.options.form, self.options.signals)
        halves = halves or (this.name in self.products if this.name in self.forms else keeps)
        by_rows = self.forms.get(this.name) == ROWS or layer.plain_rows
        gram_alone = fresh and expands and not halves and self.ignored is None and not by_rows
        if may_wait and expands and this.made and not layer.plain_rows and N is not None and not gram_alone:
            this.waits = rows_wait(N, layer.d_in, layer.groups, x.numel())
            if this.waits:
                return
        this.waits, this.input = False, None
        with products_of(True) if layer.tf32 else AS_THEY_ARE:
            if layer.one_hot:
                indices = self.unfolded(layer.inputs(x).unsqueeze(-1)).squeeze(-1)
                add_indices(this.statistics, layer, indices, self.samples, self.ignored, self.options.sharing)
            elif gram_alone and N is not None:
                this.statistics.samples, this.statistics.rows = self.samples, N
                this.statistics.A = Accumulator(layer.d_in, layer.d_out, MATRIX)
                this.statistics.A.add_matrix(layer.gram(self.precise(x, this.name)), self.samples)
            else:
                kept = x if this.made or not halves else x.clone()
                self._add_rows(this, self.precise(kept, this.name), fresh, halves)

    def _add_rows(self, this: LayerPass, x: Tensor, fresh: bool, halves: bool) -> None:
        layer, statistics, reduces = this.layer, this.statistics, self._reduces(this.layer)
        ignored = self.ignored if fresh else None
        if reduces and not halves and len(x) == self.samples and ignored is None:  # patches a portion at a time
            portions = (self.unfolded(layer.inputs(part), len(part)) for part in layer.portions(x))
            rows = torch.cat([portion.mean(2) for portion in portions], dim=1)
        else:
            H = self.unfolded(layer.inputs(x))
            X = H if ignored is None else ignored.of_inputs(H)
            means = reduces and (X.mean(2) if ignored is None else ignored.means(X))
            rows = means if isinstance(means, Tensor) else X.flatten(1, 2)
            if halves:  # ignored rows have no part in D^T H, but only a gradient that is formed shows if that is so
                this.rows = rows if not reduces and (ignored is None or not this.fused) else H.flatten(1, 2)
        if fresh:
            statistics.samples, statistics.rows, statistics.by_samples = self.samples, rows.shape[1], reduces
            if ignored is not None:
                statistics.samples = ignored.samples_of(shape := H.shape[1:3])
                statistics.rows = ignored.rows(rows.shape[1], shape, of_samples=reduces)
            statistics.A = Accumulator(layer.d_in, layer.d_out, self.forms.get(this.name, self.options.form))
            statistics.A.add(rows, statistics.samples)

    def _reduces(self, layer: MatrixLayer) -> bool:
        """Whether the positions of a sample are reduced to one row; signals that sum to zero would leave none."""
        return self.options.sharing == "reduce" and not layer.cancels

    # Signals.

    def add_signals(self, name: str, delta: Tensor, draw: int = 0) -> None:
        """Fisher signals of a layer. Every draw adds rows, but samples and positions count once."""
        this = self.layers[name]
        if this.statistics.B is None:
            this.statistics.B = self.no_signals(this)
        self.add_to(this, this.statistics.B, this.derivative(delta), draw)

    def no_signals(self, this: LayerPass) -> Accumulator:
        return Accumulator(this.layer.d_out, this.layer.d_in, self.forms.get(this.name, self.options.form))

    def add_to(self, this: LayerPass, B: Accumulator, delta: Tensor, draw: int = 0) -> None:
        layer = this.layer
        D = self.unfolded(self.precise(layer.signals(delta), this.name))
        reduces = self._reduces(layer) and not layer.one_hot  # a diagonal A has expanded its positions
        count: float | Tensor = D.shape[1] * (1 if reduces else D.shape[2])
        if self.ignored is not None:
            D, count = self.ignored.of_inputs(D), self.ignored.rows(count, D.shape[1:3], of_samples=reduces)
        D = D.sum(2, keepdim=True) if reduces else D
        with products_of(True) if layer.tf32 else AS_THEY_ARE:
            B.add(D.flatten(1, 2), count if draw == 0 else None)

    def wants_delta(self, name: str) -> bool:
        """Whether the loss's own derivative by a layer's output is used."""
        this = self.layers[name]
        wanted = self.options.empirical or this.waits or this.rows is not None or this.probe is not None
        return wanted or (not self.options.signals and sum(use.name == this.name for use in self.layers.values()) > 1)

    def add_delta(self, name: str, delta: Tensor) -> None:
        """The loss's own derivative by a layer's output, in the user's backward pass."""
        this = self.layers.get(name)
        if this is None or self.over:
            return
        delta, this.reached = this.derivative(delta), True
        if this.probe is not None:
            along = precise(this.layer.signals(delta)).flatten(1, 2).mT @ this.probe
            this.along = along if this.along is None else this.along + along
        if self.options.empirical or this.rows is not None or this.waits:
            this.delta = delta if this.delta is None else this.delta + delta

    def unfolded(self, X: Tensor, samples: int | None = None) -> Tensor:
        """[groups, samples, positions, d], also where the model put positions first or folded them into the samples."""
        N = self.samples if samples is None else samples
        if N in (X.shape[1], X.shape[2]):
            return X if X.shape[1] == N else X.transpose(1, 2)
        rows = X.shape[1] * X.shape[2]
        return X.reshape(X.shape[0], N, rows // N, X.shape[3]) if rows % N == 0 else X

    def precise(self, x: Tensor, name: str) -> Tensor:
        """x in the precision that a layer's statistics have."""
        return x.double() if name in self.double else precise(x)


def gather(passes: list[Pass]) -> dict[str, LayerStatistics]:
    """The statistics of every layer over all passes."""
    return of_layers(*by_kind(passes))


def by_kind(passes: list[Pass]) -> tuple[Kinds, Samples, dict[str, Stacking]]:
    """The statistics of all passes by layer and kind of use, the samples of each layer, and what it stacks or ties."""
    samples: Samples = {}
    for one in passes:
        if any(use.waits or use.delta is not None for use in one.layers.values()):
            finish(one)
        count = one.samples if one.ignored is None else one.used_samples
        samples |= {name: samples.get(name, 0) + count for name in {use.name for use in one.layers.values()}}
    uses = [use for one in passes for use in one.layers.values()]
    stacks = {use.name: Stacking(use.tied, use.parts) for use in uses if use.tied or use.parts > 1}
    return kinds_in(passes), samples, stacks


def kinds_in(passes: Sequence[Pass], names: Collection[str] | None = None) -> Kinds:
    """The statistics so far of some layers, or of all, by layer and kind of use."""
    kinds: Kinds = {}
    for one in passes:
        uses: dict[tuple[str, int], list[LayerPass]] = {}
        for use in one.layers.values():
            if names is None or use.name in names:
                uses.setdefault((use.name, use.kind), []).append(use)
        for (name, kind), of in uses.items():
            plain = all(not (use.delta is not None or use.of_delta or use.statistics.jacobians) for use in of)
            so_far = [use.statistics if plain else with_derivatives(one, use) for use in of]
            total = so_far[0] if len(of) == 1 else summed(of, so_far)
            known = kinds.setdefault(name, {})
            known[kind] = merged(known[kind], total) if kind in known else total
    return kinds


def of_layers(kinds: Kinds, samples: Samples, uses: dict[str, Stacking]) -> dict[str, LayerStatistics]:
    """The statistics of every layer, from those of all kinds of use of its weight."""
    total = {name: of_all_kinds(of, uses[name], samples[name]) if name in uses else of[0] for name, of in kinds.items()}
    for statistics in total.values():
        statistics.join()
    return total


def precise(x: Tensor) -> Tensor:
    """Statistics are float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
