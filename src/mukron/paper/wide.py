"""Wide convolutional networks trained long: accuracies, curves, distances."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from mukron.paper import drawing
from mukron.paper.claims import Check, Of, beats, differ, wider_is_better, wider_throughout
from mukron.paper.drawing import Panel, WidthLine, WidthPanel
from mukron.paper.imagenet import IMAGENET, imagenet
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Claim, Evidence, Experiment, Finding, Part, Scale, recipe
from mukron.paper.settings import BASE, FLOOR, MOMENTUM, heuristic, rescaled, roots, setting, study
from mukron.study.design import Design

WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0)
CHOICES = (
    "The original network is width 4; width 1 is the base width.",
    "Batch size and schedule: not given; 128 and cosine, as in the code that the paper names for CIFAR.",
    "tau is not defined in the paper; 0.5 is read as the weight of the newest batch in the average of the factors.",
    "Damping in SP: the heuristic with the same rho; of Shampoo 0.001, as for Figure 3 (not given).",
    "Factors and K-FAC's inverses are renewed every 20 steps, Shampoo's roots (by Newton's iteration) every 100.",
    "Weight decay: not given; 0.0005, as in the code that the paper names for CIFAR.",
    *(MOMENTUM, BASE, FLOOR),
)
Numbers = Mapping[float, float]


def cifar(scale: Scale, model: str, data: str, method: str, **fields: Any) -> Any:
    options = {"memory": "ema:0.5", "factor_every": 20, "inverse_every": 20}
    if method == "shampoo":
        options |= {"inverse_every": 100, "solver": roots(scale)}
    made = setting(
        scale,
        **{"model": model, "data": data, "loss": "cross-entropy", "label_smoothing": 0.1, "method": method},
        **{"augment": ("crop", "flip", "autoaugment", "cutout"), "batch": 128, "epochs": 300, "schedule": "cosine"},
        **{"momentum": 0.9, "weight_decay": 5e-4},
        **{"method_options": options, "dtype": "tf32" if method == "kfac" else "float32", **fields},
    )
    return made.replace(samples=512, test_samples=500, epochs=3) if scale is Scale.SMALL else made


def schemes(method: str, rho: float = 10.0) -> dict[str, str]:
    if method == "kfac":
        return {"SP": f"sp/{heuristic(rho)}", "muP": f"mup/{rescaled(rho)}"}
    return {"SP": "sp/max-eigenvalue:0.001", "muP": "mup/max-eigenvalue:0.001"}


TITLES = {"kfac": "K-FAC", "shampoo": "Shampoo"}


def both(
    scale: Scale,
    model: str,
    data: str,
    method: str,
    lr: float,
    seeds: int = 1,
    widths: tuple[float, ...] = WIDTHS,
    **fields: Any,
) -> dict[str, Design]:
    """SP and muP at one learning rate over widths."""
    sizes = scale.choose((1.0, 2.0), (1.0, 2.0), widths)
    config = cifar(scale, model, data, method, **fields)
    return {
        title: study(scale, config, scheme, widths=sizes, lr=(lr,), seeds=scale.choose(1, 1, seeds))
        for title, scheme in schemes(method).items()
    }


def plus(sp: tuple[float, ...], more: tuple[float, ...]) -> tuple[Numbers, Numbers]:
    """The paper prints SP, and muP as a difference."""
    there = dict(zip(WIDTHS, sp, strict=False))
    return (
        {width: value / 100 for width, value in there.items()},
        {width: (value + gain) / 100 for (width, value), gain in zip(there.items(), more, strict=True)},
    )


def mup_wins(sp: str, mup: str) -> Check:
    """At the widest of the widths; and at how many of all, in words."""

    def check(evidence: Evidence) -> Finding:
        widths = evidence.study(mup).widths
        better, said = 0, []
        for width in widths:
            a, b = (Of(part, width).value(evidence) for part in (mup, sp))
            better += differ(a, b) == "above"
            said.append(f"{100 * (a.mean - b.mean):+.2f} at {width:g}")
        widest = beats(Of(mup, widths[-1]), Of(sp, widths[-1]))(evidence)
        counted = f"better at {better} of {len(widths)} widths"
        return Finding(widest.verdict, f"muP against SP, points: {', '.join(said)}; {counted}; {widest.measured}")

    return check


RESNET18 = {
    "kfac": plus((66.81, 72.16, 74.38, 74.96, 74.26), (0.23, 0.28, 0.88, 1.98, 4.00)),
    "shampoo": plus((66.42, 69.99, 73.85, 76.11, 77.91), (0.03, 0.22, 0.42, 1.04, 0.61)),
}
VGG19 = {
    "kfac": plus((64.96, 72.08, 76.38, 78.27), (0.31, 0.65, 0.22, 0.31)),
    "shampoo": plus((63.86, 70.55, 74.61, 76.83, 78.11), (-0.28, -0.66, 0.80, 0.65, 0.56)),
}
LR = {("vgg19", "cifar100", "kfac"): 0.01, ("resnet18", "cifar100", "shampoo"): 0.001}  # appendix B; others 0.003

OWN: Mapping[tuple[str, str], dict[str, Any]] = {("resnet50", "kfac"): {"model_options": {"output": 1 / 16}}}  # G.1


@recipe("training_curve-right", "Figure 4, right", "ResNet-18 on CIFAR-100 with K-FAC over widths")
def training_curve(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {**both(scale, "resnet18", "cifar100", "kfac", 0.003)}
    claims = [
        Claim("In muP wider networks match or outperform narrower ones.", wider_is_better("muP", metric="test_loss")),
        Claim(
            "At the widest muP has the lower test loss.",
            beats(Of("muP", metric="test_loss"), Of("SP", metric="test_loss")),
        ),
        Claim("In muP the training loss is lower the wider, throughout.", wider_throughout("muP", "train_loss")),
    ]
    rows = [
        [Panel(f"{title}: test loss", title, quantity="test_loss") for title in parts],
        [Panel(f"{title}: training loss", title, quantity="train_loss") for title in parts],
    ]
    return Experiment(parts, claims, drawing.over_epochs(rows), CHOICES)


def accuracies(
    scale: Scale, wanted: Mapping[tuple[str, str, str], Mapping[str, tuple[Numbers, Numbers]]], seeds: int = 1
) -> Experiment:
    """SP and muP over widths, beside the paper's numbers: by network and data, then by method."""
    parts: dict[str, Part] = {}
    claims: list[Claim] = []
    panels = []
    for (title, model, data), methods in wanted.items():
        for method, printed in methods.items():
            widths = tuple(printed[0])
            lr, own = LR.get((model, data, method), 0.003), OWN.get((model, method), {})
            made = both(scale, model, data, method, lr, seeds, widths, **own)
            name = f"{title}, {TITLES[method]}"
            parts.update({f"{name}, {scheme}": each for scheme, each in made.items()})
            sp, mup = f"{name}, SP", f"{name}, muP"
            last = widths[-1]
            claims.append(
                Claim(
                    f"{name}: muP has the higher accuracy at large widths.",
                    mup_wins(sp, mup),
                    f"{100 * printed[1][last]:.2f} against {100 * printed[0][last]:.2f} at {last:g} after 300 epochs",
                )
            )
            lines = [WidthLine("SP", sp, None, printed[0]), WidthLine("muP", mup, None, printed[1])]
            panels.append(WidthPanel(name, lines))
    return Experiment(parts, claims, drawing.against_width(panels), CHOICES)


@recipe("resnet-val-acc", "Table 3", "Test accuracies with different widths: ResNet-18 on CIFAR-100")
def table(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-18", "resnet18", "cifar100"): RESNET18})


@recipe("resnet-val-acc-vgg19", "Table 3", "Test accuracies with different widths: VGG-19 on CIFAR-100")
def table_vgg(scale: Scale) -> Experiment:
    return accuracies(scale, {("VGG-19", "vgg19", "cifar100"): VGG19})


@recipe("resnet-val-acc-imagenet", "Table 3", "Test accuracies with different widths: ResNet-50 on ImageNet")
def table_imagenet(scale: Scale) -> Experiment:
    printed = plus((61.94, 62.00, 75.64, 78.63), (0.17, 0.12, 0.26, 0.13))
    sizes = scale.choose((1.0, 2.0), (1.0, 2.0), WIDTHS[:4])
    config = imagenet(scale)
    parts: dict[str, Part] = {
        title: study(scale, config, scheme, widths=sizes, lr=(0.2,), seeds=1)
        for title, scheme in schemes("kfac", 0.001).items()
    }
    claims = [Claim("muP has the higher accuracy at large widths.", mup_wins("SP", "muP"), "78.76 against 78.63 at 8")]
    lines = [WidthLine(title, title, None, paper) for title, paper in zip(parts, printed, strict=True)]
    return Experiment(parts, claims, drawing.against_width([WidthPanel("ResNet-50, K-FAC", lines)]), IMAGENET)


CIFAR10 = {
    "kfac": plus((91.97, 94.32, 95.57, 95.73, 95.31), (0.00, 0.03, 0.14, 0.44, 0.72)),
    "shampoo": plus((91.57, 93.95, 95.56, 96.09, 96.49), (-0.14, 0.05, -0.10, -0.04, 0.24)),
}
RESNET50 = {
    "kfac": plus((72.28, 74.30, 73.79, 68.56), (1.93, 3.23, 5.91, 12.09)),
    "shampoo": plus((69.20, 73.05, 76.57, 78.08), (-0.02, 0.20, 0.31, 1.74)),
}
ERROR_BARS = {
    "kfac": (
        dict(zip(WIDTHS, (0.6702, 0.7188, 0.7409, 0.7490, 0.7429), strict=True)),
        dict(zip(WIDTHS, (0.6700, 0.7231, 0.7506, 0.7692, 0.7812), strict=True)),
    ),
    "shampoo": (
        dict(zip(WIDTHS, (0.6701, 0.7083, 0.7380, 0.7623, 0.7805), strict=True)),
        dict(zip(WIDTHS, (0.6699, 0.7168, 0.7528, 0.7839, 0.8024), strict=True)),
    ),
}
ERROR_BARS_VGG = {
    "shampoo": (
        dict(zip(WIDTHS, (0.6330, 0.7010, 0.7465, 0.7651, 0.7789), strict=True)),
        dict(zip(WIDTHS, (0.6301, 0.7021, 0.7504, 0.7730, 0.7835), strict=True)),
    )
}


@recipe("resnet18-kfac-val-acc", "Appendix G.1, table", "Test accuracies of ResNet-18 on CIFAR-10")
def cifar10(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-18", "resnet18", "cifar10"): CIFAR10})


@recipe("resnet50-kfac-val-acc", "Appendix G.1, table", "Test accuracies of ResNet-50 on CIFAR-100")
def resnet50(scale: Scale) -> Experiment:
    return accuracies(scale, {("ResNet-50", "resnet50", "cifar100"): RESNET50})


@recipe("resnet-val-acc-err", "Appendix G.2, table", "Test accuracies with error bars")
def error_bars(scale: Scale) -> Experiment:
    wanted = {("VGG-19", "vgg19", "cifar100"): ERROR_BARS_VGG, ("ResNet-18", "resnet18", "cifar100"): ERROR_BARS}
    return accuracies(scale, wanted, seeds=5)


@recipe("distance-from-initial-weight", "Appendix G.3, figure", "Distance from the initial weights in the first epochs")
def distance(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {}
    for title, model, lr in (("VGG-19", "vgg19", 0.01), ("ResNet-50", "resnet50", 0.003)):
        own = OWN.get((model, "kfac"), {})
        made = both(scale, model, "cifar100", "kfac", lr, 1, WIDTHS[:4], record=("distance",), **own)
        parts.update({f"{title}, {scheme}": each for scheme, each in made.items()})
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
    return Experiment(parts, claims, drawing.over_epochs(rows, label="|dW| / |W|, mean over layers"), CHOICES)


def early_distance(title: str) -> Check:
    """After the first epoch: the widest's mean distance over the narrowest's, in SP and in muP."""

    def check(evidence: Evidence) -> Finding:
        ratios = {}
        for scheme in ("SP", "muP"):
            record = evidence.study(f"{title}, {scheme}")
            means = {}
            for result in record.results:
                first = next((row for row in result.rows if row["epoch"] == 1), {})
                if values := [value for name, value in first.items() if name.startswith("distance/") and value]:
                    means[result.point.width] = fmean(values)
            if len(means) < 2:
                return Finding(UNTOLD, f"{title}: too little was run")
            ratios[scheme] = means[max(means)] / means[min(means)]
        said = ", ".join(f"{scheme} {ratio:.2f}" for scheme, ratio in ratios.items())
        right = [ratios["SP"] < 0.7, ratios["muP"] >= 0.9]
        verdict = HOLDS if all(right) else IN_PART if any(right) else FAILS
        return Finding(verdict, f"{title}: distance after one epoch, widest over narrowest: {said}")

    return check
