"""The recipes on the variance of the output layer, with which K-FAC enters the kernel regime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev
from typing import Any

from mukron.paper import drawing, earlier
from mukron.paper.claims import (
    BestOf,
    ClaimCheck,
    Value,
    alike,
    all_of,
    beats,
    difference,
    lower_rate,
    margin_of,
    revised,
)
from mukron.paper.drawing import ComparedPanel, ExponentPanel
from mukron.paper.effects import POINTS, effect_of
from mukron.paper.evidence import Evidence
from mukron.paper.recipe import (
    FAILS,
    HOLDS,
    UNTOLD,
    Claim,
    Experiment,
    Finding,
    Part,
    Regression,
    Scale,
    recipe,
)
from mukron.paper.settings import (
    BASE,
    FLOOR,
    MOMENTUM,
    NORMAL,
    PAPER_SAMPLES,
    TORCHS,
    WEIGHTS,
    powers,
    rescaled,
    roots,
    setting,
    study,
)
from mukron.study.design import Design

EXPONENTS = (0.5, 1.0, 2.0, 4.0, 16.0, 64.0)
MAIN_EXPONENTS = (0.5, 1.0, 64.0)
NNGP_METHODS = {
    "SGD": ("sgd", "mup"),
    "Shampoo": ("shampoo", "mup/max-eigenvalue:0.001"),
    "K-FAC": ("kfac", f"mup/{rescaled(1)}"),
}
CNN_WIDTH, CNN_BASE_WIDTH = 32, 4
NNGP_CHOICES = (
    f"Width: not given; {CNN_WIDTH} channels in the first layer and {2 * CNN_WIDTH} in the second, base width "
    f"{CNN_BASE_WIDTH}.",
    "Learning rates: the paper's 2^z from z = 1 down to -20; every second one for Shampoo, and 2^-16 to 1 of those "
    "for smaller batches.",
    "Seeds: not given; 5 of SGD and K-FAC for b_L = 0.5, 1 and 64 with all samples in one batch, else 1.",
    "Shampoo's roots by Newton's iteration, renewed every 5 steps.",
    WEIGHTS,
    BASE,
    FLOOR,
)
KERNEL_CHOICE = (
    "Kernel regression: of the initial network's last features, with the ridge that the damping of K-FAC's first step "
    "amounts to."
)
KERNEL = "kernel regression"
KERNEL_RULE = (
    "Earlier, a lower accuracy at b_L = 64 than at 1 was enough, which an optimizer that fails there shows too. Now "
    "the accuracy has to be that of the kernel regression."
)
EVERY_EXPONENT_RULE = (
    "Earlier, b_L = 1 and 64 were compared, whatever the noise. Now every b_L from 1 on that was run is, and a "
    "difference has to lie within 3 points with its noise."
)


def nngp_part_name(method: str, b: float, batch: int = PAPER_SAMPLES) -> str:
    """Returns the name of a method's part at one b_L and batch size."""
    return f"{method}, b_L = {b:g}, batch {batch}"


def tuned_part(scale: Scale, method: str, b: float, batch: int = PAPER_SAMPLES, **fields: Any) -> Design:
    """Returns the study that tunes the learning rate of a three-layer CNN on Fashion-MNIST at one b_L."""
    optimizer, scheme = NNGP_METHODS[method]
    defaults = {
        **{"model": "cnn", "base_width": scale.choose(4, 2, CNN_BASE_WIDTH), "data": "fashion-mnist"},
        **{"samples": PAPER_SAMPLES, "loss": "mse", "model_options": NORMAL},
        **{"method": optimizer, "output_exponent": f"{b:g}", "batch": None if batch >= PAPER_SAMPLES else batch},
        **{"epochs": 50, "momentum": 0.9, "evaluate_every": 5, "dtype": "tf32" if method != "Shampoo" else "float32"},
    }
    if method == "Shampoo":
        defaults["method_options"] = {"solver": roots(scale), "inverse_every": 5}
    config = setting(scale, **{**defaults, **fields})
    width = scale.choose(8, 16, CNN_WIDTH)  # at 8 times the base width b_L = 64 is zero in float32
    paper_rates = (
        powers(-20, 1)
        if batch == PAPER_SAMPLES and method != "Shampoo"
        else powers(-19, 1, 2)
        if batch == PAPER_SAMPLES
        else powers(-16, 0, 2)
    )
    rates = scale.choose((2.0**-4,), powers(-9, 0, 3), paper_rates)
    if scale is Scale.SMALL:
        config = config.replace(epochs=20, samples=256, test_samples=2000)
    main_seeds = 5 if b in MAIN_EXPONENTS and batch == PAPER_SAMPLES and method != "Shampoo" else 1
    return study(scale, config, scheme, widths=(width,), lr=rates, seeds=scale.choose(1, 1, main_seeds))


def kernel_part(scale: Scale, **fields: Any) -> Regression:
    """Returns kernel regression on the features that K-FAC starts from, with the ridge that its damping amounts to."""
    design = tuned_part(scale, "K-FAC", 64.0, **fields)
    scheme, _, damping = design.schemes[0].partition("/")
    config = design.config.replace(scheme=scheme, damping=damping, dtype="float32", epochs=1, evaluate_every=1)
    return Regression(config, design.widths, len(design.seeds))


def falls_to_the_kernel(b: float) -> ClaimCheck:
    """Checks that K-FAC at a b_L ends with the test accuracy of kernel regression, within 3 points."""
    return alike(BestOf(KERNEL, name="kernel regression:"), [best_at("K-FAC", b)], 0.03)


def figure(scale: Scale, **fields: Any) -> tuple[dict[str, Part], list[ExponentPanel]]:
    """Returns parts and panels of accuracy against b_L for the three methods, with all samples in one batch."""
    exponents = scale.choose((0.5, 64.0), MAIN_EXPONENTS, EXPONENTS)
    parts: dict[str, Part] = {
        nngp_part_name(method, b): tuned_part(scale, method, b, **fields) for method in NNGP_METHODS for b in exponents
    }
    parts[KERNEL] = kernel_part(scale, **fields)
    return parts, [ExponentPanel(method, {b: nngp_part_name(method, b) for b in exponents}) for method in NNGP_METHODS]


def best_at(method: str, b: float, batch: int = PAPER_SAMPLES) -> BestOf:
    """Returns the best setting of a part."""
    return BestOf(nngp_part_name(method, b, batch), name=f"{method}, b_L = {b:g}:")


def best_training(method: str, b: float) -> BestOf:
    """Returns the best setting of a part, to be read by its training accuracy."""
    return BestOf(nngp_part_name(method, b), name=f"{method}, b_L = {b:g}:", metric="train_accuracy")


def one_beats(method: str, other: float, batch: int = PAPER_SAMPLES) -> ClaimCheck:
    """Checks that b_L = 1 is better than another b_L."""
    return beats(best_at(method, 1.0, batch), best_at(method, other, batch))


def almost_the_same(method: str, above: Sequence[float]) -> ClaimCheck:
    """Checks that no b_L above 1 differs by more than 3 points from 1."""
    tuned = alike(best_at(method, 1.0), [best_at(method, b) for b in above], 0.03)
    return revised(tuned, earlier.close(best_at(method, 1.0), best_at(method, 64.0), 0.03), EVERY_EXPONENT_RULE)


def nngp_claims(scale: Scale, tried: str = "") -> list[Claim]:
    """Returns the claims of the paper's figures over b_L; ``tried`` belongs to the one about SGD."""
    if scale is Scale.SMOKE:
        return [Claim("K-FAC: b_L = 64 is worse than 0.5.", beats(best_at("K-FAC", 0.5), best_at("K-FAC", 64.0)))]
    rest = [b for b in scale.choose(MAIN_EXPONENTS, MAIN_EXPONENTS, EXPONENTS) if b > 1]
    return [
        Claim("K-FAC is better at b_L = 1 than at 0.5.", one_beats("K-FAC", 0.5)),
        Claim("K-FAC is worse where b_L is much above 1 than at 1.", one_beats("K-FAC", 64.0)),
        Claim(
            "K-FAC falls to the kernel's solution where b_L is much above 1: its accuracy, within 3 points.",
            revised(falls_to_the_kernel(64.0), one_beats("K-FAC", 64.0), KERNEL_RULE),
        ),
        Claim(
            "K-FAC: the training accuracy is highest at b_L = 1 alone.",
            all_of(*(beats(best_training("K-FAC", 1.0), best_training("K-FAC", b)) for b in (0.5, *rest))),
        ),
        Claim(
            "K-FAC: no b_L above 1 beats 1.",
            all_of(*(beats(best_at("K-FAC", 1.0), best_at("K-FAC", b), True) for b in rest)),
        ),
        Claim(
            "SGD is almost the same at b_L = 1 and at every b_L above it: within 3 points.",
            almost_the_same("SGD", rest),
            tried=tried,
        ),
        Claim(
            "Shampoo is almost the same at b_L = 1 and at every b_L above it: within 3 points.",
            almost_the_same("Shampoo", rest),
        ),
    ]


@recipe("nngp", "Figure 3", "K-FAC converges to the NNGP solution when the last layer starts near zero")
def kernel_regime(scale: Scale) -> Experiment:
    parts, panels = figure(scale)
    claims = nngp_claims(scale, tried=f"{TORCHS}it held by the earlier rule.")
    return Experiment(
        parts,
        claims,
        drawing.over_exponent(panels, second="train_accuracy", level=KERNEL),
        (MOMENTUM, *NNGP_CHOICES, KERNEL_CHOICE),
    )


@recipe("k-fac-nngp-cross-entropy", "Appendix E.2, figure", "The same with cross-entropy")
def cross_entropy(scale: Scale) -> Experiment:
    parts, panels = figure(scale, loss="cross-entropy")
    return Experiment(
        parts,
        nngp_claims(scale),
        drawing.over_exponent(panels, second="train_accuracy", level=KERNEL),
        (MOMENTUM, *NNGP_CHOICES, KERNEL_CHOICE),
    )


@recipe("k-fac-nngp-cross-wo-momentum", "Appendix E.4, figure", "The same with cross-entropy and without momentum")
def without_momentum(scale: Scale) -> Experiment:
    parts, panels = figure(scale, loss="cross-entropy", momentum=0.0)
    return Experiment(
        parts,
        nngp_claims(scale),
        drawing.over_exponent(panels, second="train_accuracy", level=KERNEL),
        (*NNGP_CHOICES, KERNEL_CHOICE),
    )


@recipe("train-curve-cnn-fashion-mnist", "Appendix E.1, figure", "Training curves for different b_L")
def curves(scale: Scale) -> Experiment:
    exponents = scale.choose((0.5, 64.0), MAIN_EXPONENTS, MAIN_EXPONENTS)
    methods = ("SGD", "K-FAC")
    parts: dict[str, Part] = {
        nngp_part_name(method, b): tuned_part(scale, method, b) for method in methods for b in exponents
    }
    first = exponents[0] if scale is Scale.SMOKE else 1.0
    claims = [
        Claim(
            "K-FAC at b_L = 64 has a high test accuracy after the first evaluation already, above that at b_L = 1.",
            higher_at_first(nngp_part_name("K-FAC", 64.0), nngp_part_name("K-FAC", first)),
            tried=f"{TORCHS}the same.",
        ),
        Claim("In the end it is lower.", beats(best_at("K-FAC", first), best_at("K-FAC", 64.0))),
        Claim(
            "The best learning rate of b_L = 64 is smaller than that of the others.",
            all_of(*(lower_rate(best_at("K-FAC", 64.0), best_at("K-FAC", b)) for b in exponents if b < 64)),
        ),
    ]
    panels = [
        ComparedPanel(method, {f"$b_L$ = {b:g}": nngp_part_name(method, b) for b in exponents}) for method in methods
    ]
    choices = ("The runs are those of Figure 3. Test accuracy is read every 5 epochs.", MOMENTUM, *NNGP_CHOICES)
    return Experiment(parts, claims, drawing.compared_over_epochs(panels), choices)


def higher_at_first(above: str, below: str) -> ClaimCheck:
    """Checks that one part's accuracy at the first evaluation is above another's."""

    def check(evidence: Evidence) -> Finding:
        accuracies = {}
        for name in (above, below):
            curves = [
                [row["test_accuracy"] for row in result.rows if "test_accuracy" in row]
                for result in evidence.study(name).results
            ]
            longest = max(map(len, curves), default=0)
            firsts = [curve[0] for curve in curves if longest > 1 and len(curve) == longest]
            if not firsts:
                return Finding(UNTOLD, f"{name}: no curve")
            accuracies[name] = max(firsts)
        measured = " against ".join(f"{100 * value:.2f}% ({name})" for name, value in accuracies.items())
        gap = accuracies[above] - accuracies[below]
        effect = effect_of(100 * gap, None, None, POINTS)
        return Finding(HOLDS if gap > 0 else FAILS, f"at the first evaluation {measured}", effect=effect)

    return check


# Ours: with an absolute part in the damping.

EPS_TRIED, FIRST_STEPS, STEPS_RUN, EPS_RATE = (0.0, 1e-7, 1e-6), 5, 8, 2.0**-8
KERNEL_MARGIN = 0.03


@recipe("nngp-eps", "Ours, beside Figure 3", "K-FAC stays at the NNGP solution with an absolute part in its damping")
def absolute_part(scale: Scale) -> Experiment:
    """Ours: the first steps of Figure 3 at a large b_L, one by one, with and without an eps in the damping."""
    exponents = scale.choose((64.0,), (64.0,), (16.0, 64.0))
    first: dict[str, Any] = {"epochs": STEPS_RUN, "evaluate_every": 1, "dtype": "float32"}
    parts: dict[str, Part] = {}
    for b, eps in product(exponents, EPS_TRIED):
        design = tuned_part(scale, "K-FAC", b, **first)
        rule = f"mup/{rescaled(1)}" + (f",{eps:g}" if eps else "")
        steps = min(STEPS_RUN, design.config.epochs) if scale is Scale.SMOKE else STEPS_RUN
        config = design.config.replace(epochs=steps)
        seeds = scale.choose((0,), (0, 1), (0, 1, 2, 3, 4))
        parts[eps_part_name(b, eps)] = replace(design, config=config, schemes=(rule,), lr=(EPS_RATE,), seeds=seeds)
    parts[KERNEL] = kernel_part(scale)
    claims = [
        Claim(
            f"K-FAC at b_L = {b:g} {words} the kernel's accuracy at the first {FIRST_STEPS} steps: within 3 points.",
            stays_at_the_kernel(eps_part_name(b, eps)),
            ours=True,
        )
        for b in exponents
        for eps, words in ((EPS_TRIED[-1], f"with eps = {EPS_TRIED[-1]:g} has"), (0.0, "without an eps has"))
    ]
    panels = [
        ComparedPanel(f"K-FAC, $b_L$ = {b:g}", {f"eps = {eps:g}": eps_part_name(b, eps) for eps in EPS_TRIED})
        for b in exponents
    ]
    choices = (
        "Not in the paper, whose rule of damping has no absolute part; the library of its authors has one of 1e-7. One "
        "learning rate, 2^-8, and all samples in one batch, so an epoch is a step.",
        *(MOMENTUM, *NNGP_CHOICES, KERNEL_CHOICE),
    )
    return Experiment(parts, claims, drawing.compared_over_epochs(panels, level=KERNEL), choices)


def eps_part_name(b: float, eps: float) -> str:
    """Returns the name of a part from b_L and the absolute part of the damping."""
    return f"K-FAC, b_L = {b:g}, eps = {eps:g}"


def stays_at_the_kernel(part: str) -> ClaimCheck:
    """Checks that after each of the first steps a part has the accuracy of kernel regression, within 3 points.

    It holds if every difference and its noise lie within, and fails if one lies outside with its noise.
    """

    def check(evidence: Evidence) -> Finding:
        kernel, record = BestOf(KERNEL).value(evidence), evidence.study(part)
        found = {
            epoch: [value for run in record.results if (value := run.value(record.metric, epoch)) is not None]
            for epoch in range(1, FIRST_STEPS + 1)
        }
        lost = [epoch for epoch, values in found.items() if len(values) < len(record.results)]
        shown = ", ".join(f"{100 * fmean(values):.2f}%" if values else "-" for values in found.values())
        measured = f"kernel regression: {100 * kernel.mean:.2f}%; {part}, step by step: {shown}"
        if lost:
            return Finding(FAILS if any(run.status != "finished" for run in record.results) else UNTOLD, measured)
        values = [Value(fmean(seeds), _error(seeds)) for seeds in found.values()]
        worst = max(values, key=lambda value: abs(value.mean - kernel.mean))
        effect = difference(worst, kernel)
        gap, margin = abs(worst.mean - kernel.mean), margin_of(worst, kernel)
        if gap - margin > KERNEL_MARGIN:
            return Finding(FAILS, measured, effect=effect)
        sure = all(abs(value.mean - kernel.mean) + margin_of(value, kernel) <= KERNEL_MARGIN for value in values)
        return Finding(HOLDS if sure else UNTOLD, measured, effect=effect)

    return check


def _error(seeds: Sequence[float]) -> float | None:
    return stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
