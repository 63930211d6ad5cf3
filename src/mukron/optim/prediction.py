"""What training in several processes will cost, before anything is built: what travels, who owns what, time and memory.

From the shapes of the layers alone, by the formulas of ``communication``, which the exchange itself chooses by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mukron.curvature import Empirical, Exact, Fisher, as_rows, keeps_halves
from mukron.linalg import Solver
from mukron.memory import EMA, LARGEST_AVERAGED, Auto, Batch, Memory, Window
from mukron.optim.communication import (
    ROWS,
    Communication,
    LayerTraffic,
    Speed,
    Traffic,
    kaisa_numbers,
    owners_of,
    scheme_of,
    sgd_numbers,
    traffic_of,
    work_of,
)
from mukron.optim.momentum import Momentum, momentum_entries
from mukron.optim.options import AdamStep, Graft, Spectral, StepOptions, Trust
from mukron.optim.shapes import LayerShape, NetworkShapes
from mukron.optim.sizes import LayerSize
from mukron.optim.spec import MethodSpec, spec_of

PLAIN, DDP, FSDP = "plain", "ddp", "fsdp"
SHARDINGS = (DDP, FSDP, PLAIN)


@dataclass(frozen=True)
class RankedRun:
    """A training run in several processes.

    Attributes:
        ranks: How many processes there are.
        batch: Samples of all of them together.
        positions: Of a sample, that share a layer's weight: the tokens of a sequence.
        method: One that measures curvature: "kfac", "foof" or "gauss-newton".
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
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: nothing travels; give at least 2")
        if self.batch < self.ranks:
            raise ValueError(f"batch={self.batch}: {self.ranks} ranks need a sample each; it counts those of all ranks")
        if self.positions < 1:
            raise ValueError(f"positions={self.positions}: give at least 1")
        if self.sharding not in SHARDINGS:
            raise ValueError(f"unknown sharding {self.sharding!r}; known: {', '.join(SHARDINGS)}")
        if not {"inputs", "jacobian"} & {*self.spec.captures}:
            raise ValueError(
                f"method={self.method!r} measures no curvature, so that its ranks exchange gradients alone, as in "
                'data-parallel SGD; choose "kfac", "foof" or "gauss-newton"'
            )

    @property
    def spec(self) -> MethodSpec:
        """The method's record."""
        return spec_of(self.method)

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
        names = ("factor_every", "inverse_every", "fallback", "exclude")
        return StepOptions.of(self.spec.method, self.trust, **{name: self.known.get(name) for name in names})

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


class LayerLoad(NamedTuple):
    """What a layer, or each of several that are alike, costs in an average step."""

    shape: LayerShape
    traffic: LayerTraffic
    scheme: str
    state: int  # numbers in its factors and inverses, and in averages that its owner alone has

    @property
    def work(self) -> float:
        """Multiplications of whoever makes its move."""
        return work_of(self.traffic)

    @property
    def moved(self) -> Traffic:
        """Numbers that arrive over all ranks."""
        return traffic_of(self.traffic, self.scheme, 0)


@dataclass(frozen=True)
class RanksPrediction:
    """What a run in several processes costs. Its tables are made by ``prediction_tables``.

    Attributes:
        run: The run.
        network: Its layers.
        loads: What each of them costs.
        owners: By layer, the rank that owns each of those that are alike; none where all ranks make the move.

    Example:
        >>> from mukron.optim.shapes import known_shapes
        >>> plan = predict(known_shapes("llama-7b"), RankedRun(ranks=64, batch=512, positions=2048))
        >>> plan.balance < 1.5, plan.state_of_heaviest < plan.state_of_one / 8
        (True, True)
    """

    run: RankedRun
    network: NetworkShapes
    loads: tuple[LayerLoad, ...]
    owners: tuple[tuple[int, ...], ...]

    @property
    def others(self) -> float:
        """Numbers that arrive for gradients of parameters of the fallback rule, over all ranks, where ranks average."""
        return sgd_numbers(self.network.others, self.run.ranks) if self.run.sharding == PLAIN else 0.0

    @property
    def wrapper(self) -> float:
        """Numbers that DistributedDataParallel or FSDP2 moves, over all ranks."""
        if self.run.sharding == PLAIN:
            return 0.0
        return sgd_numbers(self.network.numbers, self.run.ranks, self.run.sharding == FSDP)

    @property
    def exchanged(self) -> Traffic:
        """Numbers that the optimizer moves, over all ranks."""
        parts = [Traffic(*(load.shape.count * part for part in load.moved)) for load in self.loads]
        return sum(parts, Traffic(0.0, self.others, 0.0))

    @property
    def total(self) -> float:
        """Numbers that arrive in an average step, over all ranks."""
        return self.wrapper + self.exchanged.total

    @property
    def sgd(self) -> float:
        """The same of data-parallel SGD."""
        return sgd_numbers(self.network.numbers, self.run.ranks, self.run.sharding == FSDP)

    @property
    def kaisa(self) -> float:
        """The same where whole factors are all-reduced, and moves broadcast. Weights are not sharded there."""
        layers = sum(load.shape.count * kaisa_numbers(load.traffic) for load in self.loads)
        return layers + sgd_numbers(self.network.others, self.run.ranks)

    @cached_property
    def work(self) -> list[float]:
        """Multiplications of each rank's curvature and moves."""
        everywhere = sum(load.shape.count * load.work for load in self.loads if load.scheme == ROWS)
        work = [everywhere] * self.run.ranks
        for load, owners in zip(self.loads, self.owners, strict=True):
            for owner in owners:
                work[owner] += load.work
        return work

    @property
    def work_of_one(self) -> float:
        """Multiplications of one process that does everything."""
        return sum(load.shape.count * load.work for load in self.loads)

    @cached_property
    def state(self) -> list[float]:
        """Numbers in the factors, inverses and averages that each rank has of its own layers."""
        everywhere = float(sum(load.shape.count * load.state for load in self.loads if load.scheme == ROWS))
        state = [everywhere] * self.run.ranks
        for load, owners in zip(self.loads, self.owners, strict=True):
            for owner in owners:
                state[owner] += load.state
        return state

    @property
    def state_of_one(self) -> float:
        """The same of one process."""
        return float(sum(load.shape.count * load.state for load in self.loads))

    @property
    def state_of_heaviest(self) -> float:
        """The same of the rank that has most."""
        return max(self.state)

    @property
    def balance(self) -> float:
        """Work of the rank that has most, over the mean."""
        return max(self.work) * self.run.ranks / sum(self.work)

    @cached_property
    def arrivals(self) -> list[float]:
        """Numbers that arrive on each rank."""
        k = self.run.ranks
        found = [(self.wrapper + self.others) / k] * k
        for load, owners in zip(self.loads, self.owners, strict=True):
            moved = load.moved
            if load.scheme == ROWS:
                found = [number + load.shape.count * moved.total / k for number in found]
                continue
            each = moved.moves / (k - 1)  # of the ranks that do not own it
            found = [number + load.shape.count * each for number in found]
            for owner in owners:
                found[owner] += moved.curvature + moved.gradients - each
        return found

    @property
    def exchange_seconds(self) -> float:
        """Of the rank on which most arrives."""
        return max(self.arrivals) * self.run.element / self.run.speed.bandwidth

    @property
    def work_seconds(self) -> float:
        """Of the rank that has most work."""
        return max(self.work) / self.run.speed.multiplications

    @property
    def replicated(self) -> float:
        """Numbers in weights, gradients and what else every rank has of them, over those in the weights."""
        entries = self.run.momentum_entries
        return 2 + (entries["momentum"] > 0 and entries["momentum_on"] == "update")

    @property
    def weights_of_rank(self) -> float:
        """Numbers in weights, gradients, and averages that every rank has, or has its part of."""
        whole = self.replicated * self.network.numbers
        if isinstance(self.run.step.fallback, AdamStep):
            whole += (2 - (self.replicated - 2)) * self.network.others
        return whole / self.run.ranks if self.run.sharding == FSDP else whole

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: numbers an average step, over all ranks unless the name says otherwise."""
        layers = [
            {
                **asdict(load.shape),
                "scheme": load.scheme,
                **load.moved._asdict(),
                "multiplications": load.work,
                "state": load.state,
                "owners": list(owners),
            }
            for load, owners in zip(self.loads, self.owners, strict=True)
        ]
        return {
            "ranks": self.run.ranks,
            "sharding": self.run.sharding,
            "element": self.run.element,
            "layers": layers,
            "others": self.network.others,
            "numbers": {"total": self.total, "sgd": self.sgd, "kaisa": self.kaisa, "by_rank": self.arrivals},
            "multiplications_by_rank": self.work,
            "seconds": {"exchange": self.exchange_seconds, "work": self.work_seconds},
            "state_by_rank": self.state,
            "weights_by_rank": self.weights_of_rank,
        }


def predict(network: NetworkShapes, run: RankedRun) -> RanksPrediction:
    """Predict what a run in several processes costs.

    Args:
        network: The layers of the network.
        run: The run.

    Example:
        >>> from mukron.optim.shapes import NetworkShapes
        >>> network = NetworkShapes("one layer", (LayerShape("up", 4096, 4096),))
        >>> plan = predict(network, RankedRun(ranks=2, batch=64, sharding="plain"))
        >>> plan.total < plan.sgd
        True
    """
    loads = tuple(_load(shape, run, run.outputs or network.layers[-1].d_out) for shape in network.layers)
    costs = [load.work for load in loads if load.scheme != ROWS for _ in range(load.shape.count)]
    owners = iter(owners_of(costs, run.ranks))
    return RanksPrediction(
        run,
        network,
        loads,
        tuple(() if load.scheme == ROWS else tuple(next(owners) for _ in range(load.shape.count)) for load in loads),
    )


def _load(shape: LayerShape, run: RankedRun, outputs: int) -> LayerLoad:
    traffic = traffic_for(shape, run, outputs)
    scheme = scheme_of(traffic, run.communication, run.speed)
    sizes = (shape.d_in, shape.d_out, shape.groups, shape.one_hot, shape.ties_head)
    state = run.spec.state_size(LayerSize(*sizes, run.batch, _positions(shape, run), outputs), run.known)
    entries, numbers = run.momentum_entries, shape.numbers // shape.count
    state += numbers * (entries["momentum"] > 0 and entries["momentum_on"] == "gradient")
    state += 2 * numbers * (isinstance(run.trust, Graft) and isinstance(run.trust.step_rule, AdamStep))
    return LayerLoad(shape, traffic, scheme, state)


def _positions(shape: LayerShape, run: RankedRun) -> int:
    return run.positions if shape.positions is None else shape.positions


def traffic_for(shape: LayerShape, run: RankedRun, outputs: int) -> LayerTraffic:
    """What decides how many numbers a layer of a run moves.

    Args:
        shape: The layer.
        run: The run.
        outputs: Of the network.
    """
    reduces = run.known.get("sharing") == "reduce"
    rows = run.rows(1 if reduces else _positions(shape, run))
    weight = shape.groups * shape.d_in * shape.d_out
    kinds = _kinds(shape, run, rows, outputs)
    shards = tuple(weight // run.ranks + (rank < weight % run.ranks) for rank in range(run.ranks))
    return LayerTraffic(
        shape.d_in,
        shape.d_out,
        shape.groups,
        rows,
        tokens=shape.one_hot and not shape.ties_head,
        factor_every=run.step.factor_every,
        inverse_every=run.step.inverse_every,
        averages=run.sharding == PLAIN,
        shards=shards if run.sharding == FSDP else None,
        biases=shape.groups * shape.d_out * shape.bias,
        element=run.element,
        **kinds,
    )


def _kinds(shape: LayerShape, run: RankedRun, rows: Sequence[int], outputs: int) -> dict[str, Any]:
    """Which rows there are of a layer, and in which form factors are held."""
    spec, known = run.spec, run.known
    entries = run.momentum_entries
    averaged = entries["momentum"] > 0 and entries["momentum_on"] == "gradient"
    low_rank = not (averaged or entries["nesterov"]) and (run.trust is None or isinstance(run.trust, Spectral))
    if "jacobian" in spec.captures:
        kernel = {"signals": outputs, "products": True, "empirical": True, "by_rows": True}
        return {**kernel, "low_rank": low_rank}
    signals, empirical = _signals(spec, known, outputs)
    form = _form(run)
    by_rows = not shape.one_hot and any(
        as_rows(draws * sum(rows), d, other, _form_of_side(d, run, form))
        for draws, d, other in ((1, shape.d_in, shape.d_out), (signals, shape.d_out, shape.d_in))
        if draws
    )
    halves = keeps_halves(rows[0], shape.d_in, shape.d_out, form, signals > 0) or known.get("fused")
    products = bool(halves) and not shape.one_hot
    return {
        "signals": signals,
        "products": products,
        "empirical": empirical,
        "low_rank": low_rank and products,
        "by_rows": by_rows,
    }


def _signals(spec: MethodSpec, known: Mapping[str, Any], outputs: int) -> tuple[int, bool]:
    """Rows of signals for each row of inputs, and whether they are the loss's own derivatives."""
    if "signals" not in spec.captures:
        return 0, False
    fisher = Fisher.of(known["fisher"] or "signs")
    if isinstance(fisher, Empirical):
        return 1, True
    return outputs if isinstance(fisher, Exact) else getattr(fisher, "draws", 1), False


def _memory(run: RankedRun) -> Memory:
    given: Memory | None = run.known.get("memory")
    usual: EMA | Batch = Batch() if run.trust is None else Auto()
    return usual if given is None else given


def _form(run: RankedRun) -> str:
    """The form in which a batch's factors are held: that of ``kfac``."""
    if _memory(run).averages or Solver.of(run.known["solver"]) != Solver.of("cholesky"):
        return "matrix"
    return "rows" if isinstance(_memory(run), Window) else run.known["form"]


def _form_of_side(d: int, run: RankedRun, form: str) -> str:
    """The form in which a factor is remembered."""
    return "matrix" if isinstance(_memory(run), Auto) and d <= LARGEST_AVERAGED else form
