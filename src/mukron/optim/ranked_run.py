"""A training run in several processes as plans take it, and what decides how many numbers its layers move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from mukron.curvature import CaptureOptions, Drawn, Empirical, Exact, Fisher
from mukron.linalg import Cholesky
from mukron.memory import Auto, Batch, Memory, Window
from mukron.optim.communication import Communication, LayerTraffic, Speed
from mukron.optim.momentum import Momentum, momentum_entries
from mukron.optim.options import StepOptions, Trust
from mukron.optim.schemes import forms_of, stays_low_rank
from mukron.optim.shapes import LayerShape
from mukron.optim.spec import MethodSpec, spec_of

PLAIN, DDP, FSDP = "plain", "ddp", "fsdp"
RANKED_SHARDINGS = (DDP, FSDP, PLAIN)
MOST_RANKS, MOST_ROWS = 100_000, 2**63


@dataclass(frozen=True)
class RankedRun:
    """A training run in several processes.

    Attributes:
        ranks: How many processes there are.
        batch: Samples of all of them together.
        positions: Of a sample, that share a layer's weight: the tokens of a sequence.
        method: One that works layer by layer: "kfac", "foof", "gauss-newton", "shampoo", "soap" or "muon".
        options: The method's options, as a run's ``method_options`` has them.
        momentum: Likewise; None: the method's usual one.
        communication: How ranks exchange curvature.
        speed: Of a rank.
        sharding: "ddp": DistributedDataParallel averages gradients. "fsdp": each rank has a part of every weight.
            "plain": the optimizer averages gradients, which was given the process group.
        outputs: Of the network, for methods that go through them; None: those of its last layer.
        element: Bytes of a number.

    Example:
        >>> RankedRun(ranks=8, batch=256).rows(positions=1)[:2]
        (32, 32)
    """

    ranks: int
    batch: int
    positions: int = 1
    method: str = "kfac"
    options: Mapping[str, Any] = field(default_factory=dict)
    momentum: float | None = None
    communication: Communication = field(default_factory=Communication)
    speed: Speed = field(default_factory=Speed)
    sharding: str = DDP
    outputs: int | None = None
    element: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ValueError(
                f"ranks={self.ranks}: expected at least 2, as with one nothing travels, and at most {MOST_RANKS}"
            )
        if self.batch < self.ranks:
            raise ValueError(f"batch={self.batch}: {self.ranks} ranks need a sample each; it counts those of all ranks")
        if self.positions < 1:
            raise ValueError(f"positions={self.positions}: give at least 1")
        if self.batch * self.positions > MOST_ROWS:
            raise ValueError(f"batch={self.batch}, positions={self.positions}: expected a product of at most 2^63")
        if self.sharding not in RANKED_SHARDINGS:
            raise ValueError(f"unknown sharding {self.sharding!r}; known: {', '.join(RANKED_SHARDINGS)}")
        if not self.spec.layerwise:
            raise ValueError(
                f"method={self.method!r} has no layers with owners: its ranks exchange gradients alone, as in "
                'data-parallel SGD; choose "kfac", "foof", "gauss-newton", "shampoo", "soap" or "muon"'
            )
        if self.capture.fused and not self.measures:
            raise ValueError(
                f"fused=True with method={self.method!r} and {self.ranks} ranks: gradients that are never formed "
                "cannot be averaged; leave out fused"
            )
        if self.capture.fused and self.sharding != PLAIN:
            raise ValueError(
                f"fused=True with sharding={self.sharding!r}: gradients that are never formed cannot be averaged by "
                f'somebody else; choose sharding="{PLAIN}", or leave out fused'
            )

    @property
    def spec(self) -> MethodSpec:
        """The method's record."""
        return spec_of(self.method)

    @property
    def measures(self) -> bool:
        """Whether the method measures curvature in passes. Others need the gradient alone."""
        return bool(self.spec.captures)

    @cached_property
    def known(self) -> dict[str, Any]:
        """The method's options as its optimizer takes them, with defaults."""
        return {**self.spec.all_options(self.options), **self.spec.variant(self.method)}

    @property
    def trust(self) -> Trust | None:
        """The bound on steps."""
        return Trust.of(self.known.get("trust"))

    @cached_property
    def step(self) -> StepOptions:
        """Options of a step: intervals and the fallback rule."""
        names = {"factor_every", "inverse_every", "fallback", "exclude"} & self.known.keys()
        given = {name: self.known[name] for name in names}
        if "inverse_every" not in names:  # a kernel is that of its own batch
            given["inverse_every"] = 1
        return StepOptions.of(self.spec.method, self.trust, **given)

    @cached_property
    def momentum_entries(self) -> dict[str, Any]:
        """Momentum as the optimizer's parameter groups have it."""
        given: float | Momentum | None = self.spec.defaults.get("momentum") if self.momentum is None else self.momentum
        kind = getattr(self.spec.optimizer, "momentum_kind", None)
        return momentum_entries(given, bool(self.known.get("nesterov")), kind, self.trust is not None)

    def rows(self, positions: int) -> tuple[int, ...]:
        """Rows of each rank, where samples are spread evenly.

        Args:
            positions: Of a sample.
        """
        least, more = divmod(self.batch, self.ranks)
        return tuple(positions * (least + (rank < more)) for rank in range(self.ranks))

    def positions_of(self, shape: LayerShape) -> int:
        """Positions of a sample that share a layer's weight.

        Args:
            shape: The layer.
        """
        return self.positions if shape.positions is None else shape.positions

    @cached_property
    def capture(self) -> CaptureOptions:
        """What is measured in a pass, as the optimizer would say it."""
        known, signals = self.known, "signals" in self.spec.captures
        if not self.measures:
            return CaptureOptions(inputs=False, signals=False, fused=bool(known.get("fused")))
        if "jacobian" in self.spec.captures:
            return CaptureOptions(inputs=False, signals=False, jacobian=True, fisher=Empirical())
        given: Memory | None = known.get("memory")
        memory = given or (Batch() if self.trust is None else Auto())
        form = "rows" if isinstance(memory, Window) else known["form"]
        if memory.averages or known["solver"] not in ("cholesky", Cholesky()):
            form = "matrix"
        fisher = Fisher.of((known["fisher"] or "signs") if signals else "signs")
        return CaptureOptions(
            signals=signals, fisher=fisher, sharing=known["sharing"], form=form, fused=bool(known.get("fused"))
        )

    def own_passes(self, outputs: int) -> int:
        """Backward passes of a step that measures curvature, beside that of the loss.

        Args:
            outputs: Of the network.
        """
        fisher = self.capture.fisher
        if self.capture.jacobian or (self.capture.signals and isinstance(fisher, Exact)):
            return outputs
        return fisher.draws if self.capture.signals and isinstance(fisher, Drawn) else 0


def layer_traffic(shape: LayerShape, run: RankedRun, outputs: int) -> LayerTraffic:
    """What decides how many numbers a layer of a run moves: ``schemes.traffic_for``, of a layer that is not there yet.

    Args:
        shape: The layer.
        run: The run.
        outputs: Of the network.

    Example:
        >>> traffic = layer_traffic(LayerShape("up", 64, 64), RankedRun(ranks=2, batch=8), outputs=10)
        >>> traffic.rows, traffic.signals
        ((4, 4), 1)
    """
    capture = run.capture
    rows = run.rows(1 if capture.sharing == "reduce" else run.positions_of(shape)) if run.measures else (0,) * run.ranks
    signals = 1 if capture.signals and capture.empirical else run.own_passes(outputs)
    averages = run.sharding == PLAIN
    by_rows, products = forms_of(shape.d_in, shape.d_out, rows, capture, averages, shape.one_hot)
    return LayerTraffic(
        shape.d_in,
        shape.d_out,
        shape.groups,
        rows,
        signals=signals,
        tokens=shape.one_hot and not shape.ties_head,
        inputs=capture.inputs or capture.jacobian,
        products=products and run.measures and shape.d_in > 0 and not shape.one_hot,
        own_signals=capture.empirical,
        low_rank=stays_low_rank(run.momentum_entries, run.trust),
        by_rows=by_rows,
        factor_every=run.step.factor_every,
        inverse_every=run.step.inverse_every,
        averages=averages,
        shards=_shards(shape, run.ranks) if run.sharding == FSDP else None,
        errors=tuple(outputs * samples for samples in run.rows(1)) if capture.jacobian else (),
        biases=shape.groups * shape.d_out * shape.bias,
        element=max(4, run.element),
    )


def _shards(shape: LayerShape, ranks: int) -> tuple[int, ...]:
    """Numbers of a weight that each rank has: ``fully_shard`` cuts the first dimension as ``torch.chunk`` does."""
    rows, ends = shape.groups * shape.d_out, range(ranks + 1)
    step = -(-rows // ranks)
    bounds = [min(end * step, rows) for end in ends]
    return tuple((end - begin) * shape.d_in for begin, end in pairwise(bounds))
