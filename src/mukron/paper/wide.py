"""The recipes of wide convolutional networks trained to the end: accuracies, training curves, distances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from mukron.paper import drawing
from mukron.paper.claims import BestOf, ClaimCheck, Value, beats, differ, difference, revised
from mukron.paper.drawing import Panel, WidthLine, WidthPanel
from mukron.paper.evidence import Evidence
from mukron.paper.imagenet import IMAGENET, IMAGENET_EPOCHS, imagenet
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Claim, Experiment, Finding, Part, Scale, recipe
from mukron.paper.settings import BASE, FLOOR, MOMENTUM, rescaled, roots, setting, study
from mukron.paper.widths import wider_is_better, wider_throughout
from mukron.study.design import Design
from mukron.study.points import label
from mukron.study.record import StudyRecord

CIFAR_WIDTHS, CIFAR_EPOCHS = (1.0, 2.0, 4.0, 8.0, 16.0), 300
CIFAR_CHOICES = (
    "The original network is width 4; width 1 is the base width.",
    "Batch size and schedule: not given; 128 and cosine, as in the code that the paper names for CIFAR.",
    "tau is not defined in the paper; 0.5 is read as the weight of the newest batch in the average of the factors.",
    "Damping: one rule in SP and muP, since the paper's two arms agree at the base width (+0.23 points, and +0.00 in "
    "G.1): K-FAC's rescaled one, and of Shampoo 0.001 times the largest eigenvalue, as for Figure 3 (not given). "
    "Results of other rules name them.",
    "Factors and K-FAC's inverses are renewed every 20 steps, Shampoo's roots (by Newton's iteration) every 100.",
    "Weight decay: not given; 0.0005, as in the code that the paper names for CIFAR.",
    *(MOMENTUM, BASE, FLOOR),
)
ByWidth = Mapping[float, float]


def cifar(scale: Scale, model: str, data: str, method: str, **fields: Any) -> Any:
    """Returns the configuration of a network on CIFAR."""
    options = {"memory": "ema:0.5", "factor_every": 20, "inverse_every": 20}
    if method == "shampoo":
        options |= {"inverse_every": 100, "solver": roots(scale)}
    config = setting(
        scale,
        **{"model": model, "data": data, "loss": "cross-entropy", "label_smoothing": 0.1, "method": method},
        **{
            "augment": ("crop", "flip", "autoaugment", "cutout"),
            "batch": 128,
            "epochs": CIFAR_EPOCHS,
            "schedule": "cosine",
        },
        **{"momentum": 0.9, "weight_decay": 5e-4},
        **{"method_options": options, "dtype": "tf32" if method == "kfac" else "float32", **fields},
    )
    return config.replace(samples=512, test_samples=500, epochs=3) if scale is Scale.SMALL else config


def schemes(method: str, rho: float = 10.0) -> dict[str, str]:
    """Returns SP and muP with the method's damping."""
    if method == "kfac":
        return {"SP": f"sp/{rescaled(rho)}", "muP": f"mup/{rescaled(rho)}"}
    return {"SP": "sp/max-eigenvalue:0.001", "muP": "mup/max-eigenvalue:0.001"}


METHOD_TITLES = {"kfac": "K-FAC", "shampoo": "Shampoo"}


def sp_and_mup(
    scale: Scale,
    model: str,
    data: str,
    method: str,
    lr: float,
    seeds: int = 1,
    widths: tuple[float, ...] = CIFAR_WIDTHS,
    **fields: Any,
) -> dict[str, Design]:
    """Returns the studies of SP and muP at one learning rate over widths."""
    sizes = scale.choose((1.0, 2.0), (1.0, 2.0), widths)
    config = cifar(scale, model, data, method, **fields)
    return {
        title: study(scale, config, scheme, widths=sizes, lr=(lr,), seeds=scale.choose(1, 1, seeds))
        for title, scheme in schemes(method).items()
    }


def printed_accuracies(sp: tuple[float, ...], gains: tuple[float, ...]) -> tuple[ByWidth, ByWidth]:
    """Returns the accuracies by width of SP and muP, from the percentages and gains that the paper prints.

    Args:
        sp: The percentages of SP at ``CIFAR_WIDTHS``.
        gains: The gains of muP over SP, in percentage points.

    Returns:
        The accuracies of SP and of muP by width.

    Example:
        >>> printed_accuracies((50.0,), (1.0,))
        ({1.0: 0.5}, {1.0: 0.51})
    """
    sp_percent = dict(zip(CIFAR_WIDTHS, sp, strict=False))
    return (
        {width: value / 100 for width, value in sp_percent.items()},
        {width: (value + gain) / 100 for (width, value), gain in zip(sp_percent.items(), gains, strict=True)},
    )


LEAST_SHARE = 1 / 3  # of the paper's epochs: its appendix G.1 prints accuracies after 100, 200 and 300
MUP_WINS_RULE = (
    "Earlier, the accuracies at the widest were compared whatever had been run. Now both arms need one rule of "
    "damping, as in the paper, and a third of the paper's epochs."
)


def mup_wins(sp: str, mup: str, epochs: int) -> ClaimCheck:
    """Checks that muP is better than SP at the widest; the finding says at how many widths it is.

    It is not determined if the two have different rules of damping, or fewer than a third of the paper's epochs.

    Args:
        sp: The study of SP.
        mup: The study of muP.
        epochs: The paper's number of epochs.

    Returns:
        The check.
    """

    def check(evidence: Evidence) -> Finding:
        records = evidence.study(sp), evidence.study(mup)
        widest = beats(BestOf(mup), BestOf(sp))(evidence)
        values = {
            width: (BestOf(mup, width).value(evidence), BestOf(sp, width).value(evidence))
            for width in records[1].widths
        }
        measured, effect, obstacles = f"{_differences(values)}; {widest.measured}", widest.effect, _two_rules(*records)
        if min(record.config.epochs for record in records) < LEAST_SHARE * epochs:
            obstacles.append(f"{records[1].config.epochs} of the paper's {epochs} epochs were run")
        if obstacles:
            return Finding(UNTOLD, f"{'; '.join(obstacles)}; {measured}", effect=effect)
        return Finding(widest.verdict, measured, effect=effect)

    return revised(check, beats(BestOf(mup), BestOf(sp)), MUP_WINS_RULE)


def mup_wins_early(sp: str, mup: str, epochs: int) -> ClaimCheck:
    """Checks that muP is better than SP at the widest within the first third of the paper's epochs.

    It is not determined if the two have different rules of damping.

    Args:
        sp: The study of SP.
        mup: The study of muP.
        epochs: The paper's number of epochs.

    Returns:
        The check, which compares the last epoch of that third that every run has.
    """

    def check(evidence: Evidence) -> Finding:
        records = evidence.study(sp), evidence.study(mup)
        read = [
            {row["epoch"] for row in result.rows if row.get(record.metric) is not None}
            for record in records
            for result in record.results
            if result.status == "finished"
        ]
        early = [epoch for epoch in set.intersection(*read) if epoch <= LEAST_SHARE * epochs] if read else []
        if not early:
            return Finding(UNTOLD, "nothing was read early in training")
        values = {
            width: (_at_epoch(records[1], width, max(early)), _at_epoch(records[0], width, max(early)))
            for width in records[1].widths
        }
        widest = values[records[1].widths[-1]]
        order, effect = differ(*widest), difference(*widest)
        measured = f"after {max(early)} epochs, {_differences(values)}"
        if obstacles := _two_rules(*records):
            return Finding(UNTOLD, f"{'; '.join(obstacles)}; {measured}", effect=effect)
        return Finding({"above": HOLDS, "alike": UNTOLD, "below": FAILS}[order], measured, effect=effect)

    return check


def _at_epoch(record: StudyRecord, width: float, epoch: int) -> Value:
    """Returns the mean over seeds of a width's only setting after an epoch."""
    runs = [result for result in record.results if result.point.width == width]
    values = [value for result in runs if (value := result.value(record.metric, epoch)) is not None]
    if not values or len(values) < len(runs):
        return Value(math.nan, None)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Value(fmean(values), error, record.metric.endswith("accuracy"))


def _differences(values: Mapping[float, tuple[Value, Value]]) -> str:
    """Returns muP's gains over SP by width, as findings show them."""
    gains = ", ".join(f"{100 * (a.mean - b.mean):+.2f} at {width:g}" for width, (a, b) in values.items())
    better = sum(differ(a, b) == "above" for a, b in values.values())
    return f"muP against SP, points: {gains}; better at {better} of {len(values)} widths"


def _two_rules(sp: StudyRecord, mup: StudyRecord) -> list[str]:
    """Returns why two arms are not comparable, if their rules of damping differ."""
    why = (
        f"two rules of damping were run, {label(sp.schemes[0])} and {label(mup.schemes[0])}, so the difference is not "
        "that of the parametrizations, which agree at the base width"
    )
    return [] if len({record.schemes[0].partition("/")[2] for record in (sp, mup)}) == 1 else [why]


RESNET18_ACCURACIES = {
    "kfac": printed_accuracies((66.81, 72.16, 74.38, 74.96, 74.26), (0.23, 0.28, 0.88, 1.98, 4.00)),
    "shampoo": printed_accuracies((66.42, 69.99, 73.85, 76.11, 77.91), (0.03, 0.22, 0.42, 1.04, 0.61)),
}
VGG19_ACCURACIES = {
    "kfac": printed_accuracies((64.96, 72.08, 76.38, 78.27), (0.31, 0.65, 0.22, 0.31)),
    "shampoo": printed_accuracies((63.86, 70.55, 74.61, 76.83, 78.11), (-0.28, -0.66, 0.80, 0.65, 0.56)),
}
# Appendix B; all others are 0.003.
CIFAR_RATES = {("vgg19", "cifar100", "kfac"): 0.01, ("resnet18", "cifar100", "shampoo"): 0.001}

EXTRA_FIELDS: Mapping[tuple[str, str], dict[str, Any]] = {  # appendix G.1
    ("resnet50", "kfac"): {"model_options": {"output": 1 / 16}}
}


@recipe("training_curve-right", "Figure 4, right", "ResNet-18 on CIFAR-100 with K-FAC over widths")
def training_curve(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {**sp_and_mup(scale, "resnet18", "cifar100", "kfac", 0.003)}
    claims = [
        Claim("In muP wider networks match or outperform narrower ones.", wider_is_better("muP", metric="test_loss")),
        Claim(
            "At the widest muP has the lower test loss.",
            beats(BestOf("muP", metric="test_loss"), BestOf("SP", metric="test_loss")),
        ),
        Claim("In muP the training loss is lower the wider, throughout.", wider_throughout("muP", "train_loss")),
    ]
    rows = [
        [Panel(f"{title}: test loss", title, quantity="test_loss") for title in parts],
        [Panel(f"{title}: training loss", title, quantity="train_loss") for title in parts],
    ]
    return Experiment(parts, claims, drawing.over_epochs(rows), CIFAR_CHOICES)


def accuracies(
    scale: Scale, tables: Mapping[tuple[str, str, str], Mapping[str, tuple[ByWidth, ByWidth]]], seeds: int = 1
) -> Experiment:
    """Returns an experiment on SP and muP over widths, next to the accuracies that the paper prints.

    Args:
        scale: The scale.
        tables: By title, model and data, then by method: the accuracies of SP and muP by width.
        seeds: The number of seeds at the paper's scale.

    Returns:
        The experiment.
    """
    parts: dict[str, Part] = {}
    claims: list[Claim] = []
    panels = []
    for (title, model, data), methods in tables.items():
        for method, printed in methods.items():
            widths = tuple(printed[0])
            lr, extra = CIFAR_RATES.get((model, data, method), 0.003), EXTRA_FIELDS.get((model, method), {})
            designs = sp_and_mup(scale, model, data, method, lr, seeds, widths, **extra)
            name = f"{title}, {METHOD_TITLES[method]}"
            parts.update({f"{name}, {scheme}": design for scheme, design in designs.items()})
            sp, mup = f"{name}, SP", f"{name}, muP"
            last = widths[-1]
            claims += [
                Claim(
                    f"{name}: muP has the higher accuracy at large widths.",
                    mup_wins(sp, mup, CIFAR_EPOCHS),
                    f"{100 * printed[1][last]:.2f} against {100 * printed[0][last]:.2f} at {last:g} after "
                    f"{CIFAR_EPOCHS} epochs",
                ),
                Claim(
                    f"{name}: at the widest muP has it within a third of the paper's epochs.",
                    mup_wins_early(sp, mup, CIFAR_EPOCHS),
                    ours=True,
                ),
            ]
            lines = [WidthLine("SP", sp, None, printed[0]), WidthLine("muP", mup, None, printed[1])]
            panels.append(WidthPanel(name, lines))
    return Experiment(parts, claims, drawing.best_over_width(panels), CIFAR_CHOICES)


@recipe("resnet-val-acc", "Table 3", "Test accuracies with different widths: ResNet-18 on CIFAR-100")
def resnet18_table(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-18", "resnet18", "cifar100"): RESNET18_ACCURACIES})


@recipe("resnet-val-acc-vgg19", "Table 3", "Test accuracies with different widths: VGG-19 on CIFAR-100")
def vgg19_table(scale: Scale) -> Experiment:
    return accuracies(scale, {("VGG-19", "vgg19", "cifar100"): VGG19_ACCURACIES})


@recipe("resnet-val-acc-imagenet", "Table 3", "Test accuracies with different widths: ResNet-50 on ImageNet")
def imagenet_table(scale: Scale) -> Experiment:
    printed = printed_accuracies((61.94, 62.00, 75.64, 78.63), (0.17, 0.12, 0.26, 0.13))
    sizes = scale.choose((1.0, 2.0), (1.0, 2.0), CIFAR_WIDTHS[:4])
    config = imagenet(scale)
    parts: dict[str, Part] = {
        title: study(scale, config, scheme, widths=sizes, lr=(0.2,), seeds=1)
        for title, scheme in schemes("kfac", 0.001).items()
    }
    claims = [
        Claim(
            "muP has the higher accuracy at large widths.",
            mup_wins("SP", "muP", IMAGENET_EPOCHS),
            "78.76 against 78.63 at 8",
        )
    ]
    lines = [WidthLine(title, title, None, paper) for title, paper in zip(parts, printed, strict=True)]
    return Experiment(parts, claims, drawing.best_over_width([WidthPanel("ResNet-50, K-FAC", lines)]), IMAGENET)


CIFAR10_ACCURACIES = {
    "kfac": printed_accuracies((91.97, 94.32, 95.57, 95.73, 95.31), (0.00, 0.03, 0.14, 0.44, 0.72)),
    "shampoo": printed_accuracies((91.57, 93.95, 95.56, 96.09, 96.49), (-0.14, 0.05, -0.10, -0.04, 0.24)),
}
RESNET50_ACCURACIES = {
    "kfac": printed_accuracies((72.28, 74.30, 73.79, 68.56), (1.93, 3.23, 5.91, 12.09)),
    "shampoo": printed_accuracies((69.20, 73.05, 76.57, 78.08), (-0.02, 0.20, 0.31, 1.74)),
}
RESNET18_MEANS = {
    "kfac": (
        dict(zip(CIFAR_WIDTHS, (0.6702, 0.7188, 0.7409, 0.7490, 0.7429), strict=True)),
        dict(zip(CIFAR_WIDTHS, (0.6700, 0.7231, 0.7506, 0.7692, 0.7812), strict=True)),
    ),
    "shampoo": (
        dict(zip(CIFAR_WIDTHS, (0.6701, 0.7083, 0.7380, 0.7623, 0.7805), strict=True)),
        dict(zip(CIFAR_WIDTHS, (0.6699, 0.7168, 0.7528, 0.7839, 0.8024), strict=True)),
    ),
}
VGG19_MEANS = {
    "shampoo": (
        dict(zip(CIFAR_WIDTHS, (0.6330, 0.7010, 0.7465, 0.7651, 0.7789), strict=True)),
        dict(zip(CIFAR_WIDTHS, (0.6301, 0.7021, 0.7504, 0.7730, 0.7835), strict=True)),
    )
}


@recipe("resnet18-kfac-val-acc", "Appendix G.1, table", "Test accuracies of ResNet-18 on CIFAR-10")
def cifar10(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-18", "resnet18", "cifar10"): CIFAR10_ACCURACIES})


@recipe("resnet50-kfac-val-acc", "Appendix G.1, table", "Test accuracies of ResNet-50 on CIFAR-100")
def resnet50(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-50", "resnet50", "cifar100"): RESNET50_ACCURACIES})


@recipe("resnet-val-acc-err", "Appendix G.2, table", "Test accuracies with error bars")
def error_bars(scale: Scale) -> Experiment:
    tables = {("VGG-19", "vgg19", "cifar100"): VGG19_MEANS, ("ResNet-18", "resnet18", "cifar100"): RESNET18_MEANS}
    return accuracies(scale, tables, seeds=5)


@recipe("distance-from-initial-weight", "Appendix G.3, figure", "Distance from the initial weights in the first epochs")
def early_training_distance(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {}
    for title, model, lr in (("VGG-19", "vgg19", 0.01), ("ResNet-50", "resnet50", 0.003)):
        extra = EXTRA_FIELDS.get((model, "kfac"), {})
        designs = sp_and_mup(scale, model, "cifar100", "kfac", lr, 1, CIFAR_WIDTHS[:4], record=("distance",), **extra)
        parts.update({f"{title}, {scheme}": design for scheme, design in designs.items()})
    claims = [
        Claim(
            f"{title}: early in training SP's weights move less the wider they are, muP's do not.",
            early_distance(title),
        )
        for title in ("VGG-19", "ResNet-50")
    ]
    rows = [
        [Panel(name, name, quantity="distance/") for name in parts if name.startswith(title)]
        for title in ("VGG-19", "ResNet-50")
    ]
    return Experiment(parts, claims, drawing.over_epochs(rows, label="|dW| / |W|, mean over layers"), CIFAR_CHOICES)


def early_distance(title: str) -> ClaimCheck:
    """Checks the distance from initialization after one epoch: it falls with the width in SP and not in muP."""

    def check(evidence: Evidence) -> Finding:
        ratios = {}
        for scheme in ("SP", "muP"):
            record = evidence.study(f"{title}, {scheme}")
            means = {}
            for result in record.results:
                first_epoch = next((row for row in result.rows if row["epoch"] == 1), {})
                if values := [value for name, value in first_epoch.items() if name.startswith("distance/") and value]:
                    means[result.point.width] = fmean(values)
            if len(means) < 2:
                return Finding(UNTOLD, f"{title}: too little was run")
            ratios[scheme] = means[max(means)] / means[min(means)]
        measured = ", ".join(f"{scheme} {ratio:.2f}" for scheme, ratio in ratios.items())
        conditions = [ratios["SP"] < 0.7, ratios["muP"] >= 0.9]
        verdict = HOLDS if all(conditions) else IN_PART if any(conditions) else FAILS
        return Finding(verdict, f"{title}: distance after one epoch, widest over narrowest: {measured}")

    return check
