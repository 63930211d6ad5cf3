"""The tables of a prediction for several processes."""

from __future__ import annotations

from mukron.optim.communication import Traffic, sgd_numbers
from mukron.optim.prediction import LayerLoad, RanksPrediction
from mukron.optim.ranked_run import DDP, FSDP, PLAIN
from mukron.table import Table, bytes_

AVERAGED_BY = {
    DDP: "gradients: DistributedDataParallel averages them.",
    FSDP: "gradients: fully_shard gathers weights for both passes and reduces gradients; owners gather theirs.",
    PLAIN: "gradients: the step averages them (process_group=); of a layer whose D and H travel they are D^T H.",
}

GRADIENTS_BY = {**AVERAGED_BY, PLAIN: "gradients: the step sums those of a layer on its owner (process_group=)."}
WAYS_NOTE = (
    "rows: D and H to all ranks; owner: D and H to the layer's owner; factors: sums of h h^T and of d d^T to it."
)


def prediction_tables(plan: RanksPrediction) -> tuple[Table, Table]:
    """What travels for each layer, and the time and memory of a rank.

    Args:
        plan: The prediction.

    Example:
        >>> from mukron.optim.prediction import predict
        >>> from mukron.optim.ranked_run import RankedRun
        >>> from mukron.optim.shapes import LayerShape, NetworkShapes
        >>> network = NetworkShapes("one layer", (LayerShape("up", 4096, 4096),))
        >>> layers, cost = prediction_tables(predict(network, RankedRun(ranks=2, batch=64)))
        >>> layers.columns[:3], cost.columns[0]
        (('layer', 'out x in', 'scheme'), 'of a rank')
    """
    return _layers(plan), _cost(plan)


def _layers(plan: RanksPrediction) -> Table:
    run, network = plan.run, plan.network
    rows = [_row(plan, load, moved) for load, moved in zip(plan.loads, plan.moved, strict=True)]
    if network.others:
        moved = plan.others if run.sharding == PLAIN else sgd_numbers(network.others, run.ranks, run.sharding == FSDP)
        ratio = moved / sgd_numbers(network.others, run.ranks, run.sharding == FSDP)
        rows.append(("others (fallback rule)", "", "", "-", _size(plan, moved), "-", f"{ratio:.2f}"))
    if run.sharding == FSDP and plan.gathered_again:
        rows.append(("weights, for Fisher signals", "", "", "-", _size(plan, plan.gathered_again), "-", ""))
    curvature, gradients, moves = plan.exchanged
    whole = (curvature, gradients + plan.wrapper, moves)
    rows.append(("all", "", "", *(_size(plan, part) for part in whole), f"{plan.total / plan.sgd:.2f}"))
    columns = ("layer", "out x in", "scheme", "curvature", "gradients", "moves", "x SGD")
    positions = sorted({run.positions_of(load.shape) for load in plan.loads})
    spread = f"{run.ranks} ranks, batch {run.batch} x {positions[0]}"
    spread += f" to {positions[-1]}" if len(positions) > 1 else ""
    title = f"{run.spec.title} on {network.title}, {network.numbers:,} parameters: {spread}"
    if "inverse_every" in run.known or run.measures:
        title += f", factors every {run.step.factor_every}, inverses every {run.step.inverse_every}"
    notes = [
        "Bytes that arrive on a rank in an average step, the mean over ranks.",
        f"In all {_size(plan, plan.total)}. Data-parallel SGD: {_size(plan, plan.sgd)}.",
    ]
    if run.measures:
        kaisa = f"A K-FAC that all-reduces whole factors and broadcasts moves: {_size(plan, plan.kaisa)}."
        notes += [kaisa, AVERAGED_BY[run.sharding], WAYS_NOTE]
    else:
        notes += [GRADIENTS_BY[run.sharding], "owner: makes a layer's move and sends it to the other ranks."]
    return Table(title, columns, tuple(rows), (*notes, *plan.notes))


def _row(plan: RanksPrediction, load: LayerLoad, moved: Traffic) -> tuple[str, ...]:
    shape, run = load.shape, plan.run
    sgd = sgd_numbers(shape.numbers, run.ranks, run.sharding == FSDP)
    wrapper = 0.0 if run.sharding == PLAIN else sgd
    curvature, gradients, moves = moved
    name = shape.name if shape.count == 1 else f"{shape.name} x {shape.count}"
    sides = f"{shape.d_out} x {shape.d_in}" + (f" ({shape.groups} groups)" if shape.groups > 1 else "")
    parts = (curvature, gradients + wrapper, moves)
    return name, sides, load.scheme, *(_size(plan, part) for part in parts), f"{sum(parts) / sgd:.2f}"


def _size(plan: RanksPrediction, numbers: float) -> str:
    return bytes_(numbers / plan.run.ranks * plan.run.element) if numbers else "-"


def _cost(plan: RanksPrediction) -> Table:
    run, k = plan.run, plan.run.ranks
    bandwidth, multiplications = run.speed
    element = run.element
    rows = (
        (
            "arrives in a step",
            bytes_(max(plan.arrivals) * element),
            bytes_(sum(plan.arrivals) / k * element),
            "-",
            bytes_(plan.sgd / k * element),
        ),
        (
            "time of that",
            _seconds(plan.exchange_seconds),
            _seconds(sum(plan.arrivals) / k * element / bandwidth),
            "-",
            _seconds(plan.sgd / k * element / bandwidth),
        ),
        (
            "time of factors, inverses, moves",
            _seconds(plan.work_seconds),
            _seconds(sum(plan.work) / k / multiplications),
            _seconds(plan.work_of_one / multiplications),
            "-",
        ),
        (
            "factors, inverses, averages",
            bytes_(plan.state_of_heaviest * element),
            bytes_(sum(plan.state) / k * element),
            bytes_(plan.state_of_one * element),
            "-",
        ),
        (
            "weights, gradients, momentum",
            *(bytes_(plan.weights_of_rank * element),) * 2,
            bytes_(plan.weights_of_one * element),
            bytes_(2 * plan.network.numbers * element / (k if run.sharding == FSDP else 1)),
        ),
    )
    columns = ("of a rank", "the most", "mean", "one process", "SGD")
    heaviest = max(plan.loads, key=lambda load: load.work)
    share = k * heaviest.work / sum(plan.work)
    notes = [
        f"Speed: {bandwidth:.3g} bytes and {multiplications:.3g} multiplications a second; times add up as if nothing "
        "overlapped.",
        "Memory: without activations, and without copies that last less than a step.",
    ]
    if not run.measures:
        notes.append("Multiplications: about the cubes of a layer's sides and both products with it, at every step.")
    if share > 1 and heaviest.scheme != "rows":
        notes += [
            f"One {heaviest.shape.name} alone is {share:.1f} times the mean work of a rank: more ranks do not help.",
            "Exclude it, or make its inverses less often.",
        ]
    return Table(f"A step with {k} ranks, {run.sharding}", columns, rows, tuple(notes))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
