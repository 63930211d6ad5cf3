"""What training in several processes will cost, before anything is built: what travels, who owns what, time and memory.

From the shapes of the layers alone, by the formulas of ``communication``, which the exchange itself chooses by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mukron.notebook import Shown
from mukron.optim.communication import (
    BY_OWNER,
    BY_ROWS,
    LayerTraffic,
    Traffic,
    kaisa_numbers,
    owners_of,
    scheme_of,
    sgd_numbers,
    traffic_of,
    work_of,
)
from mukron.optim.options import AdamStep, Graft
from mukron.optim.ranked_run import FSDP, PLAIN, RankedRun, layer_traffic
from mukron.optim.schemes import cost_of_shape
from mukron.optim.shapes import LayerShape, NetworkShapes
from mukron.optim.sizes import LayerSize
from mukron.table import Table, bytes_


class LayerLoad(NamedTuple):
    """What a layer, or each of several that are alike, costs in an average step."""

    shape: LayerShape
    traffic: LayerTraffic
    scheme: str
    state: int  # numbers in its factors and inverses, and in averages that its owner alone has
    work: float  # multiplications of whoever makes its move

    def moved(self, owners: tuple[int, ...]) -> Traffic:
        """Numbers that arrive over all ranks, of all of these layers.

        Args:
            owners: The rank of each; none where all ranks make the move.
        """
        of_owner = {owner: traffic_of(self.traffic, self.scheme, owner) for owner in owners or (0,)}
        return sum((of_owner[owner] for owner in owners or (0,) * self.shape.count), Traffic())


@dataclass(frozen=True, repr=False)
class RanksPrediction(Shown):
    """What a run in several processes costs. Print ``layers()`` and ``cost()``.

    Attributes:
        run: The run.
        network: Its layers.
        loads: What each of them costs.
        owners: By layer, the rank that owns each of those that are alike; none where all ranks make the move.
        notes: What was assumed.

    Example:
        >>> from mukron.optim.shapes import known_shapes
        >>> network = known_shapes("llama-7b").without(["head"])
        >>> plan = predict(network, RankedRun(ranks=64, batch=512, positions=2048))
        >>> plan.balance < 1.1, plan.state_of_heaviest < plan.state_of_one / 8
        (True, True)
    """

    run: RankedRun
    network: NetworkShapes
    loads: tuple[LayerLoad, ...]
    owners: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()

    def layers(self) -> Table:
        """Tabulate what travels for each layer."""
        return self._tables()[0]

    def cost(self) -> Table:
        """Tabulate the time and the memory of a rank."""
        return self._tables()[1]

    def _tables(self) -> list[Table]:
        from mukron.optim.prediction_tables import prediction_tables

        return [*prediction_tables(self)]

    def _summary(self) -> list[str]:
        element, of_rank = self.run.element, self.run.element / self.run.ranks
        arrives, of_sgd = bytes_(self.total * of_rank), bytes_(self.sgd * of_rank)
        state, of_one = bytes_(self.state_of_heaviest * element), bytes_(self.state_of_one * element)
        return [
            self.layers().title,
            f"{arrives} arrive on a rank in an average step; with data-parallel SGD {of_sgd}",
            f"factors, inverses and averages: {state} on the rank that has most; in one process {of_one}",
            "layers() says what travels for each layer, cost() has time and memory",
        ]

    @property
    def others(self) -> float:
        """Numbers that arrive for gradients of parameters of the fallback rule, over all ranks, where ranks average."""
        return sgd_numbers(self.network.others, self.run.ranks) if self.run.sharding == PLAIN else 0.0

    @property
    def wrapper(self) -> float:
        """Numbers that DistributedDataParallel or FSDP2 moves, over all ranks."""
        if self.run.sharding == PLAIN:
            return 0.0
        return self.sgd + (self.gathered_again if self.run.sharding == FSDP else 0.0)

    @property
    def gathered_again(self) -> float:
        """Numbers in weights that FSDP2 gathers for backward passes of the optimizer's own, over all ranks."""
        passes = self.run.own_passes(self.outputs) / self.run.step.factor_every
        return passes * (self.run.ranks - 1) * (self.network.numbers - self.network.first)

    @property
    def outputs(self) -> int:
        """Of the network: as the run says, or those of its last layer."""
        return self.run.outputs or self.network.layers[-1].d_out

    @property
    def exchanged(self) -> Traffic:
        """Numbers that the optimizer moves, over all ranks."""
        return sum(self.moved, Traffic(0.0, self.others, 0.0))

    @cached_property
    def moved(self) -> list[Traffic]:
        """The same of the layers, one entry for those that are alike."""
        return [load.moved(owners) for load, owners in zip(self.loads, self.owners, strict=True)]

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
        everywhere = sum(load.shape.count * load.work for load in self.loads if load.scheme == BY_ROWS)
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
        everywhere = float(sum(load.shape.count * load.state for load in self.loads if load.scheme == BY_ROWS))
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
        for load, owners, moved in zip(self.loads, self.owners, self.moved, strict=True):
            if load.scheme == BY_ROWS:
                found = [number + moved.total / k for number in found]
                continue
            move = moved.moves / load.shape.count / (k - 1)  # to each rank that does not own it
            found = [number + load.shape.count * move for number in found]
            for owner in owners:
                found[owner] += (moved.curvature + moved.gradients) / load.shape.count - move
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
    def weights_of_rank(self) -> float:
        """Numbers in weights, gradients, and averages that every rank has, or has its part of."""
        return self.weights_of_one / self.run.ranks if self.run.sharding == FSDP else self.weights_of_one

    @property
    def weights_of_one(self) -> float:
        """The same of one process."""
        momentum = float(bool(self.run.momentum_entries["momentum"]))
        rule = 2.0 if isinstance(self.run.step.fallback, AdamStep) else momentum
        on_update = momentum if self.run.momentum_entries["momentum_on"] == "update" else 0.0
        others = self.network.others
        return 2.0 * self.network.numbers + on_update * (self.network.numbers - others) + rule * others

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: numbers an average step, over all ranks unless the name says otherwise."""
        layers = [
            {
                **asdict(load.shape),
                "scheme": load.scheme,
                **moved._asdict(),
                "multiplications": load.work,
                "state": load.state,
                "owners": list(owners),
            }
            for load, owners, moved in zip(self.loads, self.owners, self.moved, strict=True)
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


def predict(network: NetworkShapes, run: RankedRun, schemes: Mapping[str, str] | None = None) -> RanksPrediction:
    """Predict what a run in several processes costs.

    Args:
        network: The layers of the network.
        run: The run.
        schemes: By layer, how its curvature travels; None: as the run's ``communication`` says.

    Example:
        >>> from mukron.optim.shapes import NetworkShapes
        >>> network = NetworkShapes("one layer", (LayerShape("up", 4096, 4096),))
        >>> plan = predict(network, RankedRun(ranks=2, batch=64, sharding="plain"))
        >>> plan.total < plan.sgd
        True
    """
    if not network.layers:
        raise ValueError(f"{network.title} has no layer that {run.method} preconditions: gradients alone travel")
    outputs, known = run.outputs or network.layers[-1].d_out, schemes or {}
    loads = tuple(_load(shape, run, outputs, known.get(shape.name)) for shape in network.layers)
    costs = [_cost(shape) for shape in network.layers for _ in range(shape.count)]
    owners = iter(owners_of(costs, run.ranks))
    of_layers = [tuple(next(owners) for _ in range(shape.count)) for shape in network.layers]
    return RanksPrediction(
        run,
        network,
        loads,
        tuple(() if load.scheme == BY_ROWS else of_layer for load, of_layer in zip(loads, of_layers, strict=True)),
    )


def _cost(shape: LayerShape) -> float:
    return cost_of_shape(shape.d_out, 1 if shape.one_hot else max(shape.d_in, 1), shape.groups)


def _load(shape: LayerShape, run: RankedRun, outputs: int, known: str | None) -> LayerLoad:
    traffic = layer_traffic(shape, run, outputs)
    scheme = known or (scheme_of(traffic, run.communication, run.speed) if run.measures else BY_OWNER)
    sizes = (shape.d_in, shape.d_out, shape.groups, shape.one_hot, shape.ties_head)
    state = run.spec.state_size(LayerSize(*sizes, run.batch, run.positions_of(shape), outputs), run.known)
    entries, numbers = run.momentum_entries, shape.numbers // shape.count
    state += numbers * (entries["momentum"] > 0 and entries["momentum_on"] == "gradient")
    state += 2 * numbers * (isinstance(run.trust, Graft) and isinstance(run.trust.step_rule, AdamStep))
    work = work_of(traffic) if run.measures else _cost(shape)  # of gradients, about
    return LayerLoad(shape, traffic, scheme, state, work)
