"""The recipes on damping: whether the best damping transfers, and how damping must scale with the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import correlation

from mukron.paper import drawing, earlier
from mukron.paper.claims import ClaimCheck, Value, differ, difference, revised, value_of
from mukron.paper.drawing import Panel
from mukron.paper.evidence import Evidence
from mukron.paper.networks import CNN_NETWORK, MLP_NETWORK, Network
from mukron.paper.optima import edge_rises, moves, outperforms, stays
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Claim, Experiment, Finding, Part, Scale, recipe
from mukron.paper.settings import (
    BASE,
    FLOOR,
    FULL_BATCH,
    MOMENTUM,
    PAPER_SAMPLES,
    SEEDS,
    WEIGHTS,
    heuristic,
    powers,
    rescaled,
    setting,
    study,
)
from mukron.paper.wide import CIFAR_CHOICES, cifar
from mukron.study.numbers import best, settings
from mukron.study.record import StudyRecord

DAMPING_UNIT = "Damping on the axes is the rule's own number, rho."
DAMPING_EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)  # of -d_A and of d_B


def damping_pair(
    scale: Scale, network: Network, lr: float, low: tuple[int, int], high: tuple[int, int], seeds: int = 2
) -> tuple[dict[str, Part], list[Panel]]:
    """Returns parts and panels of SP with the heuristic and muP with the rescaled rule, over powers of two of rho."""
    parts: dict[str, Part] = {}
    for title, scheme, (first, last) in (("SP, heuristic", "sp", low), ("muP, rescaled", "mup", high)):
        rule = heuristic(1) if scheme == "sp" else rescaled(1)
        config = network.config(scale, method="kfac")
        rhos = powers(first, last, scale.choose(1, 4, 2))
        name = f"{network.name}, {title}"
        parts[name] = study(
            scale,
            config,
            f"{scheme}/{rule}",
            widths=network.of(scale),
            lr=(lr,),
            damping=rhos,
            seeds=scale.choose(1, 1, seeds),
        )
    return parts, [Panel(name, name) for name in parts]


def damping_claims(name: str) -> list[Claim]:
    """Returns the claims about a network's best damping."""
    return [
        Claim(
            f"{name}: in SP with the heuristic the best damping grows with the width.",
            moves(f"{name}, SP, heuristic", axis="damping", direction=1),
        ),
        Claim(f"{name}: in muP with the rescaled rule it stays.", stays(f"{name}, muP, rescaled", axis="damping")),
        Claim(
            f"{name}: at the widest muP with the rescaled rule is better than SP, each at its best damping.",
            outperforms(f"{name}, muP, rescaled", f"{name}, SP, heuristic", axis="damping"),
        ),
    ]


def divergence_claims(name: str) -> list[Claim]:
    """Returns the claims about the edge of divergence under the heuristic."""
    part = f"{name}, SP, heuristic"
    return [
        Claim(
            f"{name}: with the heuristic the maximum damping that does not diverge grows with the width.",
            edge_rises(part, "largest"),
        ),
        Claim(
            f"{name}: with the heuristic the minimum damping that does not diverge grows with the width.",
            edge_rises(part, "least"),
            ours=True,
        ),
    ]


@recipe("k-fac-damping-transfer", "Figure 7", "Under the rescaled damping the best damping is the same at every width")
def damping_transfer(scale: Scale) -> Experiment:
    cnn = Network("CNN", CNN_NETWORK.fields, (16, 32, 64), CNN_NETWORK.small, CNN_NETWORK.smoke)
    parts, panels = damping_pair(scale, cnn, 0.003, (-16, 4), (-12, 8), seeds=5)
    choices = (
        "Samples: 1,024, as appendix B says; the caption says the full data set.",
        "Seeds: not given; 5.",
        *(FULL_BATCH, WEIGHTS, MOMENTUM, DAMPING_UNIT, BASE, FLOOR),
    )
    return Experiment(parts, damping_claims("CNN"), drawing.transfer([panels], axis="damping"), choices)


@recipe("mlp-damping-scaling", "Appendix H.2, figure", "Damping transfers in the MLP")
def mlp_damping(scale: Scale) -> Experiment:
    mnist = Network("MNIST", MLP_NETWORK.fields, powers(9, 13), MLP_NETWORK.small, MLP_NETWORK.smoke)
    whole = {**MLP_NETWORK.fields, "data": "fashion-mnist", "samples": None, "batch": 1024, "epochs": 5}
    fashion = Network("Fashion-MNIST", whole, powers(9, 12), powers(6, 7), MLP_NETWORK.smoke)
    parts, panels = damping_pair(scale, mnist, 2.0**-6, (-20, 0), (-10, 6))
    more, others = damping_pair(scale, fashion, 2.0**-6, (-20, 0), (-10, 6))
    choices = (
        "Learning rate: not given; 2^-6. Fashion-MNIST: whole, 5 epochs in batches of 1,024 (not given).",
        "The caption speaks of the maximum damping that does not diverge. Small damping is what diverges, so the "
        "minimum is judged too, as a claim of our own.",
        *(WEIGHTS, MOMENTUM, DAMPING_UNIT, SEEDS, BASE, FLOOR),
    )
    claims = [
        claim for name in ("MNIST", "Fashion-MNIST") for claim in (*damping_claims(name), *divergence_claims(name))
    ]
    return Experiment({**parts, **more}, claims, drawing.transfer([panels, others], axis="damping"), choices)


# Fixed damping.


@recipe("k-fac-d-scale", "Appendix H.1, figure", "Damping needs to be scaled as d_A = -1 and d_B = 1")
def d_scale(scale: Scale) -> Experiment:
    narrow, wide = scale.choose((64, 128), (64, 256), (64, 1024))
    numbers = scale.choose((0,), (0, 5, 10), (0, 2, 4, 6, 8, 10))
    config = setting(
        scale,
        **{"model": "mlp", "data": "mnist", "samples": PAPER_SAMPLES, "loss": "mse", "method": "kfac", "epochs": 20},
        **{"evaluate_every": 20},
    )
    tried = [(f"{2.0**z:.12g}", f"{2.0**-y:.12g}") for z in numbers for y in numbers]
    chosen = scale.choose((0.0, 1.0), (0.0, 1.0, 2.0), DAMPING_EXPONENTS)
    parts: dict[str, Part] = {}

    def fixed(width: float, x: float, y: float) -> Part:
        schemes = tuple(f"mup/fixed:{a},{b},1,{x:g},{y:g}" for a, b in tried)
        return study(scale, config, schemes, widths=(width,), lr=(0.01,), seeds=scale.choose(1, 1, 2))

    parts["narrow"] = fixed(narrow, 1, 1)
    parts.update({part_name(x, y): fixed(wide, x, y) for x in chosen for y in chosen})
    claims = [
        Claim(
            f"The damping that is best at width {narrow} is best for width {wide} if scaled with d_A = -1, d_B = 1.",
            revised(
                highest_at_one(chosen, carried),
                lambda evidence: earlier.highest_at_one(carried(evidence, chosen)),
                CARRIED_RULE,
            ),
            "highest at d_A = -1 and d_B = 1",
        ),
        Claim(
            f"With the damping tuned at width {wide} for each scaling, d_A = -1 and d_B = 1 is best.",
            highest_at_one(chosen, tuned_in_place),
            "highest at d_A = -1 and d_B = 1",
        ),
    ]
    draw = drawing.heat(
        lambda evidence: heat_map(carried(evidence, chosen), chosen),
        x="$d_A$",
        y="$d_B$",
        form=".1%",
        label="test accuracy",
    )
    choices = (
        f"The figure's widths and what was tuned where are not said: rho_A' and rho_B' are tuned at width {narrow} on "
        f"every second number of the paper's grid, and carried to width {wide} "
        "by M^-d of every layer's infinite sides (the figure), or tuned at width {wide} for each scaling.",
        *(FULL_BATCH, MOMENTUM, BASE),
    )
    return Experiment(parts, claims, draw, choices)


def part_name(x: float, y: float) -> str:
    """Returns the name of the part with the exponents d_A = -x and d_B = y."""
    return f"d_A = {0.0 - x:g}, d_B = {y:g}"


@dataclass(frozen=True)
class Cell:
    """The accuracy at the wide width of one scaling of the damping.

    Attributes:
        value: The mean over seeds; NaN if no run finished.
        numbers: rho_A' and rho_B', as their scheme spells them; None if no run finished.
        at_edge: Whether one of the numbers lies at an edge of its grid, so that a better one may lie beyond.
    """

    value: Value
    numbers: tuple[str, str] | None
    at_edge: bool


Cells = dict[tuple[float, float], Cell]  # by -d_A and d_B
CellsOf = Callable[[Evidence, Sequence[float]], Cells]


def carried(evidence: Evidence, chosen: Sequence[float]) -> Cells:
    """Returns the accuracies of the numbers that are best at the narrow width, scaled in every way."""
    record = evidence.study("narrow")
    setting = best(settings(record), record.metric)
    own = None if setting is None else numbers_of(setting.scheme)
    at_edge = own is not None and _at_edge(record, own)
    cells = {}
    for x, y in product(chosen, chosen):
        wide = evidence.study(part_name(x, y))
        fitting = [each for each in settings(wide) if own is not None and numbers_of(each.scheme) == own]
        value = value_of(wide, fitting[0], tuned_schemes=True) if fitting else Value(math.nan, None)
        cells[x, y] = Cell(value, own, at_edge)
    return cells


def tuned_in_place(evidence: Evidence, chosen: Sequence[float]) -> Cells:
    """Returns the best accuracy of every scaling over all numbers that were run."""
    cells = {}
    for x, y in product(chosen, chosen):
        wide = evidence.study(part_name(x, y))
        setting = best(settings(wide), wide.metric)
        if setting is None:
            cells[x, y] = Cell(Value(math.nan, None), None, at_edge=False)
        else:
            own = numbers_of(setting.scheme)
            cells[x, y] = Cell(value_of(wide, setting, tuned_schemes=True), own, _at_edge(wide, own))
    return cells


def numbers_of(scheme: str) -> tuple[str, str]:
    """Returns rho_A' and rho_B' of a scheme with fixed damping."""
    a, b = scheme.partition("fixed:")[2].split(",")[:2]
    return a, b


def _at_edge(record: StudyRecord, own: tuple[str, str]) -> bool:
    """Whether one of the two numbers is the lowest or highest that was tried."""
    grids = zip(*(map(float, numbers_of(scheme)) for scheme in record.schemes), strict=True)
    return any(float(number) in (min(grid), max(grid)) for number, grid in zip(own, map(set, grids), strict=True))


def heat_map(cells: Cells, chosen: Sequence[float]) -> tuple[list[str], list[str], list[list[float]]]:
    """Returns the labels and accuracies of the heat map over d_A and d_B."""
    matrix = [[cells[x, y].value.mean for x in chosen] for y in chosen]
    return [f"{0.0 - x:g}" for x in chosen], [f"{y:g}" for y in chosen], matrix


CARRIED_RULE = (
    "Earlier, the claim held unless another scaling was better beyond noise. Now d_A = -1 and d_B = 1 has to be better "
    "than every other one beyond noise, with numbers that do not lie at an edge of their grid."
)


def highest_at_one(chosen: Sequence[float], cells_of: CellsOf) -> ClaimCheck:
    """Checks that d_A = -1 and d_B = 1 is better than any other scaling by more than noise.

    It fails if another one is better by more than noise, and is not determined if another one is as good, or if the
    numbers of the one that is behind lie at an edge of their grid: it might be better beyond.
    """

    def check(evidence: Evidence) -> Finding:
        cells = cells_of(evidence, chosen)
        finished = {place: cell for place, cell in cells.items() if not math.isnan(cell.value.mean)}
        if (1.0, 1.0) not in finished:
            return Finding(FAILS if finished else UNTOLD, "it does not finish there")
        claimed = finished.pop((1.0, 1.0))
        orders = {place: differ(cell.value, claimed.value) for place, cell in finished.items()}
        above = [place for place, order in orders.items() if order == "above"]
        equal = [place for place, order in orders.items() if order == "alike"]
        measured, effect = f"{_cell_text((1.0, 1.0), claimed)}", None
        if finished:
            top = max(finished, key=lambda place: finished[place].value.mean)
            measured += f"; highest of the others {_cell_text(top, finished[top])}"
            effect = difference(claimed.value, finished[top].value)
        measured += f"; {len(above)} above it beyond noise, {len(equal)} equal within noise"
        measured += f"; {len(cells) - len(finished) - 1} of {len(cells)} diverge"
        if above:
            return Finding(UNTOLD if claimed.at_edge else FAILS, measured, effect=effect)
        behind = [cell for cell in finished.values() if cell.at_edge]
        return Finding(UNTOLD if equal or behind else HOLDS, measured, effect=effect)

    return check


def _cell_text(place: tuple[float, float], cell: Cell) -> str:
    x, y = place
    numbers = "" if cell.numbers is None else f" with rho_A' = {cell.numbers[0]}, rho_B' = {cell.numbers[1]}"
    edge = " (at an edge of the grid)" if cell.at_edge else ""
    return f"{100 * cell.value.mean:.2f}% at ({0.0 - x:g}, {y:g}){numbers}{edge}"


# During training.


@recipe("mean-eig-damping", "Appendix H.1, figure", "Mean eigenvalues and the heuristic damping vary during training")
def mean_eigenvalues(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {}
    for data in ("cifar10", "cifar100"):
        config = cifar(scale, "resnet18", data, "kfac", record=("spectra",), evaluate_every=10)
        if scale is Scale.SMOKE:
            config = config.replace(epochs=2)
        if scale is Scale.SMALL:
            config = config.replace(evaluate_every=3)
        width = scale.choose(1.0, 1.0, 4.0)
        parts[data] = study(
            scale, config, f"mup/{heuristic(10)}", widths=(width,), lr=(0.003,), seeds=1, metric="train_loss"
        )
    claims = [
        Claim(
            f"{data}: the mean eigenvalues of A and B change during training, and the heuristic damping with them.",
            changes_over_epochs(data),
        )
        for data in parts
    ]
    claims += [Claim(f"{data}: the damping follows the mean eigenvalues.", damping_follows(data)) for data in parts]
    rows = [
        [
            Panel(f"{data}: mean eigenvalues of A", data, quantity="mean/*.A"),
            Panel(f"{data}: of B", data, quantity="mean/*.B"),
            Panel(f"{data}: damping of A", data, quantity="damping/*.A"),
            Panel(f"{data}: of B", data, quantity="damping/*.B"),
        ]
        for data in parts
    ]
    choices = (
        "The original network (width 4), trained as for the training curves of ResNet-18.",
        *CIFAR_CHOICES,
    )
    return Experiment(parts, claims, drawing.layers_over_epochs(rows), choices)


def changes_over_epochs(part: str, times: float = 2.0) -> ClaimCheck:
    """Checks that in half of the factors mean eigenvalue and damping change by ``times`` over the epochs."""

    def check(evidence: Evidence) -> Finding:
        rows = max((result.rows for result in evidence.study(part).results), key=len)
        changes: dict[str, list[float]] = {"mean": [], "damping": []}
        for kind, ratios in changes.items():
            columns = [name for name in (rows[-1] if rows else ()) if name.startswith(f"{kind}/")]
            for column in columns:
                values = [row[column] for row in rows if row.get(column)]
                if len(values) > 1:
                    ratios.append(max(values) / min(values))
        if not all(changes.values()):
            return Finding(UNTOLD, f"{part}: not read at two epochs")
        shares = {kind: sum(ratio >= times for ratio in ratios) / len(ratios) for kind, ratios in changes.items()}
        measured = ", ".join(
            f"{100 * share:.0f}% of the {kind}s change by {times:g} or more" for kind, share in shares.items()
        )
        enough = [share >= 0.5 for share in shares.values()]
        return Finding(HOLDS if all(enough) else IN_PART if any(enough) else FAILS, f"{part}: {measured}")

    return check


def damping_follows(part: str, least: float = 0.5) -> ClaimCheck:
    """Checks that in most factors the logarithms of damping and mean eigenvalue correlate over the epochs."""

    def check(evidence: Evidence) -> Finding:
        rows = max((result.rows for result in evidence.study(part).results), key=len)
        correlations = []
        for column in (name for name in (rows[-1] if rows else ()) if name.startswith("mean/")):
            damping = column.replace("mean/", "damping/", 1)
            pairs = [
                (math.log(row[column]), math.log(row[damping])) for row in rows if row.get(column) and row.get(damping)
            ]
            if len(pairs) > 2 and all(len(set(side)) > 1 for side in zip(*pairs, strict=True)):
                correlations.append(correlation(*zip(*pairs, strict=True)))
        if not correlations:
            return Finding(UNTOLD, f"{part}: not read at three epochs")
        share = sum(value > least for value in correlations) / len(correlations)
        measured = f"{part}: correlation above {least:g} in {100 * share:.0f}% of {len(correlations)} factors"
        return Finding(HOLDS if share > 0.5 else FAILS, measured)

    return check
