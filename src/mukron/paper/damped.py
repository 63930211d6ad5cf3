"""Does the best damping stay where it is? And how damping must go with the width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import correlation

from mukron.paper import drawing
from mukron.paper.claims import Check, Value, best_value, differ, moves, stays
from mukron.paper.drawing import Panel
from mukron.paper.networks import CNN, MLP, Network
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Claim, Evidence, Experiment, Finding, Part, Scale, recipe
from mukron.paper.settings import (
    BASE,
    FLOOR,
    FULL_BATCH,
    MOMENTUM,
    SAMPLES,
    SEEDS,
    WEIGHTS,
    heuristic,
    powers,
    rescaled,
    setting,
    study,
)
from mukron.paper.wide import CHOICES as CIFAR_CHOICES
from mukron.paper.wide import cifar
from mukron.report.numbers import best, settings

UNIT = "Damping on the axes is the rule's own number, rho."
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)  # -d_A, d_B


def pair(
    scale: Scale, network: Network, lr: float, low: tuple[int, int], high: tuple[int, int], seeds: int = 2
) -> tuple[dict[str, Part], list[Panel]]:
    """SP with the heuristic against muP with the rescaled rule, over powers of two of rho."""
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
    return [
        Claim(
            f"{name}: in SP with the heuristic the best damping grows with the width.",
            moves(f"{name}, SP, heuristic", axis="damping", direction=1),
        ),
        Claim(f"{name}: in muP with the rescaled rule it stays.", stays(f"{name}, muP, rescaled", axis="damping")),
    ]


@recipe("k-fac-damping-transfer", "Figure 7", "Under the rescaled damping the best damping is the same at every width")
def damping_transfer(scale: Scale) -> Experiment:
    cnn = Network("CNN", CNN.fields, (16, 32, 64), CNN.small, CNN.smoke)
    parts, panels = pair(scale, cnn, 0.003, (-16, 4), (-12, 8), seeds=5)
    choices = (
        "Samples: 1,024, as appendix B says; the caption says the full data set.",
        "Seeds: not given; 5.",
        *(FULL_BATCH, WEIGHTS, MOMENTUM, UNIT, BASE, FLOOR),
    )
    return Experiment(parts, damping_claims("CNN"), drawing.transfer([panels], axis="damping"), choices)


@recipe("mlp-damping-scaling", "Appendix H.2, figure", "Damping transfers in the MLP")
def mlp_damping(scale: Scale) -> Experiment:
    mnist = Network("MNIST", MLP.fields, powers(9, 13), MLP.small, MLP.smoke)
    whole = {**MLP.fields, "data": "fashion-mnist", "samples": None, "batch": 1024, "epochs": 5}
    fashion = Network("Fashion-MNIST", whole, powers(9, 12), powers(6, 7), MLP.smoke)
    parts, panels = pair(scale, mnist, 2.0**-6, (-20, 0), (-10, 6))
    more, others = pair(scale, fashion, 2.0**-6, (-20, 0), (-10, 6))
    choices = (
        "Learning rate: not given; 2^-6. Fashion-MNIST: whole, 5 epochs in batches of 1,024 (not given).",
        *(WEIGHTS, MOMENTUM, UNIT, SEEDS, BASE, FLOOR),
    )
    claims = [*damping_claims("MNIST"), *damping_claims("Fashion-MNIST")]
    return Experiment({**parts, **more}, claims, drawing.transfer([panels, others], axis="damping"), choices)


# Fixed damping.


@recipe("k-fac-d-scale", "Appendix H.1, figure", "Damping needs to be scaled as d_A = -1 and d_B = 1")
def d_scale(scale: Scale) -> Experiment:
    narrow, wide = scale.choose((64, 128), (64, 256), (64, 1024))
    numbers = scale.choose((0,), (0, 5, 10), (0, 2, 4, 6, 8, 10))
    config = setting(
        scale,
        **{"model": "mlp", "data": "mnist", "samples": SAMPLES, "loss": "mse", "method": "kfac", "epochs": 20},
        **{"evaluate_every": 20},
    )
    tried = [(f"{2.0**z:.12g}", f"{2.0**-y:.12g}") for z in numbers for y in numbers]
    chosen = scale.choose((0.0, 1.0), (0.0, 1.0, 2.0), POWERS)
    parts: dict[str, Part] = {}

    def fixed(width: float, x: float, y: float) -> Part:
        schemes = tuple(f"mup/fixed:{a},{b},1,{x:g},{y:g}" for a, b in tried)
        return study(scale, config, schemes, widths=(width,), lr=(0.01,), seeds=scale.choose(1, 1, 2))

    parts["narrow"] = fixed(narrow, 1, 1)
    parts.update({name(x, y): fixed(wide, x, y) for x in chosen for y in chosen})
    claims = [
        Claim(
            f"The damping that is best at width {narrow} is best for width {wide} if scaled with d_A = -1, d_B = 1.",
            highest_at_one(chosen),
            "highest at d_A = -1 and d_B = 1",
        )
    ]
    draw = drawing.heat(lambda evidence: cells(evidence, chosen), x="$d_A$", y="$d_B$")
    choices = (
        f"The figure's widths and what was tuned where are not said: rho_A' and rho_B' are tuned at width {narrow} on "
        "every second number of the paper's grid, and carried to "
        f"width {wide} by M^-d of every layer's infinite sides.",
        *(FULL_BATCH, MOMENTUM, BASE),
    )
    return Experiment(parts, claims, draw, choices)


def name(x: float, y: float) -> str:
    return f"d_A = {0.0 - x:g}, d_B = {y:g}"


def tuned(evidence: Evidence) -> tuple[str, str] | None:
    """The numbers that are best at the narrow width."""
    record = evidence.study("narrow")
    found = best(settings(record), record.metric)
    if found is None:
        return None
    a, b = found.scheme.partition("fixed:")[2].split(",")[:2]
    return a, b


def cells(evidence: Evidence, chosen: Sequence[float]) -> tuple[list[str], list[str], list[list[float]]]:
    found = tuned(evidence)
    matrix = [[accuracy(evidence, found, x, y).mean for x in chosen] for y in chosen]
    return [f"{0.0 - x:g}" for x in chosen], [f"{y:g}" for y in chosen], matrix


def accuracy(evidence: Evidence, numbers: tuple[str, str] | None, x: float, y: float) -> Value:
    record = evidence.study(name(x, y))
    for scheme in record.schemes:
        if numbers is not None and tuple(scheme.partition("fixed:")[2].split(",")[:2]) == numbers:
            return best_value(record, scheme, record.widths[0])
    return Value(math.nan, None)


def highest_at_one(chosen: Sequence[float]) -> Check:
    """No other scaling beats (-1, 1) beyond noise."""

    def check(evidence: Evidence) -> Finding:
        numbers = tuned(evidence)
        found = {(x, y): accuracy(evidence, numbers, x, y) for x in chosen for y in chosen}
        there = {place: value for place, value in found.items() if not math.isnan(value.mean)}
        if (1.0, 1.0) not in there:
            return Finding(FAILS if there else UNTOLD, "it does not finish there")
        top = max(there, key=lambda place: there[place].mean)
        here = there[1.0, 1.0]
        said = (
            f"{100 * here.mean:.2f}% at (-1, 1); highest {100 * there[top].mean:.2f}% at ({0.0 - top[0]:g}, {top[1]:g})"
        )
        verdict = FAILS if differ(there[top], here) == "above" else HOLDS
        return Finding(verdict, f"{said}; {len(found) - len(there)} of {len(found)} diverge")

    return check


# Through training.


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
            varies(data),
        )
        for data in parts
    ]
    claims += [Claim(f"{data}: the damping follows the mean eigenvalues.", follows(data)) for data in parts]
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


def varies(part: str, times: float = 2.0) -> Check:
    """By a factor of two at least in half of the factors, over the epochs; and the damping likewise."""

    def check(evidence: Evidence) -> Finding:
        rows = max((result.rows for result in evidence.study(part).results), key=len)
        changes: dict[str, list[float]] = {"mean": [], "damping": []}
        for kind, found in changes.items():
            columns = [name for name in (rows[-1] if rows else ()) if name.startswith(f"{kind}/")]
            for column in columns:
                values = [row[column] for row in rows if row.get(column)]
                if len(values) > 1:
                    found.append(max(values) / min(values))
        if not all(changes.values()):
            return Finding(UNTOLD, f"{part}: not read at two epochs")
        shares = {kind: sum(each >= times for each in found) / len(found) for kind, found in changes.items()}
        said = ", ".join(
            f"{100 * share:.0f}% of the {kind}s change by {times:g} or more" for kind, share in shares.items()
        )
        right = [share >= 0.5 for share in shares.values()]
        return Finding(HOLDS if all(right) else IN_PART if any(right) else FAILS, f"{part}: {said}")

    return check


def follows(part: str, least: float = 0.5) -> Check:
    """Over the epochs a factor's damping and its mean eigenvalue are correlated, in logarithms and in most factors."""

    def check(evidence: Evidence) -> Finding:
        rows = max((result.rows for result in evidence.study(part).results), key=len)
        found = []
        for column in (name for name in (rows[-1] if rows else ()) if name.startswith("mean/")):
            damping = column.replace("mean/", "damping/", 1)
            pairs = [
                (math.log(row[column]), math.log(row[damping])) for row in rows if row.get(column) and row.get(damping)
            ]
            if len(pairs) > 2 and all(len(set(side)) > 1 for side in zip(*pairs, strict=True)):
                found.append(correlation(*zip(*pairs, strict=True)))
        if not found:
            return Finding(UNTOLD, f"{part}: not read at three epochs")
        share = sum(each > least for each in found) / len(found)
        said = f"{part}: correlation above {least:g} in {100 * share:.0f}% of {len(found)} factors"
        return Finding(HOLDS if share > 0.5 else FAILS, said)

    return check
