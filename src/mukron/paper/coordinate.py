"""The recipes of coordinate checks: the change of features against the width."""

from __future__ import annotations

from mukron.diagnose.configured import usual_rate
from mukron.paper import drawing
from mukron.paper.claims import all_of
from mukron.paper.drawing import Panel
from mukron.paper.features import (
    column_exponent,
    damping_exponents,
    damping_valid,
    damping_valid_inside_only,
    decays,
    depends_on_width,
    learns,
)
from mukron.paper.recipe import Checking, Claim, Experiment, Part, Scale, recipe
from mukron.paper.settings import FLOOR, heuristic, powers, rescaled, setting, study

CHECK_SAMPLES, CHECK_STEPS = 256, 10  # appendix B
RATE_CHOICE = (
    "Learning rate: not given; small enough for ten steps to follow the law at every width (those of mukron check). No "
    "momentum."
)
SHAMPOO_CHOICE = (
    "Shampoo: narrower, as the roots of its matrices cost the cube of the width; damping 0.001 times the largest "
    "eigenvalue, as for Figure 3; roots by Newton's iteration."
)
CHECK_COLUMNS = {  # of the paper's figure, from left to right
    "K-FAC, SP": ("kfac", "sp", heuristic(1e-3)),
    "K-FAC, muP, heuristic": ("kfac", "mup", heuristic(1e-3)),
    "K-FAC, muP, rescaled": ("kfac", "mup", rescaled(1)),
    "Shampoo, SP": ("shampoo", "sp", "max-eigenvalue:0.001"),
    "Shampoo, muP": ("shampoo", "mup", "max-eigenvalue:0.001"),
}
CHECK_ROWS = [[column for column in CHECK_COLUMNS if column.startswith(method)] for method in ("K-FAC", "Shampoo")]


def widths_of(scale: Scale, model: str, method: str) -> tuple[float, ...]:
    """Returns the widths of a check: wide enough for the scaling law to show, narrow enough to be run."""
    top = {("mlp", "kfac"): 14, ("mlp", "shampoo"): 11, ("myrtle5", "kfac"): 9, ("myrtle5", "shampoo"): 8}
    low = 9 if model == "mlp" else 6
    if scale is Scale.SMOKE:
        return (64, 128) if model == "mlp" else (16, 32)
    if scale is Scale.SMALL:
        return powers(low - 1, low + 2) if method == "kfac" and model == "mlp" else powers(low - 2, low)
    high = top.get((model, method), 11)
    return powers(low - (method == "shampoo"), high)


def checking_of(scale: Scale, model: str, method: str, scheme: str, damping: str | None, **fields: object) -> Checking:
    """Returns the coordinate check of a network with a method, scheme and damping."""
    samples = scale.choose(8, 64, CHECK_SAMPLES)
    if method == "shampoo":
        fields.setdefault("method_options", {"solver": "newton"})
    config = setting(
        scale,
        **{"model": model, "method": method, "scheme": scheme, "damping": damping, "momentum": 0.0},
        **{"lr": usual_rate(method, scheme), "loss": "cross-entropy", **fields},
    ).replace(samples=samples)
    seeds, steps = scale.choose(1, 2, 2), scale.choose(2, CHECK_STEPS, CHECK_STEPS)
    return Checking(config, widths_of(scale, model, method), seeds, steps)


@recipe("coordinate", "Figure 1, row 1", "muP achieves feature learning across the width: MLP")
def coordinate(scale: Scale) -> Experiment:
    choices = (
        "Data: MNIST, as appendix B says; the caption says CIFAR-10.",
        "Widths: in the paper's plots alone; K-FAC 512 to 16384.",
        "Heuristic damping: rho is not given for this figure; 0.001, as for the MLP in the transfer figure.",
        *(RATE_CHOICE, SHAMPOO_CHOICE, FLOOR),
    )
    return figure_row(scale, "MLP", "mlp", "mnist", None, choices)


@recipe("coordinate-myrtle5", "Figure 1, row 2", "The same: Myrtle-5 on CIFAR-10")
def coordinate_myrtle(scale: Scale) -> Experiment:
    choices = (
        "Widths: in the paper's plots alone; K-FAC 64 to 512 channels.",
        "Heuristic damping: rho is not given for this figure; 0.001.",
        "Learning rate: not given; K-FAC 0.0001, since at 0.001 ten steps leave the law (256 samples x 1,024 positions "
        "are more rows than channels); Shampoo that of mukron check.",
        *(SHAMPOO_CHOICE, FLOOR),
    )
    return figure_row(scale, "Myrtle-5", "myrtle5", "cifar10", 1e-4, choices)


def figure_row(
    scale: Scale, title: str, model: str, data: str, kfac_lr: float | None, choices: tuple[str, ...]
) -> Experiment:
    """Returns a row of Figure 1: K-FAC in SP, in muP with the heuristic damping and in muP; Shampoo in SP and muP."""
    parts: dict[str, Part] = {}
    for column, (method, scheme, damping) in CHECK_COLUMNS.items():
        extra = {"lr": kfac_lr} if kfac_lr is not None and method == "kfac" else {}
        parts[f"{title}, {column}"] = checking_of(scale, model, method, scheme, damping, data=data, **extra)
    kfac, shampoo = f"{title}, K-FAC", f"{title}, Shampoo"
    claims = [
        Claim(f"{title}, K-FAC: in SP the change of features depends on the width.", depends_on_width(f"{kfac}, SP")),
        Claim(
            f"{title}, K-FAC: muP's weights and learning rates with the heuristic damping are not enough: the "
            "features' change decays.",
            decays(f"{kfac}, muP, heuristic"),
        ),
        Claim(f"{title}, K-FAC: with the rescaled damping it does not.", learns(f"{kfac}, muP, rescaled")),
        Claim(f"{title}, Shampoo: in SP the change depends on the width.", depends_on_width(f"{shampoo}, SP")),
        Claim(f"{title}, Shampoo: in muP it does not.", learns(f"{shampoo}, muP")),
        Claim(
            f"{title}, K-FAC: the rescaled damping scales as d_A = -1 and d_B = 1 ask for.",
            damping_exponents(f"{kfac}, muP, rescaled"),
        ),
        Claim(
            f"{title}, K-FAC: the rescaled damping is valid: it keeps its size beside every factor.",
            damping_valid(f"{kfac}, muP, rescaled"),
        ),
        Claim(
            f"{title}, K-FAC: the heuristic damping is valid in hidden layers, not in input and output layers.",
            damping_valid_inside_only(f"{kfac}, muP, heuristic"),
        ),
    ]
    panels = [[Panel(f"{title}: {column}", f"{title}, {column}") for column in row] for row in CHECK_ROWS]
    return Experiment(parts, claims, drawing.checks(panels), choices)


@recipe("ema-decay-dh", "Appendix D, figure", "An exponential moving average does not change the order")
def ema(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {}
    ema_decays = (0.9, 0.5)
    for method, damping in (("kfac", rescaled(1)), ("shampoo", "max-eigenvalue:0.001")):
        name = {"kfac": "K-FAC", "shampoo": "Shampoo"}[method]
        for decay in ema_decays:
            for scheme in ("sp", "mup"):
                title = f"{name}, {'SP' if scheme == 'sp' else 'muP'}, decay {decay:g}"
                options = {"memory": f"ema:{decay:g}", **({"solver": "newton"} if method == "shampoo" else {})}
                checking = checking_of(scale, "mlp", method, scheme, damping, data="cifar10", method_options=options)
                top = widths_of(scale, "mlp", "kfac")
                wide = tuple(width for width in top if width <= 4096) if method == "kfac" else checking.widths
                parts[title] = Checking(checking.config, wide, checking.seeds, checking.steps)
    titles = list(parts)
    claims = [
        Claim(
            "In muP features are learned at every width whatever the average's decay.",
            all_of(*(learns(title) for title in titles if "muP" in title)),
        ),
        Claim(
            "In SP it decays in the input and hidden layers whatever the decay.",
            all_of(*(decays(title, "fc1", "fc2") for title in titles if "SP" in title)),
        ),
    ]
    rows = [[Panel(title, title) for title in titles if title.startswith(name)] for name in ("K-FAC", "Shampoo")]
    choices = (
        "Decays: not given; 0.9 and 0.5 of the old statistic are kept.",
        "K-FAC to width 4096: a running average needs whole matrices, whose inverses cost the cube of the width.",
        *(RATE_CHOICE, SHAMPOO_CHOICE, FLOOR),
    )
    return Experiment(parts, claims, drawing.checks(rows), choices)


@recipe("dh-mlp-tanh", "Appendix D, figure", "muP achieves feature learning with tanh")
def tanh(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {
        column: checking_of(scale, "mlp", method, scheme, damping, data="mnist", model_options={"activation": "tanh"})
        for column, (method, scheme, damping) in CHECK_COLUMNS.items()
    }
    claims = [
        Claim("K-FAC: in SP the change of features depends on the width.", depends_on_width("K-FAC, SP")),
        Claim("K-FAC: with the heuristic damping it decays.", decays("K-FAC, muP, heuristic")),
        Claim("K-FAC: in muP with the rescaled damping it does not.", learns("K-FAC, muP, rescaled")),
        Claim("Shampoo: in SP it depends on the width.", depends_on_width("Shampoo, SP")),
        Claim("Shampoo: in muP it does not.", learns("Shampoo, muP")),
    ]
    choices = (RATE_CHOICE, SHAMPOO_CHOICE, FLOOR)
    return Experiment(
        parts, claims, drawing.checks([[Panel(column, column) for column in row] for row in CHECK_ROWS]), choices
    )


@recipe("k-fac-precond", "Figure 2", "The parametrization is consistent throughout training")
def precond(scale: Scale) -> Experiment:
    config = setting(
        scale,
        **{"model": "mlp", "data": "fashion-mnist", "samples": 1024, "loss": "cross-entropy", "method": "kfac"},
        **{"momentum": 0.0, "epochs": 50, "record": ("rates",), "evaluate_every": 50},
    )
    widths = scale.choose(powers(6, 7), powers(7, 10), powers(9, 13))
    seeds = scale.choose(1, 2, 2)
    part = study(scale, config, f"mup/{rescaled(1)}", widths=widths, lr=(0.001,), seeds=seeds, metric="train_loss")
    layers = {
        "input": ("rate/fc1.weight", 1.0),
        "hidden": ("rate/fc2.weight", 0.0),
        "output": ("rate/fc3.weight", -1.0),
    }
    claims = [
        Claim(
            f"The {name} layer's step over its gradient goes as width^{predicted:g}, from the first epoch to the last.",
            column_exponent("MLP", column, predicted),
        )
        for name, (column, predicted) in layers.items()
    ]
    panels = [[Panel(f"{name} layer", "MLP", quantity=column) for name, (column, _) in layers.items()]]
    choices = (
        "Samples, epochs and batch: not given; 1,024, 50 and full batch, as for most of the paper. No momentum: a step "
        "then shows its own preconditioner.",
        "Loss: not given; cross-entropy.",
        FLOOR,
    )
    return Experiment({"MLP": part}, claims, drawing.over_epochs(panels, label="step / gradient"), choices)


@recipe("gauss-newton-coordinate", "Appendix A.4.3", "Gauss-Newton, which the paper derives and does not run: features")
def gauss_newton_coordinate(scale: Scale) -> Experiment:
    parts: dict[str, Part] = {}
    for scheme, title in (("sp", "SP"), ("mup", "muP")):
        checking = checking_of(scale, "mlp", "gauss-newton", scheme, None, data="mnist", loss="mse")
        widths = scale.choose((64, 128), powers(7, 10), powers(8, 12))
        parts[title] = Checking(
            checking.config.replace(samples=scale.choose(8, 16, 32)), widths, checking.seeds, checking.steps
        )
    claims = [
        Claim("In muP with its damping features are learned at every width.", learns("muP"), ours=True),
        Claim("In SP the change of features depends on the width.", depends_on_width("SP"), ours=True),
    ]
    choices = (
        "32 samples: the method solves systems of samples x outputs.",
        "Loss: mse, for which the paper derives it.",
        RATE_CHOICE,
    )
    return Experiment(parts, claims, drawing.checks([[Panel("SP", "SP"), Panel("muP", "muP")]]), choices)
